// SPDX-License-Identifier: Apache-2.0

package service

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

func TestRoundTrip(t *testing.T) {
	for key, value := range golden.Values(t, "/services/v1/") {
		s, err := Parse([]byte(value))
		if err != nil {
			t.Errorf("%s: %v", key, err)
			continue
		}
		if err := s.Validate(s.Namespace+"/"+s.Name, s.Cluster, s.ClusterID); err != nil {
			t.Errorf("%s: %v", key, err)
		}
		got, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		// Addresses are sorted as values, not as text: compare what was written, not the order.
		var a, b any
		if json.Unmarshal([]byte(value), &a) != nil || json.Unmarshal(got, &b) != nil {
			t.Fatal("not JSON")
		}
		if diff := cmp.Diff(a, b); diff != "" {
			t.Errorf("%s (-want +got):\n%s", key, diff)
		}
	}
}

func TestValidate(t *testing.T) {
	for _, v := range golden.Verdicts(t, "service") {
		s, err := Parse([]byte(v.Value))
		if err == nil {
			err = s.Validate(v.Key, v.Cluster, v.ClusterID)
		}
		if (err == nil) != v.Accepted {
			t.Errorf("%s: got %v, want accepted=%v (%s)", v.Value, err, v.Accepted, v.Error)
		}
		o, err := ParseOffer([]byte(v.Value))
		if err == nil {
			err = o.Validate(v.Key, v.Cluster, v.ClusterID)
		}
		if (err == nil) != v.Accepted {
			t.Errorf("%s: as an offer: got %v, want accepted=%v (%s)", v.Value, err, v.Accepted, v.Error)
		}
	}
	for name, value := range map[string]string{
		"CIDR as backend":  `{"backends":{"10.0.0.0/8":{}}}`,
		"zone as backend":  `{"backends":{"fe80::1%eth0":{}}}`,
		"empty frontend":   `{"frontends":{"":{}}}`,
		"port of 17 bits":  `{"backends":{"10.0.0.1":{"http":{"Protocol":"TCP","Port":65536}}}}`,
		"not JSON":         `x`,
		"backends no map":  `{"backends":[]}`,
		"negative cluster": `{"clusterID":-1}`,
	} {
		if s, err := Parse([]byte(value)); err == nil {
			t.Errorf("%s: accepted as %+v", name, s)
		}
		if o, err := ParseOffer([]byte(value)); err == nil {
			t.Errorf("%s: accepted as %+v", name, o)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, value := range golden.Values(f, "/services/v1/") {
		f.Add([]byte(value))
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		s, err := Parse(value)
		if err != nil {
			return
		}
		encoded, err := json.Marshal(s)
		if err != nil {
			t.Fatalf("cannot encode what was decoded: %v", err)
		}
		if _, err := Parse(encoded); err != nil {
			t.Fatalf("cannot decode what was encoded: %v\n%s", err, encoded)
		}
	})
}
