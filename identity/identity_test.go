// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

func mustLayout(t *testing.T, clusters int) Layout {
	t.Helper()
	l, err := NewLayout(clusters)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestNumbers(t *testing.T) {
	layout := mustLayout(t, 255)
	for _, v := range golden.Lines[struct {
		ClusterID ClusterID `json:"cluster_id_255"`
		Identity  ID
		Name      string
		Reserved  bool
		Labels    string
		ID        ID `json:"reserved_identity"`
	}](t, "identity.jsonl") {
		id := v.Identity + v.ID
		if got := id.String(); got != v.Name {
			t.Errorf("name of %d: got %q, want %q", uint32(id), got, v.Name)
		}
		if got, err := ParseID(v.Name); err != nil || got != id {
			t.Errorf("ParseID(%q) = %d, %v, want %d", v.Name, uint32(got), err, uint32(id))
		}
		if v.Labels != "" {
			if labels, ok := ReservedLabels(id); !ok || labels.String() != v.Labels {
				t.Errorf("labels of %s: got %q, want %q", id, labels, v.Labels)
			}
			continue
		}
		if id.Reserved() != v.Reserved {
			t.Errorf("%d: reserved is %v, want %v", uint32(id), id.Reserved(), v.Reserved)
		}
		if got := layout.Cluster(id); got != v.ClusterID {
			t.Errorf("cluster of %d: got %d, want %d", uint32(id), got, v.ClusterID)
		}
	}
	for _, s := range []string{"", "-1", "4294967296", "hosts", "0x10"} {
		if id, err := ParseID(s); err == nil {
			t.Errorf("ParseID(%q) = %d, want an error", s, uint32(id))
		}
	}
}

func TestRanges(t *testing.T) {
	for _, v := range golden.Lines[struct {
		Max       int       `json:"max_connected_clusters"`
		ClusterID ClusterID `json:"cluster_id"`
		Min       ID        `json:"min_identity"`
		MaxID     ID        `json:"max_identity"`
	}](t, "identity-ranges.jsonl") {
		layout := mustLayout(t, v.Max)
		lo, hi := layout.Range(v.ClusterID)
		if lo != v.Min || hi != v.MaxID {
			t.Errorf("%d of %d clusters: got %d to %d, want %d to %d", v.ClusterID, v.Max, lo, hi, v.Min, v.MaxID)
		}
		for _, id := range []ID{lo, hi} {
			if layout.Cluster(id) != v.ClusterID || !layout.Contains(v.ClusterID, id) {
				t.Errorf("%d of %d clusters does not contain its own %d", v.ClusterID, v.Max, id)
			}
		}
		if layout.Contains(v.ClusterID, lo-1) || layout.Contains(v.ClusterID, hi+1) {
			t.Errorf("%d of %d clusters contains what is not its own", v.ClusterID, v.Max)
		}
	}
	if _, err := NewLayout(256); err == nil {
		t.Error("a layout for 256 clusters was accepted")
	}
}

func TestLabels(t *testing.T) {
	for _, v := range golden.Lines[struct {
		Decoded []string `json:"decoded_source|key|value"`
		Encoded string
		Labels  []string
	}](t, "labels.jsonl") {
		var labels []Label
		for _, s := range v.Labels {
			labels = append(labels, ParseLabel(s))
		}
		set := MakeLabels(labels...)
		if got := set.String(); got != v.Encoded {
			t.Errorf("%v: encoded as %q, want %q", v.Labels, got, v.Encoded)
		}
		var decoded []string
		for _, l := range ParseLabels(v.Encoded) {
			decoded = append(decoded, l.Source+"|"+l.Key+"|"+l.Value)
		}
		if diff := cmp.Diff(v.Decoded, decoded); diff != "" {
			t.Errorf("%q: decoded (-want +got):\n%s", v.Encoded, diff)
		}
	}
	set := ParseLabels("k8s:a=1;$host;;k8s:a=2;")
	if got, want := set.String(), "k8s:a=2;reserved:host=;"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, ok := set.Get("container", "a"); ok {
		t.Error("Get found a label of another source")
	}
}

// mechanism: J1
func TestKeys(t *testing.T) {
	labels := MakeLabels(Label{"k8s", "u", "http://h"})
	if got, want := SlaveKey(labels, netip.MustParseAddr("1.2.3.4")),
		"cilium/state/identities/v1/value/k8s:u=http:/h;/1.2.3.4"; got != want {
		t.Errorf("slave key: got %q, want %q", got, want)
	}
	if got, want := MasterKey(65793), "cilium/state/identities/v1/id/65793"; got != want {
		t.Errorf("master key: got %q, want %q", got, want)
	}
	if got, want := CachePrefix(StatePrefix), "cilium/cache/identities/v1"; got != want {
		t.Errorf("cache prefix: got %q, want %q", got, want)
	}
}

func TestParseEntry(t *testing.T) {
	const labels = "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=west;"
	layout := mustLayout(t, 255)
	for _, v := range []struct{ name, key, value, want string }{
		{"good", "131329", labels, ""},
		{"first of the range", "131072", labels, ""},
		{"empty", "131329", "", ErrEmpty.Error()},
		{"another cluster's number", "65793", labels, "outside the cluster's range 131072 to 196607"},
		{"reserved number", "1", labels, "outside the cluster's range"},
		{"no number", "abc", labels, "not a decimal number"},
		{"too large", "4294967296", labels, "not a decimal number"},
		{"another cluster's name", "131329", "k8s:io.cilium.k8s.policy.cluster=east;", `got "east", expected "west"`},
		{"name from another source", "131329", "any:io.cilium.k8s.policy.cluster=west;", "is missing"},
		{"no name", "131329", "k8s:app=web;", "is missing"},
	} {
		id, got, err := ParseEntry(layout, 2, "west", v.key, []byte(v.value))
		if v.want != "" {
			if err == nil || !strings.Contains(err.Error(), v.want) {
				t.Errorf("%s: got error %v, want one with %q", v.name, err, v.want)
			}
			continue
		}
		if err != nil || got.String() != labels || id.String() != v.key {
			t.Errorf("%s: got %v %q %v", v.name, id, got, err)
		}
	}
}

// mechanism: A3
func TestClusterNames(t *testing.T) {
	for _, v := range golden.Verdicts(t, "cluster-name") {
		if err := ValidateClusterName(v.Name); (err == nil) != v.Accepted {
			t.Errorf("%q: got %v, want accepted=%v (%s)", v.Name, err, v.Accepted, v.Error)
		}
	}
	for _, name := range []string{strings.Repeat("a", 33), "a-", "a.b", "a/b", "..", "a\n"} {
		if ValidateClusterName(name) == nil {
			t.Errorf("%q was accepted", name)
		}
	}
}

func TestClusterConfig(t *testing.T) {
	for _, v := range golden.Verdicts(t, "cluster-config") {
		config, err := ParseClusterConfig([]byte(v.Value))
		if err == nil {
			err = config.Validate(mustLayout(t, v.LocalMax))
		}
		switch {
		case v.Accepted && err != nil:
			t.Errorf("%s for %d clusters: %v", v.Value, v.LocalMax, err)
		case !v.Accepted && (err == nil || err.Error() != v.Error):
			t.Errorf("%s for %d clusters: got %v, want %s", v.Value, v.LocalMax, err, v.Error)
		}
	}
	if _, err := ParseClusterConfig([]byte(`{"id":-1}`)); err == nil {
		t.Error("a negative id was accepted")
	}
	const wire = `{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255,"serviceExportsEnabled":false,"endpointSlicesExportMode":"services-and-endpointslices"}}`
	config, err := ParseClusterConfig([]byte(wire))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := json.Marshal(config); err != nil || string(got) != wire {
		t.Errorf("got %s, %v, want %s", got, err, wire)
	}
}

func TestTable(t *testing.T) {
	table := NewTable()
	labels := ParseLabels("k8s:app=web;")
	table.Upsert(131329, labels)
	if got, ok := table.Labels(131329); !ok || got.String() != labels.String() {
		t.Errorf("got %q, %v", got, ok)
	}
	if got, ok := table.Labels(RemoteNode); !ok || got.String() != "reserved:remote-node=;" {
		t.Errorf("remote-node: got %q, %v", got, ok)
	}
	for id := range table.All() {
		if id != 131329 || table.Len() != 1 {
			t.Errorf("unexpected identity %d of %d", id, table.Len())
		}
	}
	table.Delete(131329)
	table.Delete(131329)
	if _, ok := table.Labels(131329); ok || table.Len() != 0 {
		t.Error("a deleted identity is still there")
	}
}

func TestWorldOf(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	if WorldOf(v4, false) != World || WorldOf(v6, false) != World {
		t.Error("a single-stack node knows more than one world")
	}
	if WorldOf(v4, true) != WorldIPv4 || WorldOf(v6, true) != WorldIPv6 {
		t.Error("a dual-stack node does not tell its worlds apart")
	}
}
