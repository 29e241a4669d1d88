// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// testAccess is what the tests here want.
func testAccess() Access {
	return Access{
		Roles: []Role{
			{Name: RootRole},
			{Name: "reader", Grants: []Grant{{Key: "p/", Prefix: true}, {Key: "k"}}},
			{Name: "writer", Grants: []Grant{{Key: "p/", Prefix: true, Write: true}}},
		},
		Users: []User{
			{Name: "root", Role: RootRole}, {Name: "admin", Role: RootRole, Password: testutil.Password},
			{Name: "r1", Role: "reader"}, {Name: "r2", Role: "reader"}, {Name: "w", Role: "writer"},
		},
		Prune: []string{"reader"},
	}
}

func lines(changes []AccessChange) string {
	var b strings.Builder
	for _, x := range changes {
		b.WriteString(x.String() + "\n")
	}
	return b.String()
}

func TestAccess(t *testing.T) {
	for _, start := range []struct {
		name  string
		start func(t *testing.T) accessServer
	}{
		{"etcd 3.7", func(t *testing.T) accessServer { return testutil.StartEtcd(t) }},
		{"etcd 3.4", func(t *testing.T) accessServer { return testutil.StartEtcd34(t) }},
	} {
		t.Run(start.name, func(t *testing.T) {
			e := start.start(t)
			c, err := Dial(Config{
				Endpoints: []string{e.Endpoint()}, QPS: 10_000, Username: "admin", Password: testutil.Password,
			}, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			plan := mustPlan(t, c, testAccess())
			want := `add role root
add role reader
add role writer
let role reader read the keys that begin with p/
let role reader read key k
let role writer read and write the keys that begin with p/
add user root
add user admin
add user r1
add user r2
add user w
give role root to user root
give role root to user admin
give role reader to user r1
give role reader to user r2
give role writer to user w
enable authentication: etcd asks everybody who they are
`
			if got := lines(plan); got != want {
				t.Fatalf("plan:\n%s\nwant\n%s", got, want)
			}
			if done, err := c.ApplyAccess(t.Context(), plan[:5]); err != nil || len(done) != 5 {
				t.Fatalf("half of it: %d done, %v", len(done), err)
			}
			rest := mustPlan(t, c, testAccess()) // what was begun is gone on with
			if got := lines(rest); got != strings.Join(strings.SplitAfter(want, "\n")[5:], "") {
				t.Fatalf("the rest:\n%s", got)
			}
			if _, err := c.ApplyAccess(t.Context(), rest); err != nil {
				t.Fatal(err)
			}
			if again := mustPlan(t, c, testAccess()); len(again) != 0 {
				t.Errorf("done, and planned again: %s", lines(again))
			}
		})
	}
}

// accessServer is an etcd of any version.
type accessServer interface{ Endpoint() string }

func mustPlan(t *testing.T, c *Client, want Access) []AccessChange {
	t.Helper()
	plan, err := c.PlanAccess(t.Context(), want)
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// What somebody has widened is narrowed again, and who is no longer wanted is
// deleted; roles and users that are none of ours stay.
func TestAccessNarrows(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, func(cfg *Config) { cfg.Username, cfg.Password = "admin", testutil.Password })
	if _, err := c.ApplyAccess(t.Context(), mustPlan(t, c, testAccess())); err != nil {
		t.Fatal(err)
	}
	etcd, ctx := c.etcd, t.Context()
	grant := func(role, key, end string, kind clientv3.PermissionType) func() error {
		return func() error { _, err := etcd.RoleGrantPermission(ctx, role, key, end, kind); return err }
	}
	give := func(user, role string) func() error {
		return func() error { _, err := etcd.UserGrantRole(ctx, user, role); return err }
	}
	add := func(user string) func() error {
		return func() error { _, err := etcd.UserAdd(ctx, user, "x"); return err }
	}
	readWrite := clientv3.PermissionType(clientv3.PermReadWrite)
	for i, step := range []func() error{
		grant("reader", "p/", clientv3.GetPrefixRangeEnd("p/"), readWrite),
		grant("reader", "secret", "", clientv3.PermissionType(clientv3.PermRead)),
		grant("reader", "a", "c", readWrite),
		give("r1", "writer"), add("stale"), give("stale", "reader"),
		add("both"), give("both", "reader"), give("both", "writer"), add("nobody"),
		func() error { _, err := etcd.RoleAdd(ctx, "theirs"); return err }, add("them"), give("them", "theirs"),
	} {
		if err := step(); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	want := `let role reader read the keys that begin with p/
take role writer from user r1
no longer let role reader read and write key a up to "c"
no longer let role reader read key secret
delete user stale
`
	plan := mustPlan(t, c, testAccess())
	if got := lines(plan); got != want {
		t.Fatalf("plan:\n%s\nwant\n%s", got, want)
	}
	if done, err := c.ApplyAccess(ctx, plan); err != nil || len(done) != len(plan) {
		t.Fatal(err)
	}
	if again := mustPlan(t, c, testAccess()); len(again) != 0 {
		t.Errorf("planned again: %s", lines(again))
	}
}

// Nobody has etcd ask who they are when it would not let them go on.
func TestAccessLocksNobodyOut(t *testing.T) {
	e := testutil.StartEtcd(t)
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "crt"), filepath.Join(dir, "key")
	pem, keyPEM := testutil.NewCA(t, "ca").Issue(t, testutil.Certificate{CommonName: "r1"})
	for file, content := range map[string][]byte{cert: pem, key: keyPEM} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name, says string
		change     func(*Config)
	}{
		{"without a name", "neither a user nor a client certificate", func(*Config) {}},
		{"as a reader", `"r1", which has not the role root`, func(cfg *Config) { cfg.CertFile, cfg.KeyFile = cert, key }},
		{"as a stranger", `"x", which has not the role root`, func(cfg *Config) { cfg.Username, cfg.Password = "x", "x" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := mustDial(t, e, tc.change)
			plan, err := c.PlanAccess(t.Context(), testAccess())
			if !errors.Is(err, ErrLockOut) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error %v, want it to say %s", err, tc.says)
			}
			if slices.ContainsFunc(plan, func(x AccessChange) bool { return x.Action == EnableAuth }) {
				t.Error("it is planned nevertheless")
			}
		})
	}
}
