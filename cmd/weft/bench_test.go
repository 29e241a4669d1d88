// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	recorded "github.com/weftmesh/weft/internal/testutil/golden"
)

// Each figure has its baseline, and the etcd has what it had before.
func TestBench(t *testing.T) {
	testutil.RequireRoot(t)
	west := testutil.StartEtcd(t)
	west.Load(t, recorded.Path(t, "kvstore-state-west.jsonl"))
	dir := t.TempDir()
	west.WriteConfig(t, filepath.Join(dir, "west"))
	env := map[string]string{"WEFT_CLUSTERMESH_CONFIG": dir, "WEFT_ENTRIES": "1000"}
	before := must(t, map[string]string{"WEFT_KVSTORE_CONFIG": filepath.Join(dir, "west")}, "kvstore", "get", "--recursive", "cilium/", "-o", "json")
	var list api.List[measured]
	if err := json.Unmarshal([]byte(must(t, env, "bench", "west", "-o", "json")), &list); err != nil || list.Kind != kindBench {
		t.Fatalf("%v: %+v", err, list)
	}
	var what []string
	for _, m := range list.Items {
		what = append(what, m.What)
		if m.Nanoseconds <= 0 || m.BaselineNanoseconds <= 0 || m.Ratio <= 0 || m.Of <= 0 {
			t.Errorf("%+v", m)
		}
	}
	if want := []string{"packet of a known address", "packet of the world", "write of an entry", "list of a key of west"}; !slices.Equal(what, want) {
		t.Errorf("measured %q, want %q", what, want)
	}
	if err := contains(must(t, env, "bench"), "WHAT TAKES BASELINE TAKES RATIO OF packet of a known address", "a program that does nothing"); err != nil {
		t.Error(err)
	}
	if after := must(t, map[string]string{"WEFT_KVSTORE_CONFIG": filepath.Join(dir, "west")}, "kvstore", "get", "--recursive", "cilium/", "-o", "json"); after != before {
		t.Error("the etcd has changed")
	}
	for args, want := range map[string]string{
		"--entries 0": "weft: --entries 0: want a number from 1 to 1000000\n", "--keys 0": "weft: --keys 0: want a number from 1 on\n",
	} {
		if code, _, stderr := weft(t, nil, append([]string{"bench"}, strings.Fields(args)...)...); code != exitUsage || stderr != want {
			t.Errorf("%s: exit code %d, %q", args, code, stderr)
		}
	}
	if code, _, stderr := weft(t, env, "bench", "nowhere"); code != exitUsage || !strings.Contains(stderr, "no such file") {
		t.Errorf("a cluster without config: exit code %d, %q", code, stderr)
	}
}
