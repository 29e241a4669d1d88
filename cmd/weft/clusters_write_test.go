// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
	recorded "github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/kvstore"
)

// A cluster that answers is written down, so that the agent takes it; one that does not is not, unless that is wanted; and
// a config that is there is not lost by accident.
func TestClustersAddAndRemove(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, recorded.Path(t, "kvstore-state-west.jsonl"))
	dir := t.TempDir()
	file := filepath.Join(dir, "west")
	do := func(want int, args string, says ...string) string {
		t.Helper()
		code, stdout, stderr := weft(t, nil, append(strings.Fields(args), "--clustermesh-config", dir)...)
		if code != want {
			t.Fatalf("weft %s: exit code %d, want %d\n%s%s", args, code, want, stdout, stderr)
		}
		if err := contains(stdout+stderr, says...); err != nil {
			t.Errorf("weft %s: %v", args, err)
		}
		return stdout
	}
	there := func(want bool) {
		t.Helper()
		if _, err := os.Stat(file); (err == nil) != want {
			t.Fatalf("%s: %v, want it to be there: %t", file, err, want)
		}
		if left, err := filepath.Glob(filepath.Join(dir, ".new*")); err != nil || len(left) > 0 {
			t.Errorf("left over: %v, %v", left, err)
		}
	}
	add := "clusters add west --endpoint " + etcd.Endpoint()

	do(1, "clusters add west --endpoint http://127.0.0.1:1 --timeout 2s", "✗ connect", "cluster west is not written to "+file)
	there(false)
	do(0, add+" --dry-run", "cluster west is not written: "+file+" would be its file")
	there(false)
	do(0, add, "✓ config", "cluster west is in "+file)
	there(true)
	cfg, err := kvstore.LoadConfig(file)
	if err != nil || len(cfg.Endpoints) != 1 || cfg.Endpoints[0] != etcd.Endpoint() {
		t.Errorf("written config: %+v, %v", cfg, err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	do(1, add, file+" exists: replace it with --force")
	do(0, add+" --force", "cluster west is changed in "+file)
	if out := do(0, add+" --force -o json"); !strings.Contains(out, `"kind":"ClusterChange"`) && !strings.Contains(out, `"kind": "ClusterChange"`) {
		t.Errorf("as JSON: %s", out)
	}
	do(0, "clusters remove west", "cluster west is removed from "+file)
	there(false)
	do(1, "clusters remove west", "cluster west has no config")

	// A cluster that is away can be written down, on purpose, with a password that nobody sees on the command line.
	secret := writeFile(t, "password", "pass word\nnot this\n")
	out := do(0, "clusters add west --endpoint http://127.0.0.1:1 --timeout 2s --force --username u --password-file "+secret)
	if strings.Contains(out, "pass word") {
		t.Errorf("the password is printed: %s", out)
	}
	if cfg, err = kvstore.LoadConfig(file); err != nil || string(cfg.Password) != "pass word" {
		t.Errorf("password %q, %v", string(cfg.Password), err)
	}
	testutil.MustWriteFile(t, file, []byte("a certificate"))
	do(1, "clusters remove west", "is no config of a cluster")
	there(true)
}
