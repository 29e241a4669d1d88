// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// giveTo makes the host's agent that of a user.
func (h *host) giveTo(t *testing.T, uid int) {
	t.Helper()
	h.uid = uid
	for _, dir := range []string{filepath.Dir(h.socket), h.bpffs} {
		if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
			t.Fatal(err)
		}
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return os.Lchown(path, uid, uid)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// The agent is a user's, as the package has it, and root is the administrator: he looks at it, at what it pinned, and takes
// that away when it is gone.
//
// lesson: A8
func TestAgentOfAnotherUser(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	west.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	h.giveTo(t, 65534)
	weft := func(args string) (string, error) {
		out, err := exec.Command(os.Getenv(weftEnv), strings.Fields(args)...).CombinedOutput()
		return string(out), err
	}
	a := h.start(t, "east", 1)
	h.awaitVerified(t)
	for _, args := range []string{
		"status", "verify --repair", "clusters list", "diagnose --devices eth0 --bpffs " + h.bpffs,
		"bpf ipcache list --bpffs " + h.bpffs, "bpf ipcache get 10.2.1.10 --bpffs " + h.bpffs, "bpf counters list --bpffs " + h.bpffs,
	} {
		if !strings.Contains(args, "--bpffs") {
			args += " --api-socket " + h.socket
		}
		if out, err := weft(args); err != nil {
			t.Errorf("weft %s: %v\n%s", args, err, out)
		}
	}
	cleanup := "cleanup -o json --bpffs " + h.bpffs + " --api-socket " + h.socket
	if out, err := weft(cleanup); err == nil || !strings.Contains(out, "another agent holds the lock") {
		t.Errorf("weft cleanup while the agent runs: %v\n%s", err, out)
	}
	a.stop(t, syscall.SIGKILL)
	out, err := weft(cleanup)
	var list api.List[struct {
		Kind, Object, Kept string
		Removed            bool
	}]
	if err != nil || json.Unmarshal([]byte(out), &list) != nil {
		t.Fatalf("weft cleanup: %v\n%s", err, out)
	}
	kinds := map[string]int{}
	for _, r := range list.Items {
		if kinds[r.Kind]++; !r.Removed || r.Kept != "" {
			t.Errorf("left: %+v", r)
		}
	}
	for _, kind := range []string{"program", "map", "directory", "socket"} {
		if kinds[kind] == 0 {
			t.Errorf("no %s was removed: %v", kind, kinds)
		}
	}
	for _, path := range []string{filepath.Join(h.bpffs, "weft"), h.socket} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
}
