// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	recorded "github.com/weftmesh/weft/internal/testutil/golden"
)

// TestVerifyAndCleanup asks an agent on the kernel what differs, then takes everything away.
//
// lesson: A8, K2
func TestVerifyAndCleanup(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, recorded.Path(t, "kvstore-state-west.jsonl"))
	s := newSite(t)
	s.cli(t, exitUnreachable, "verify")
	if err := contains(s.cli(t, 0, "diagnose --devices eth0"), "✓ bpffs", "✓ device eth0"); err != nil {
		t.Error(err)
	}
	agent := startAgent(t, "--config", s.config)
	west.WriteConfig(t, filepath.Join(s.clustermesh, "west"))
	testutil.Eventually(t, 20*time.Second, func() error {
		if err := s.healthy(t); err != nil {
			return err
		}
		return contains(s.cli(t, 0, "bpf ipcache list"), "10.2.1.10/32")
	})
	if err := contains(s.cli(t, 0, "verify"), "objects compared, 0 differences"); err != nil {
		t.Error(err)
	}

	// Somebody removes an entry of the map. Once in a long while the agent finds it by itself before it is asked.
	key := strings.Fields("key hex 40 00 00 00 00 00 00 01 0a 02 01 0a 00 00 00 00 00 00 00 00 00 00 00 00")
	testutil.Eventually(t, 60*time.Second, func() error {
		if out, err := exec.Command("bpftool", append([]string{"map", "delete", "pinned", s.bpffs + "/weft/ipcache"}, key...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("bpftool: %w: %s", err, out)
		}
		code, stdout, _ := weft(t, map[string]string{"WEFT_API_SOCKET": s.socket}, "verify")
		if err := contains(stdout, "map 10.2.1.10/32", "absent", "1 difference"); err != nil || code != exitNot {
			return fmt.Errorf("exit code %d: %w", code, err)
		}
		var v api.Verification
		if err := json.Unmarshal([]byte(s.cli(t, 0, "verify --repair -o json")), &v); err != nil || len(v.Differences) != 1 || !v.Differences[0].Repaired {
			return fmt.Errorf("repair: %+v, %w", v, err)
		}
		return nil
	})
	if err := contains(s.cli(t, 0, "verify"), "0 differences"); err != nil {
		t.Error(err)
	}
	if err := contains(s.cli(t, 0, "status"), " of map changed by somebody else"); err != nil {
		t.Error(err)
	}
	if err := contains(s.cli(t, exitNot, "cleanup"), "another agent holds the lock"); err != nil {
		t.Error(err)
	}

	// A cluster that is gone is a difference, too: nobody knows what it says now.
	west.Stop(t)
	testutil.Eventually(t, 60*time.Second, func() error {
		code, stdout, _ := weft(t, map[string]string{"WEFT_API_SOCKET": s.socket}, "verify")
		if code != exitNot {
			return contains(stdout, "etcd west")
		}
		return contains(stdout, "etcd", "west", "listed and followed")
	})
	agent.stop()
	if err := contains(s.cli(t, 0, "cleanup --dry-run"), "map "+s.bpffs+"/weft/ipcache to be removed"); err != nil {
		t.Error(err)
	}
	s.cli(t, 0, "cleanup")
	if _, err := os.Stat(filepath.Join(s.bpffs, "weft")); err == nil {
		t.Error("the pins are left")
	}
	if err := contains(s.cli(t, 0, "cleanup"), "nothing of weft's is here"); err != nil {
		t.Error(err)
	}
}
