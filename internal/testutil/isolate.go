// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// isolatedEnv names, in a child's environment, what it was started for.
const isolatedEnv = "WEFT_TEST_ISOLATED"

// Isolate gives a test a process of its own in a network and a mount namespace of its own, with lo up: everything in it,
// whatever thread it runs on, sees this network, and what it mounts goes with it, however it ends. In the test's first
// process Isolate runs the child, takes over its result and returns false; in the child it returns true:
//
//	if !testutil.Isolate(t) {
//		return
//	}
func Isolate(t *testing.T) bool {
	t.Helper()
	RequireRoot(t)
	if os.Getenv(isolatedEnv) == t.Name() {
		if err := settle(); err != nil {
			t.Fatal(err)
		}
		return true
	}
	var pattern []string
	for _, part := range strings.Split(t.Name(), "/") {
		pattern = append(pattern, "^"+regexp.QuoteMeta(part)+"$")
	}
	cmd := isolated(t.Name(), "-test.run", strings.Join(pattern, "/"), "-test.v", "-test.count=1", "-test.timeout=5m")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("in its own namespaces: %v", err)
	}
	return false
}

// IsolateMain does for a whole test binary what [Isolate] does for one test, and returns the binary's exit code:
//
//	func TestMain(m *testing.M) { os.Exit(testutil.IsolateMain(m)) }
func IsolateMain(m interface{ Run() int }) int {
	const name = "main"
	if os.Getenv(isolatedEnv) == name {
		if err := settle(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}
	cmd := isolated(name, os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "in its own namespaces:", err)
		return 1
	}
	return 0
}

func isolated(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), isolatedEnv+"="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	return cmd
}

// settle finishes a child's namespaces.
func settle() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}
