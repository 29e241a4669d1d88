// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

const year = 365 * 24 * time.Hour

// mustMake makes certificates, and returns what was done: action and name of each.
func mustMake(t *testing.T, cfg CertificatesConfig, now time.Time) (did []string) {
	t.Helper()
	all, err := MakeCertificates(cfg, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		text := c.Action + " " + strings.TrimSuffix(filepath.Base(c.File), ".crt")
		if c.Why != "" {
			text += ": " + c.Why
		}
		did = append(did, text)
	}
	return did
}

// wantMade compares what was done.
func wantMade(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got)\n%s", what, diff)
	}
}

// What is missing is made, what is near its end or wrong is made anew, and what is good stays.
//
// mechanism: Q1
func TestCertificates(t *testing.T) {
	now := time.Now()
	cfg := CertificatesConfig{Dir: filepath.Join(t.TempDir(), "pki"), Users: []string{"admin-east", "remote-west"}, Server: []string{"east.mesh.cilium.io", "127.0.0.1"}, Lifetime: year}
	all := []string{"make ca", "make etcd", "make admin-east", "make remote-west"}
	dry := cfg
	dry.Dry = true
	wantMade(t, "dry", mustMake(t, dry, now), all...)
	if _, err := os.Stat(cfg.Dir); err == nil {
		t.Error("a look has made the directory")
	}
	wantMade(t, "at first", mustMake(t, cfg, now), all...)
	wantMade(t, "again", mustMake(t, cfg, now))
	modes := make(map[string]string)
	for _, name := range []string{"", "ca.key", "etcd.key", "remote-west.key", "remote-west.crt"} {
		info, err := os.Stat(filepath.Join(cfg.Dir, name))
		if err != nil {
			t.Fatal(err)
		}
		modes[name] = info.Mode().String()
	}
	if diff := cmp.Diff(map[string]string{
		"": "drwx------", "ca.key": "-rw-------", "etcd.key": "-rw-------", "remote-west.key": "-rw-------", "remote-west.crt": "-rw-r--r--",
	}, modes); diff != "" {
		t.Errorf("modes (-want +got)\n%s", diff)
	}

	more := cfg
	more.Users = append(more.Users, "remote-north")
	more.Server = append(more.Server, "etcd-1")
	wantMade(t, "a cluster and a name more", mustMake(t, more, now), "renew etcd: it is not for etcd-1", "make remote-north")
	key := mustRead(t, cfg.Dir, "remote-west.key")
	later := now.Add(year * 3 / 4)
	end := "it ends on " + now.Add(year).UTC().Format(time.DateOnly)
	wantMade(t, "near the end", mustMake(t, cfg, later), "renew etcd: "+end, "renew admin-east: "+end, "renew remote-west: "+end)
	wantMade(t, "near the end, again", mustMake(t, cfg, later))
	if mustRead(t, cfg.Dir, "remote-west.key") != key {
		t.Error("a renewed certificate has another key")
	}
	// Toward the authority's own end nothing can be renewed beyond it, and that is not tried again and again.
	last := now.Add(authorityLives*year - time.Hour)
	if did := mustMake(t, cfg, last); len(did) != 3 {
		t.Errorf("before the authority ends: %v", did)
	}
	wantMade(t, "before the authority ends, again", mustMake(t, cfg, last.Add(50*time.Minute)))

	mustRemove(t, cfg.Dir, "remote-west.key")
	wantMade(t, "without a key", mustMake(t, cfg, last), "renew remote-west: its key is gone")
	testutil.MustWriteFile(t, filepath.Join(cfg.Dir, "remote-west.key"), []byte(mustRead(t, cfg.Dir, "admin-east.key")))
	wantMade(t, "with another's key", mustMake(t, cfg, last), "renew remote-west: it is of another key")
	mustRemove(t, cfg.Dir, "ca.crt")
	mustRemove(t, cfg.Dir, "ca.key")
	wantMade(t, "with another authority", mustMake(t, cfg, now), "make ca", "renew etcd: another authority signed it",
		"renew admin-east: another authority signed it", "renew remote-west: another authority signed it")
}

// What was given is used and checked, never replaced by what it is not.
func TestCertificatesGiven(t *testing.T) {
	now := time.Now()
	cfg := CertificatesConfig{Dir: t.TempDir(), Users: []string{"remote-west"}, Lifetime: year}
	ca := testutil.NewCA(t, "mesh-ca")
	give := func(name string, cert, key []byte) {
		t.Helper()
		for file, content := range map[string][]byte{name + ".crt": cert, name + ".key": key} {
			if content != nil {
				testutil.MustWriteFile(t, filepath.Join(cfg.Dir, file), content)
			}
		}
	}
	fails := func(want string) {
		t.Helper()
		before := listDir(t, cfg.Dir)
		if did, err := MakeCertificates(cfg, now); err == nil || !strings.Contains(err.Error(), want) || len(did) > 0 {
			t.Errorf("%v, error %v, want %q", did, err, want)
		}
		if diff := cmp.Diff(before, listDir(t, cfg.Dir)); diff != "" {
			t.Errorf("%s: files changed\n%s", want, diff)
		}
	}
	give("ca", ca.PEM, nil)
	fails("remote-west.crt cannot be signed, as " + filepath.Join(cfg.Dir, "ca.key") + " is not there: put the key there")
	cert, key := ca.Issue(t, testutil.Certificate{CommonName: "remote-west", NotAfter: now.Add(time.Hour), NotBefore: now})
	give("remote-west", cert, key)
	wantMade(t, "with a certificate of the authority", mustMake(t, cfg, now))
	now = now.Add(50 * time.Minute)
	fails("it ends on ")
	other, otherKey := testutil.NewCA(t, "other").Issue(t, testutil.Certificate{CommonName: "remote-west"})
	give("remote-west", other, otherKey)
	fails("another authority signed it")
	give("remote-west", cert, otherKey)
	fails("it is of another key")
	give("remote-west", []byte("none"), nil)
	fails("there is no CERTIFICATE in it")
	give("remote-west", cert, []byte("none"))
	fails("there is no PRIVATE KEY in it")
	admin, adminKey := ca.Issue(t, testutil.Certificate{CommonName: "admin-east"})
	give("remote-west", admin, adminKey)
	fails(`is of "admin-east" and not of "remote-west"`)
	give("ca", ca.PEM, otherKey)
	fails("is not the key of")
	give("ca", cert, otherKey)
	fails("is not the certificate of an authority")
	give("ca", ca.PEM, otherKey)
	now = now.Add(20 * year)
	fails("ended on ")
}

// An etcd with what was made knows each user by its certificate, and lets a remote cluster read what is shared, and no more.
func TestCertificatesOfEtcd(t *testing.T) {
	access, err := NewAccess(AccessConfig{Cluster: "east", Remotes: []string{"west"}})
	if err != nil {
		t.Fatal(err)
	}
	cfg := CertificatesConfig{Dir: t.TempDir(), Users: CertificateUsers(access), Server: testutil.ServerHosts, Lifetime: year}
	mustMake(t, cfg, time.Now())
	etcd := testutil.StartEtcd(t, testutil.WithTLSFiles(cfg.Dir))
	as := func(user string) kvstore.Config {
		file := filepath.Join(t.TempDir(), "etcd.yaml")
		testutil.MustWriteFile(t, file, fmt.Appendf(nil, "endpoints: [%s]\ntrusted-ca-file: %s/ca.crt\ncert-file: %s/%s.crt\nkey-file: %s/%s.key\n",
			etcd.Endpoint(), cfg.Dir, cfg.Dir, user, cfg.Dir, user))
		config, err := kvstore.LoadConfig(file)
		if err != nil {
			t.Fatal(err)
		}
		return config
	}
	admin, west := mustDial(t, as("admin-east")), mustDial(t, as("remote-west"))
	plan, err := admin.PlanAccess(t.Context(), access)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.ApplyAccess(t.Context(), plan); err != nil {
		t.Fatal(err)
	}
	if _, _, err := west.Get(t.Context(), identity.HeartbeatKey); err != nil {
		t.Errorf("a remote cluster reads: %v", err)
	}
	if err := west.Put(t.Context(), identity.HeartbeatKey, nil); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a remote cluster writes: %v", err)
	}
}

func mustDial(t *testing.T, cfg kvstore.Config) *kvstore.Client {
	t.Helper()
	client, err := kvstore.Dial(cfg, silent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func mustRead(t *testing.T, dir, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func mustRemove(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

// listDir returns the files of a directory with their content.
func listDir(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, e := range entries {
		all[e.Name()] = mustRead(t, dir, e.Name())
	}
	return all
}
