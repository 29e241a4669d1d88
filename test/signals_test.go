// SPDX-License-Identifier: Apache-2.0

package test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// Whatever asks the agent to end, it ends soon and well, and nothing in the kernel changes. One that was stopped for a
// while catches up.
//
// lesson: A5
func TestSignals(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	west.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		a := h.start(t, "east", 1)
		h.awaitVerified(t)
		before, _ := h.kernelMap(t)
		began := time.Now()
		a.stop(t, signal)
		if code := a.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("%v: ended with exit code %d, want 0", signal, code)
		}
		t.Logf("%v: ended after %v", signal, time.Since(began))
		after, _ := h.kernelMap(t)
		if diff := cmp.Diff(before, after); diff != "" || len(before) == 0 {
			t.Errorf("%v changed the map (-before +after):\n%s", signal, diff)
		}
	}

	pause := time.Second
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		pause = time.Minute
	}
	a := h.start(t, "east", 1)
	h.awaitVerified(t)
	if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	west.Put(t, "cilium/state/ip/v1/default/10.2.9.9", fmt.Sprintf(`{"IP":"10.2.9.9","Mask":null,"HostIP":"172.18.2.1","ID":%d,"Key":0,"Metadata":""}`, probed))
	time.Sleep(pause) // this is what is tested
	if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	h.awaitEntry(t, "10.2.9.9")
	t.Logf("caught up %v after %v without a moment to run", time.Since(began), pause)
	h.awaitVerified(t)
}

// With few descriptors the agent works.
//
// lesson: K11
func TestFewDescriptors(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	west.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	// A process takes its limits from the one that starts it.
	wrapper := filepath.Join(t.TempDir(), "weft")
	script := fmt.Sprintf("#!/bin/sh\nulimit -n 64\nexec %s \"$@\"\n", os.Getenv(weftEnv))
	if err := os.WriteFile(wrapper, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	plain := os.Getenv(weftEnv)
	t.Setenv(weftEnv, wrapper)
	h.start(t, "east", 1)
	t.Setenv(weftEnv, plain)
	h.awaitEntry(t, "10.2.1.10")
	h.awaitVerified(t)
}
