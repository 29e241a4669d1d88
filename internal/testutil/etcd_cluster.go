// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	"go.etcd.io/etcd/server/v3/embed"
)

// EtcdCluster is several Etcds that are members of one cluster.
type EtcdCluster struct {
	Members []*Etcd
}

// member is what a member of a cluster must be told of it.
type member struct {
	name, peer string   // its name and its host:port for the others
	all        []string // name=URL of each
}

func (m *member) configure(cfg *embed.Config) {
	peer := url.URL{Scheme: "http", Host: m.peer}
	cfg.Name = m.name
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = strings.Join(m.all, ",")
	// An election must not be lost to a busy machine.
	cfg.TickMs, cfg.ElectionMs = 50, 500
}

// StartEtcdCluster starts n members and returns when all serve.
func StartEtcdCluster(t testing.TB, n int) *EtcdCluster {
	t.Helper()
	c, token := &EtcdCluster{}, newEtcdToken()
	var all []string
	for i := range n {
		e := newEtcd(t)
		e.token = token
		e.member = &member{name: fmt.Sprintf("m%d", i), peer: freePort(t)}
		all = append(all, fmt.Sprintf("%s=http://%s", e.member.name, e.member.peer))
		c.Members = append(c.Members, e)
	}
	for _, e := range c.Members {
		e.member.all = all
		e.begin(t)
	}
	for _, e := range c.Members {
		e.awaitReady(t)
	}
	return c
}

// Endpoints are the URLs of all members.
func (c *EtcdCluster) Endpoints() []string {
	var urls []string
	for _, e := range c.Members {
		urls = append(urls, e.Endpoint())
	}
	return urls
}

// Leader waits until some running member leads, in the opinion of a majority, and returns it.
func (c *EtcdCluster) Leader(t testing.TB) *Etcd {
	t.Helper()
	var leader *Etcd
	Eventually(t, etcdStartTimeout, func() error {
		votes := make(map[uint64]int)
		for _, e := range c.Members {
			if e.server != nil {
				votes[uint64(e.server.Server.Leader())]++
			}
		}
		for _, e := range c.Members {
			if e.server != nil && votes[uint64(e.server.Server.MemberID())] > len(c.Members)/2 {
				leader = e
				return nil
			}
		}
		return errors.New("no member leads")
	})
	return leader
}

// Isolate has a member and the others lose what they tell each other. Clients still reach it.
func (c *EtcdCluster) Isolate(apart *Etcd) {
	for _, e := range c.others(apart) {
		e.server.Server.CutPeer(apart.server.Server.MemberID())
		apart.server.Server.CutPeer(e.server.Server.MemberID())
	}
}

// Rejoin ends what Isolate began, and waits until all agree who leads.
func (c *EtcdCluster) Rejoin(t testing.TB, apart *Etcd) {
	t.Helper()
	others := c.others(apart)
	for _, e := range others {
		e.server.Server.MendPeer(apart.server.Server.MemberID())
		apart.server.Server.MendPeer(e.server.Server.MemberID())
	}
	Eventually(t, etcdStartTimeout, func() error {
		leader := apart.server.Server.Leader()
		for _, e := range others {
			if leader == 0 || e.server.Server.Leader() != leader {
				return errors.New("the members do not agree who leads")
			}
		}
		return nil
	})
}

func (c *EtcdCluster) others(than *Etcd) []*Etcd {
	var others []*Etcd
	for _, e := range c.Members {
		if e != than && e.server != nil {
			others = append(others, e)
		}
	}
	return others
}

// freePort returns a loopback host:port that nobody has at the moment.
func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", anyPort)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
