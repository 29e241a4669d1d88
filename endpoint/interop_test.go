// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// Beside what a real cluster has in its etcd: labels that it knows keep its identity, new ones get a free one of its
// range, and what it wrote stays as it is.
//
// mechanism: J1, J5
func TestAllocatesBesideARecordedCluster(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, golden.Path(t, "kvstore-state-east.jsonl"))
	before := recorded(t)
	a := startAllocator(t, etcd, "172.18.1.77")
	b := newBench(t, func(c *Config) {
		c.Publisher, c.Allocator, c.Leftovers, c.HostIP, c.NodeName = a.writer, a.Allocator, a.client, a.host, "east-n77"
	})
	b.write("a.yaml", "- {name: w, namespace: shop, ip: 10.1.77.1, labels: {app: web}}\n- {name: d, namespace: shop, ip: 10.1.77.2, labels: {app: db}}\n"+
		"- {name: n, namespace: shop, ip: 10.1.77.3, labels: {app: new}}\n")
	testutil.Eventually(t, patience, func() error {
		b.scan(true)
		for _, e := range b.Status().Endpoints {
			if e.State != Identified {
				return errors.New(e.Name + " waits")
			}
		}
		return nil
	})
	if err := b.withdraw(t.Context(), directly); err != nil {
		t.Fatal(err)
	}
	if err := a.writer.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	ids := make(map[string]identity.ID)
	for _, e := range b.Status().Endpoints {
		ids[e.Name] = e.Identity
	}
	if ids["w"] != 65793 || ids["d"] != 65794 || ids["n"] == 65793 || ids["n"] == 65794 {
		t.Errorf("identities %v", ids)
	}
	for key, want := range before {
		// Values that are not text are not in the map.
		if got, ok := etcd.Get(t, key); !ok || got != want && want != "" {
			t.Errorf("%s is %q, was %q", key, got, want)
		}
	}
	checkRules(t, a)
}

// checkRules holds every key of identities to the rules that all who write them share.
func checkRules(t *testing.T, a *allocating) {
	t.Helper()
	keys, _, err := a.client.List(t.Context(), identity.StatePrefix+"/")
	if err != nil {
		t.Fatal(err)
	}
	layout, masters := mustLayout(t), make(map[string]string)
	for _, kv := range keys {
		if number, ok := strings.CutPrefix(kv.Key, identity.StatePrefix+"/id/"); ok {
			masters[number] = string(kv.Value)
			_, labels, err := identity.ParseEntry(layout, 1, "east", number, kv.Value)
			if err != nil || labels.String() != string(kv.Value) || kv.Lease != 0 {
				t.Errorf("%s = %q, lease %s: %v", kv.Key, kv.Value, kv.Lease, err)
			}
		}
	}
	for _, kv := range keys {
		rest, ok := strings.CutPrefix(kv.Key, identity.StatePrefix+"/value/")
		if !ok {
			if strings.HasPrefix(kv.Key, identity.StatePrefix+"/locks/") {
				t.Errorf("%s is left behind", kv.Key)
			}
			continue
		}
		at := strings.LastIndex(rest, "/")
		if _, err := netip.ParseAddr(rest[at+1:]); err != nil || masters[string(kv.Value)] != rest[:at] {
			t.Errorf("%s = %s, whose master says %q: %v", kv.Key, kv.Value, masters[string(kv.Value)], err)
		}
		if strings.HasSuffix(kv.Key, "/"+a.host.String()) && kv.Lease == 0 {
			t.Errorf("%s has no lease", kv.Key)
		}
		if n, err := strconv.ParseUint(string(kv.Value), 10, 32); err != nil || strconv.FormatUint(n, 10) != string(kv.Value) {
			t.Errorf("%s = %q: %v", kv.Key, kv.Value, fmt.Errorf("want a decimal number: %w", err))
		}
	}
}
