// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// event is a change in the words of the recording.
type event struct {
	Op, Prefix string
	Host       string `json:"host_ip"`
	Key        uint8  `json:"encrypt_key"`
	Identity   identity.ID
	Source     string
}

// step is one step of a recorded scenario, and what Cilium's own table announced after it.
type step struct {
	Do, IP, Source, Scenario, Error string
	Host                            string `json:"host_ip"`
	Key                             uint8  `json:"encrypt_key"`
	Identity                        identity.ID
	Events                          []event
	Step                            int
}

func (s step) String() string { return fmt.Sprintf("%s/%d", s.Scenario, s.Step) }

// ops are the step as a writer of ours makes it; none if the IP is no prefix. The recording knows no owners: an identity
// tells its cluster, and what is deleted is what cluster 2 or, outside of any mesh, this one said.
func (s step) ops(t *testing.T) []Op {
	p, isCIDR, ok := parse(t, s.IP)
	if !ok {
		return nil // what is no prefix has no type to reach the table in
	}
	c := Claim{Prefix: p, CIDR: isCIDR, Entry: Entry{Identity: s.Identity, Host: host(s.Host), EncryptKey: s.Key}}
	if err := c.Owner.Source.UnmarshalText([]byte(s.Source)); err != nil {
		t.Fatal(err)
	}
	if c.Owner.Source == ClusterMesh {
		if c.Owner.Cluster = 2; s.Do == "upsert" {
			c.Owner.Cluster = identity.ClusterID(s.Identity >> 16)
		}
	}
	return []Op{{Delete: s.Do == "delete", Claim: c}}
}

// events tells what a reader was given in the words of the recording.
func events(changes []Change) (all []event) {
	for _, c := range changes {
		e := event{Op: "Delete", Prefix: c.Prefix.String()}
		if !c.Deleted {
			e = event{"Upsert", e.Prefix, "", c.Entry.EncryptKey, c.Entry.Identity, c.Owner.Source.String()}
			if c.Entry.Host.IsValid() {
				e.Host = c.Entry.Host.String()
			}
		}
		all = append(all, e)
	}
	return all
}

// different is where the table knowingly does something else than what was recorded.
var different = map[string][]event{
	// A claim that lost is kept, so that no hole remains when the winner goes: deleting the strongest claim brings
	// back the next one (k8s), which Cilium has forgotten.
	"source-precedence/5": {{"Upsert", "10.2.1.10/32", "172.18.1.1", 0, 65793, "k8s"}},
	// Of two clusters that claim one address the lowest id wins, whoever spoke last: else the winner would depend on which
	// connection was faster, and differ from node to node.
	"same-source-overwrite-two-clusters/1": nil,
	// Deleting one cluster's claim leaves the other's, which Cilium takes away with it.
	"same-source-overwrite-two-clusters/2": {{"Upsert", "10.9.9.9/32", "172.18.3.1", 0, 196865, "clustermesh"}},
}

// TestScenarios replays what Cilium's own table was seen to do, and compares what readers are told. Not in the recording
// is an upsert that changes nothing: Cilium announces it again, here nobody hears of it (TestChanged).
//
// mechanism: G1, G2, G4, G5, G6, G7, G8
func TestScenarios(t *testing.T) {
	var (
		table    *Table
		f        *follower
		scenario string
	)
	steps := golden.Lines[step](t, "ipcache-scenarios.jsonl")
	if len(steps) != 25 {
		t.Fatalf("%d steps, want 25", len(steps))
	}
	met := 0
	for _, s := range steps {
		if s.Scenario != scenario {
			table, scenario = New(), s.Scenario
			f = newFollower(table, 16)
		}
		if refused := table.Apply(s.ops(t)); refused != 0 {
			t.Errorf("%s: refused", s)
		}
		f.log = nil
		f.catchUp()
		want := s.Events
		if d, ok := different[s.String()]; ok {
			want = d
			met++
		}
		for i := range want {
			if want[i].Op == "Delete" { // what was deleted is the reader's to know
				want[i] = event{Op: "Delete", Prefix: want[i].Prefix}
			}
		}
		if diff := cmp.Diff(want, events(f.log), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: events (-want +got):\n%s", s, diff)
		}
	}
	if met != len(different) {
		t.Errorf("%d of the %d known differences were met", met, len(different))
	}
}

// mechanism: G2
func TestPrecedence(t *testing.T) {
	ranks, pairs := 0, 0
	for _, v := range golden.Lines[struct {
		Rank                  *int
		Allowed               *bool
		Source, Existing, New Source
	}](t, "source-precedence.jsonl") {
		if v.Allowed == nil {
			if ranks++; int(v.Source) != *v.Rank {
				t.Errorf("%s has rank %d, want %d", v.Source, uint8(v.Source), *v.Rank)
			}
			continue
		}
		pairs++
		table := New()
		p := netip.MustParsePrefix("10.0.0.1/32")
		table.Apply([]Op{
			{Claim: Claim{Prefix: p, Owner: Owner{Source: v.Existing}, Entry: Entry{Identity: 1}}},
			{Claim: Claim{Prefix: p, Owner: Owner{Source: v.New}, Entry: Entry{Identity: 2}}},
		})
		winner, _ := table.Get(p)
		if won := winner.Entry.Identity == 2; won != *v.Allowed {
			t.Errorf("%s over %s: got %v, want %v", v.New, v.Existing, won, *v.Allowed)
		}
	}
	if ranks != 11 || pairs != 11*11 {
		t.Errorf("%d ranks and %d pairs were tried, want 11 and 121", ranks, pairs)
	}
}
