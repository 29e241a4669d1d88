// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

// networks are network namespaces that have names in a directory, as those of pods have.
type networks struct {
	dir string
	all []*testutil.NetNS
}

// newNetworks makes namespaces, gives the first one a second name, and puts beside them what is none.
func newNetworks(t *testing.T, n int) *networks {
	t.Helper()
	o := &networks{dir: t.TempDir()}
	for i := range n {
		ns := testutil.NewNetNS(t)
		o.all = append(o.all, ns)
		if err := os.Symlink(ns.Path(), filepath.Join(o.dir, fmt.Sprint("pod", i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Symlink(o.all[0].Path(), filepath.Join(o.dir, "again")),
		os.WriteFile(filepath.Join(o.dir, "left-over"), nil, 0o600), // as of a namespace that was unmounted
		os.Symlink(filepath.Join(o.dir, "nowhere"), filepath.Join(o.dir, "gone")),
	); err != nil {
		t.Fatal(err)
	}
	return o
}

// Connected sockets of pods end with their backend, as those of the node do, in each network namespace that has a name; sockets
// that were connected to the backend itself, or that have another one, are left alone.
func TestServiceConnectedUDPOfPodsMovesOn(t *testing.T) {
	h := newServiceHost(t)
	pods := newNetworks(t, 3)
	if err := os.Symlink(h.ns.Path(), filepath.Join(pods.dir, "host")); err != nil {
		t.Fatal(err)
	}
	h.cfg.ServiceNetNSDir = pods.dir
	const frontend = "udp 10.96.0.10:53"
	h.put(frontend, []string{"127.1.1.10"})
	h.put("udp 10.96.0.11:53", []string{"127.1.1.10"})
	a := h.start()
	h.wantKernel(frontend, "127.1.1.10")
	h.wantKernel("udp 10.96.0.11:53", "127.1.1.10")
	status := func() ServiceStatus { return *a.Status().Services }
	testutil.Eventually(t, 2*patience, func() error {
		if s := status(); s.Namespaces != 4 || s.DestroyError != "" {
			return fmt.Errorf("%d namespaces are looked at, want 4: %s", s.Namespaces, s.DestroyError)
		}
		return nil
	})
	conns := map[string][]net.Conn{}
	for _, ns := range append([]*testutil.NetNS{h.ns}, pods.all...) {
		for _, to := range []string{"10.96.0.10:53", "10.96.0.11:53", "127.1.1.10:8080"} {
			var conn net.Conn
			var err error
			h.cgroup.Do(t, func() { ns.Do(t, func() { conn, err = net.Dial("udp", to) }) })
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			conns[to] = append(conns[to], conn)
		}
	}
	h.put(frontend, []string{"127.1.1.11"})
	h.wantKernel(frontend, "127.1.1.11")
	able := true
	testutil.Eventually(t, 2*patience, func() error {
		switch s := status(); {
		case strings.Contains(s.DestroyError, "the kernel has no "):
			able = false
		case s.Destroyed != 4 || s.DestroyError != "":
			return fmt.Errorf("%d sockets ended, want 4: %s", s.Destroyed, s.DestroyError)
		}
		return nil
	})
	for to, all := range conns {
		for i, conn := range all {
			_, err := conn.Write([]byte("?"))
			ended := errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EDESTADDRREQ)
			if want := able && to == "10.96.0.10:53"; ended != want {
				t.Errorf("to %s in namespace %d: %v, want an end: %v", to, i, err, want)
			}
		}
	}
}

// An agent that may not enter namespaces says what it lacks, and does the rest.
func TestServiceNamespacesNeedPrivileges(t *testing.T) {
	pods := newNetworks(t, 1)
	var ended endedSockets
	testutil.NewNetNS(t).Do(t, func() {
		e, err := newSocketEnder(nil, pods.dir)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		before := inodeOfThread(t)
		withoutCapability(t, unix.CAP_SYS_ADMIN, func() { ended = e.end(nil) })
		if after := inodeOfThread(t); after != before {
			t.Errorf("the thread is in namespace %d, want %d", after, before)
		}
		if ended.namespaces != 1 || ended.err == nil || !strings.Contains(ended.err.Error(), "CAP_SYS_ADMIN") {
			t.Errorf("without the capability: %+v, want the own namespace and an error that names it", ended)
		}
		if ended = e.end(nil); ended.namespaces != 2 || ended.err != nil {
			t.Errorf("with the capability: %+v, want two namespaces", ended)
		}
		if after := inodeOfThread(t); after != before {
			t.Errorf("the thread is in namespace %d, want %d", after, before)
		}
		e.dir = filepath.Join(pods.dir, "not-yet")
		if ended = e.end(nil); ended.namespaces != 1 || ended.err != nil {
			t.Errorf("before there are pods: %+v, want the own namespace and no error", ended)
		}
	})
}

func TestDiagnosePodNamespaces(t *testing.T) {
	pods := newNetworks(t, 2)
	for dir, want := range map[string]Finding{
		"":          {Level: Fine, Detail: "stay with backends"},
		pods.dir:    {Level: Fine, Detail: "are ended in 2 network namespaces of " + pods.dir},
		t.TempDir(): {Level: Warning, Detail: "no network namespace has a name in"},
	} {
		e := examiner{Diagnosis: Diagnosis{ServiceNetNSDir: dir}}
		e.podNamespaces()
		wantFinding(t, e.found, want.Level, "connected UDP of pods", want.Detail)
	}
	var e examiner
	e.ServiceNetNSDir = pods.dir
	withoutCapability(t, unix.CAP_SYS_ADMIN, e.podNamespaces)
	wantFinding(t, e.found, Warning, "connected UDP of pods", "cannot be tried")
}

func inodeOfThread(t *testing.T) uint64 {
	t.Helper()
	file, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	inode, ok := inodeOf(file)
	if !ok {
		t.Fatal("the file of the thread's namespace is none")
	}
	return inode
}

// withoutCapability runs f on a thread on which a capability has no effect.
func withoutCapability(t *testing.T, capability int, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		t.Fatal(err)
	}
	less := has
	less[capability/32].Effective &^= 1 << (capability % 32)
	if err := unix.Capset(&header, &less[0]); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Capset(&header, &has[0]); err != nil {
			t.Errorf("the thread goes on with fewer capabilities: %v", err)
		}
	}()
	f()
}
