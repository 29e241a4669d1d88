// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/service"
)

// services decodes the services that a cluster shares.
type services struct {
	table   *service.Table
	cluster identity.ClusterID
	name    string
	gate    *gate // nil for our own cluster, which may claim anything

	known map[string]*knownService // by "namespace/name"
}

// knownService is a service that is in use.
type knownService struct {
	said service.Service // by the cluster
	left int             // how many of its addresses are left out
}

var _ decoder = (*services)(nil)

func (d *services) upsert(key, value []byte, _ int64) error {
	if _, _, ok := parseServiceKey(string(key)); !ok {
		return refuse(reasonMalformed, fmt.Errorf("service key %q is not of the form namespace/name", key))
	}
	s, err := service.Parse(value)
	if err != nil {
		return refuse(reasonMalformed, err)
	}
	if err := s.Validate(string(key), d.name, uint32(d.cluster)); err != nil {
		return refuse(reasonMismatch, err)
	}
	used, left, err := d.admit(s)
	d.known[string(key)] = &knownService{s, left}
	d.table.Upsert(used)
	return err
}

// admit returns the service without the addresses that the cluster may not claim, and how many these are: one bad backend
// must not take the good ones with it, nor be used. The refusal is that of the first of them.
func (d *services) admit(s service.Service) (used service.Service, left int, err error) {
	if d.gate == nil {
		return s, 0, nil
	}
	judge := func(side map[netip.Addr]service.Ports, check func(netip.Prefix) error) map[netip.Addr]service.Ports {
		var bad []netip.Addr
		for addr := range side {
			if check(single(addr.Unmap())) != nil {
				bad = append(bad, addr)
			}
		}
		if len(bad) == 0 {
			return side
		}
		if err == nil {
			first := slices.MinFunc(bad, netip.Addr.Compare)
			err = check(single(first.Unmap()))
		}
		left += len(bad)
		side = maps.Clone(side)
		for _, addr := range bad {
			delete(side, addr)
		}
		return side
	}
	s.Backends = judge(s.Backends, d.backend)
	s.Frontends = judge(s.Frontends, func(p netip.Prefix) error { return d.gate.prefix(p, useVIP, false) })
	if err != nil {
		err = partly(fmt.Errorf("%d addresses left out, of which the first: %w", left, err))
	}
	return s, left, err
}

// backend checks an address to which packets for the service would go: a workload's, or that of a node for a workload in
// its network.
func (d *services) backend(p netip.Prefix) error {
	err := d.gate.prefix(p, usePod, false)
	if err != nil && d.gate.prefix(p, useNode, false) == nil {
		return nil
	}
	return err
}

func (d *services) remove(key []byte) {
	if namespace, name, ok := parseServiceKey(string(key)); ok {
		d.table.Delete(d.name, namespace, name)
		delete(d.known, string(key))
	}
}

func (d *services) withdraw(key []byte) { d.remove(key) }

// rejudge looks at all services again.
func (d *services) rejudge(_ []ipcache.Claim, report func(key []byte, err error)) {
	for key, k := range d.known {
		used, left, err := d.admit(k.said)
		if left == k.left && left == 0 {
			continue
		}
		d.table.Upsert(used)
		if left != k.left {
			report([]byte(key), err)
		}
		k.left = left
	}
}

// parseServiceKey reads "namespace/name". With more slashes than one a key could stand for several services.
func parseServiceKey(key string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(key, "/")
	return namespace, name, ok && namespace != "" && name != "" && !strings.Contains(name, "/") && plainName(namespace) && plainName(name)
}

func (d *services) flush(time.Time) {}
