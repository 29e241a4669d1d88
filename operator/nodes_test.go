// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/source"
)

const nodesOfEast = node.StatePrefix + "/east/"

func publishesNodes(t *testing.T, from source.NodeSource) func(*Config) {
	return func(c *Config) {
		n, err := NewNodes(NodesConfig{ClusterName: "east", ClusterID: 1, Source: from})
		if err != nil {
			t.Fatal(err)
		}
		c.Duties = []Duty{n}
	}
}

// nodeValue is what is published of a node with one address.
func nodeValue(t *testing.T, name, ip, from string) string {
	t.Helper()
	value, err := node.Node{
		Name: name, Cluster: "east", ClusterID: 1, Source: from, Addresses: []node.Address{{Type: node.InternalIP, IP: netip.MustParseAddr(ip)}},
	}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return string(value)
}

func leaseOf(t *testing.T, etcd *testutil.Etcd, key string) int64 {
	t.Helper()
	resp, err := etcd.Client().Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("%s: %v", key, err)
	}
	return resp.Kvs[0].Lease
}

// Nodes that files declare are published; one that an agent publishes is the agent's, with its value and its lease, and comes
// back when the agent's key is gone. What an operator left of nodes that are gone is removed; what agents and other clusters
// have is not.
//
// mechanism: M1 M2
func TestNodes(t *testing.T) {
	etcd, dir := testutil.StartEtcd(t), t.TempDir()
	lease, err := etcd.Client().Grant(t.Context(), 3600)
	if err != nil {
		t.Fatal(err)
	}
	agents := nodeValue(t, "n1", "172.18.1.99", "local")
	if _, err := etcd.Client().Put(t.Context(), nodesOfEast+"n1", agents, clientv3.WithLease(lease.ID)); err != nil {
		t.Fatal(err)
	}
	etcd.Put(t, nodesOfEast+"left", nodeValue(t, "left", "172.18.1.8", nodeSource))
	etcd.Put(t, nodesOfEast+"other", nodeValue(t, "other", "172.18.1.9", "local"))
	etcd.Put(t, nodesOfEast+"strange", "{")
	etcd.Put(t, node.StatePrefix+"/west/left", nodeValue(t, "left", "172.18.2.8", nodeSource))
	testutil.MustWriteFile(t, filepath.Join(dir, "nodes.yaml"), []byte("- {name: n1, ips: [172.18.1.1]}\n- {name: n2, ips: [172.18.1.2]}\n- {name: bad}\n"))
	from := source.NewNodeFiles(dir)
	runTask(t, from)
	r := startReplica(t, "replica", etcd.Endpoint(), publishesNodes(t, from))
	own := func(name, ip string) string { return nodeValue(t, name, ip, nodeSource) }
	want := map[string]string{"n1": agents, "n2": own("n2", "172.18.1.2"), "other": nodeValue(t, "other", "172.18.1.9", "local"), "strange": "{"}
	holds(t, etcd, nodesOfEast, want)
	if got := leaseOf(t, etcd, nodesOfEast+"n1"); got != int64(lease.ID) {
		t.Errorf("the agent's key has lease %x, not its own %x", got, lease.ID)
	}
	if leaseOf(t, etcd, nodesOfEast+"n2") == 0 {
		t.Error("a node of the operator's has no lease")
	}
	if problems := from.Problems(); len(problems) != 1 {
		t.Errorf("problems of the files: %q", problems)
	}

	// The agent dies; another one comes, for the other node.
	if _, err := etcd.Client().Revoke(t.Context(), lease.ID); err != nil {
		t.Fatal(err)
	}
	want["n1"] = own("n1", "172.18.1.1")
	holds(t, etcd, nodesOfEast, want)
	want["n2"] = nodeValue(t, "n2", "172.18.1.77", "local")
	etcd.Put(t, nodesOfEast+"n2", want["n2"])
	etcd.Put(t, nodesOfEast+"n1", own("n1", "172.18.1.66")) // not as it should be
	holds(t, etcd, nodesOfEast, want)
	testutil.Eventually(t, testTimeout, func() error {
		if s := r.Status().Duties[0]; s.Keys != 1 || s.Detail != "1 nodes published here, 1 by their agents" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})

	// Changed, gone, and in the hands of another operator.
	testutil.MustWriteFile(t, filepath.Join(dir, "nodes.yaml"), []byte("- {name: n3, ips: [172.18.1.3]}\n"))
	delete(want, "n1")
	want["n3"] = own("n3", "172.18.1.3")
	holds(t, etcd, nodesOfEast, want)
	before := leaseOf(t, etcd, nodesOfEast+"n3")
	startReplica(t, "other", etcd.Endpoint(), publishesNodes(t, from))
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	testutil.Eventually(t, testTimeout, func() error {
		if leaseOf(t, etcd, nodesOfEast+"n3") == before {
			return fmt.Errorf("the key is still under the former leader's lease")
		}
		return nil
	})
	etcd.Wipe(t)
	holds(t, etcd, nodesOfEast, map[string]string{"n3": want["n3"]})
	if _, ok := etcd.Get(t, node.StatePrefix+"/west/left"); ok {
		t.Error("what was emptied is there")
	}
}

// A directory that cannot be read is not one without nodes: what was published stays.
func TestNodesDirectoryMissing(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	etcd.Put(t, nodesOfEast+"left", nodeValue(t, "left", "172.18.1.8", nodeSource))
	dir := filepath.Join(t.TempDir(), "later")
	from := source.NewNodeFiles(dir)
	runTask(t, from)
	r := startReplica(t, "replica", etcd.Endpoint(), publishesNodes(t, from))
	awaitLeader(t, r)
	testutil.Eventually(t, testTimeout, func() error {
		if len(from.Problems()) == 0 || r.Status().Duties[0].Detail == "" {
			return fmt.Errorf("problems %v, status %+v", from.Problems(), r.Status().Duties[0])
		}
		return nil
	})
	if got := list(t, etcd, nodesOfEast); len(got) != 1 {
		t.Errorf("published: %v", got)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	testutil.MustWriteFile(t, filepath.Join(dir, "n.yaml"), []byte("name: n1\nips: [172.18.1.1]\n"))
	holds(t, etcd, nodesOfEast, map[string]string{"n1": nodeValue(t, "n1", "172.18.1.1", nodeSource)})
}
