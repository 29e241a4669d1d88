// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// The reason given for a winner is the one that decided: taken away, it decides no more.
func TestPrecedenceOfClaims(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) ipcache.Claim {
			return ipcache.Claim{
				Prefix: prefix("10.2.1.10/32"), CIDR: rapid.Bool().Draw(t, name+" cidr"), Revision: rapid.Int64Range(0, 2).Draw(t, name+" revision"),
				Owner: ipcache.Owner{
					Cluster: identity.ClusterID(rapid.IntRange(1, 3).Draw(t, name+" cluster")),
					Source:  ipcache.Source(rapid.IntRange(0, 3).Draw(t, name+" source")),
					Object:  rapid.SampledFrom([]string{"ip", "node/a", "node/b"}).Draw(t, name+" object"),
				},
			}
		}
		a, b := draw("a"), draw("b")
		if a.Compare(b) > 0 {
			a, b = b, a
		}
		if a.Compare(b) == 0 {
			return
		}
		reason, equal := precedence(&a, &b), b
		switch {
		case strings.Contains(reason, "CIDR"):
			equal.CIDR = a.CIDR
		case strings.Contains(reason, "source"):
			equal.Owner.Source = a.Owner.Source
		case strings.Contains(reason, "cluster id"):
			equal.Owner.Cluster = a.Owner.Cluster
		case strings.Contains(reason, "revision"):
			equal.Revision = a.Revision
		case strings.Contains(reason, "name"):
			equal.Owner.Object = a.Owner.Object
		default:
			t.Fatalf("no reason: %q", reason)
		}
		// With the reason gone, what is left decides by a lesser one.
		if again := a.Compare(equal); again != 0 && precedence(&a, &equal) == reason {
			t.Errorf("%q still decides between %+v and %+v", reason, a, equal)
		}
		// And nothing that counts more differs.
		if a.CIDR != b.CIDR && !strings.Contains(reason, "CIDR") || a.CIDR == b.CIDR && a.Owner.Source != b.Owner.Source && !strings.Contains(reason, "source") {
			t.Errorf("%q between %+v and %+v", reason, a, b)
		}
	})
}

func TestClaimAge(t *testing.T) {
	e := labExplanation(addr("10.2.1.10"))
	for i, want := range []string{"3m12s", "over 2h0m", "-"} {
		if got := claimAge(testNow.Local().In(time.UTC), &e.Claims[i]); got != want {
			t.Errorf("claim %d: %q, want %q", i, got, want)
		}
	}
}
