// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// manualChild names, in a child's environment, the state directory that it is to add endpoints to.
const manualChild = "WEFT_TEST_MANUAL_DIR"

// Whenever the agent is killed, every endpoint that it acknowledged is there, and the file is whole.
func TestManualKilled(t *testing.T) {
	if dir := os.Getenv(manualChild); dir != "" {
		addForEver(t, dir)
	}
	dir := t.TempDir()
	acknowledged, rounds := 0, 12
	for round := range rounds {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestManualKilled$")
		cmd.Env = append(os.Environ(), manualChild+"="+dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			n, err := strconv.Atoi(strings.TrimPrefix(lines.Text(), "added "))
			if err != nil {
				t.Errorf("round %d: the child says %q", round, lines.Text())
				break
			}
			if first := acknowledged; n > first && first%7 == round%7 { // some way into the round
				time.AfterFunc(rand.N(3*time.Millisecond), func() { _ = cmd.Process.Kill() })
			}
			acknowledged = max(acknowledged, n)
		}
		_ = cmd.Process.Kill()
		if err := cmd.Wait(); !errors.As(err, new(*exec.ExitError)) {
			t.Fatalf("round %d: %v", round, err)
		}
		m := newManual(t, dir)
		if !m.load() || len(m.Problems()) > 0 {
			t.Fatalf("round %d: %v", round, m.Problems())
		}
		// What was being written when the child died may be there or not.
		if got := len(m.Workloads()); got != acknowledged && got != acknowledged+1 {
			t.Fatalf("round %d: %d endpoints are kept, %d were acknowledged", round, got, acknowledged)
		}
		acknowledged = len(m.Workloads())
	}
	if acknowledged < rounds {
		t.Errorf("%d endpoints in %d rounds: nothing was tried", acknowledged, rounds)
	}
	for _, name := range files(t, dir) {
		if !strings.HasPrefix(name, "endpoints.json") || strings.Contains(name, corruptSuffix) {
			t.Errorf("left over: %s", filepath.Join(dir, name))
		}
	}
}

func addForEver(t *testing.T, dir string) {
	m := newManual(t, dir)
	if !m.load() {
		t.Fatal(m.Problems())
	}
	for n := len(m.Workloads()) + 1; ; n++ {
		mustPut(t, m, fmt.Sprintf(`{"name": "e%d", "ip": "10.1.%d.%d", "identity": "65793"}`, n, n>>8, n&255))
		fmt.Println("added", n)
	}
}

// There is an end to what can be added, but not to changing what is there.
func TestManualIsBounded(t *testing.T) {
	m := newManual(t, t.TempDir())
	m.load()
	for n := range maxManual {
		key := fmt.Sprintf("default/e%d", n)
		m.kept[key] = manual{given: []byte(`{}`)}
	}
	if _, err := m.Put([]byte(entryA)); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "there are 10000 already") {
		t.Errorf("put one more: %v", err)
	}
	if added, err := m.Put([]byte(`{"name": "e7", "ip": "10.1.1.1", "identity": "65793"}`)); err != nil || added {
		t.Errorf("change one: added %t, %v", added, err)
	}
}
