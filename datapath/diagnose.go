// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// Level is how much a finding matters.
type Level string

const (
	// Fine: all is as it should be.
	Fine Level = "ok"
	// Warning: weft works, but less well than it could, or it cannot be told.
	Warning Level = "warning"
	// Failure: weft, or a part of it, cannot work.
	Failure Level = "failure"
)

// Finding is one thing about this machine that matters to weft.
type Finding struct {
	Level  Level
	Name   string
	Detail string
	// Advice is what to do; "" where there is nothing to do.
	Advice string
}

// Diagnosis says what to look at.
type Diagnosis struct {
	BPFFS string
	// Devices are those that are to have programs; empty: those of the default routes.
	Devices []string
	// TunnelPort is the UDP port of the overlay.
	TunnelPort uint16
	// ServiceCgroup is the cgroup whose sockets are to reach services; "": see [DefaultCgroup].
	ServiceCgroup string
	// ServiceNetNSDir is where the network namespaces of pods have names, see [Config]; "": nowhere.
	ServiceNetNSDir string

	proc, sys string // where those file systems are
}

// Diagnose looks at the machine, as far as this process may, and at the network namespace of the calling thread. It needs
// no agent, and changes nothing: what it makes to try the kernel out is gone when it returns.
func Diagnose(d Diagnosis) []Finding {
	if d.proc == "" {
		d.proc, d.sys = "/proc", "/sys"
	}
	e := &examiner{Diagnosis: d}
	for _, examine := range []func(){
		e.kernel, e.privileges, e.pins, e.hooks, e.maps, e.compiler, e.settings, e.lockdown, e.network, e.services,
	} {
		examine()
	}
	return e.found
}

// examiner collects findings.
type examiner struct {
	Diagnosis
	found []Finding

	// What pins tells, if this process may look into them.
	pinned  *pinDir // nil: there are none, or they cannot be seen
	running bool    // an agent works on them
}

func (e *examiner) fine(name, format string, args ...any) {
	e.found = append(e.found, Finding{Level: Fine, Name: name, Detail: fmt.Sprintf(format, args...)})
}

func (e *examiner) warn(name, detail, advice string) {
	e.found = append(e.found, Finding{Level: Warning, Name: name, Detail: detail, Advice: advice})
}

func (e *examiner) fail(name, detail, advice string) {
	e.found = append(e.found, Finding{Level: Failure, Name: name, Detail: detail, Advice: advice})
}

// kernel compares the release with the oldest that has what weft needs.
func (e *examiner) kernel() {
	release := kernelRelease()
	if olderThan(release, minKernel) {
		e.fail("kernel", "Linux "+release, "weft needs Linux "+minKernel+" or newer")
		return
	}
	e.fine("kernel", "Linux %s", release)
}

func (e *examiner) privileges() {
	if err := checkPrivileges(); err != nil {
		e.warn("privileges", strings.TrimPrefix(err.Error(), ErrPrivileges.Error()+": "),
			"the agent needs them, and so do some of the checks below: run this as the agent's user")
		return
	}
	e.fine("privileges", "CAP_BPF and CAP_NET_ADMIN")
	if olderThan(kernelRelease(), "5.11") {
		e.warn("privileges", "before Linux 5.11 these two are not enough", "give the agent CAP_PERFMON and CAP_SYS_RESOURCE, too")
	}
}

// pins looks at the BPF file system, and at what an agent left there.
func (e *examiner) pins() {
	if err := checkBPFFS(e.BPFFS); err != nil {
		e.fail("bpffs", strings.TrimPrefix(err.Error(), ErrBPFFS.Error()+": "), "without it everything would end with the agent")
		return
	}
	var st unix.Statfs_t
	if err := unix.Statfs(e.BPFFS, &st); err == nil && st.Flags&unix.ST_RDONLY != 0 {
		e.fail("bpffs", e.BPFFS+" is mounted read-only", "remount it: mount -o remount,rw "+e.BPFFS)
		return
	}
	path := filepath.Join(e.BPFFS, pinDirName)
	of, ownErr := ownerOf(path)
	switch _, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		e.fine("bpffs", "%s, no agent has run", e.BPFFS)
	case errors.Is(err, fs.ErrPermission):
		e.warn("bpffs", "this user may not look into "+e.BPFFS, "run this as root, or as the agent's user")
	case err != nil:
		e.fail("bpffs", err.Error(), "mount one anew: mount -t bpf bpf "+e.BPFFS)
	case ownErr != nil:
		e.warn("bpffs", strings.TrimPrefix(ownErr.Error(), ErrBPFFS.Error()+": "), "what is pinned there cannot be looked at")
	default:
		e.lock(path, of)
	}
}

func (e *examiner) lock(path string, of owner) {
	dir, err := lockPinDir(path)
	switch {
	case errors.Is(err, ErrInUse):
		e.running = true
		e.fine("bpffs", "%s of uid %d, an agent runs", path, of.uid)
	case err != nil:
		e.warn("bpffs", err.Error(), "run this as root, or as the agent's user")
		return
	default:
		_ = dir.Close()
		e.fine("bpffs", "%s of uid %d, no agent runs", path, of.uid)
	}
	e.pinned = &pinDir{path: path}
}

func (e *examiner) hooks() {
	if hasTCX() {
		e.fine("hooks", "tcx")
		return
	}
	e.warn("hooks", "no tcx, which came with Linux 6.6: filters of tc serve instead",
		"leave priority 119 of the clsact qdiscs to weft; a newer kernel needs no such care")
}

// maps tries out what the kernel can store.
func (e *examiner) maps() {
	e.probe("lpm trie", features.HaveMapType(ebpf.LPMTrie), "the kernel lacks BPF_MAP_TYPE_LPM_TRIE: weft cannot work on it")
	e.probe("ring buffer", features.HaveMapType(ebpf.RingBuf), "the kernel lacks BPF_MAP_TYPE_RINGBUF (Linux 5.8): weft cannot work on it")
	e.probe("per-cpu hash", features.HaveMapType(ebpf.PerCPUHash), "the kernel lacks BPF_MAP_TYPE_PERCPU_HASH: weft cannot work on it")
	e.probe("array of maps", features.HaveMapType(ebpf.ArrayOfMaps), "the kernel lacks BPF_MAP_TYPE_ARRAY_OF_MAPS: weft cannot work on it")
	e.probe("tc programs", features.HaveProgramType(ebpf.SchedCLS), "the kernel lacks BPF_PROG_TYPE_SCHED_CLS: weft cannot work on it")
	switch err := probeBatch(); {
	case err == nil:
		e.fine("batches", "the map takes many entries in one system call")
	case errors.Is(err, ebpf.ErrNotSupported):
		e.warn("batches", "the map takes one entry in a system call", "nothing, but starting with very many entries takes longer")
	default:
		e.warn("batches", "cannot be tried: "+oneLine(err), asAgent)
	}
	switch err := probeMmap(); {
	case err == nil:
		e.fine("mapped arrays", "arrays can be written through memory")
	case errors.Is(err, unix.EINVAL), errors.Is(err, ebpf.ErrNotSupported):
		e.warn("mapped arrays", "arrays cannot be written through memory", "nothing, but lookups go through the trie alone")
	default:
		e.warn("mapped arrays", "cannot be tried: "+oneLine(err), asAgent)
	}
}

func (e *examiner) probe(name string, err error, advice string) {
	switch {
	case err == nil:
		e.fine(name, "there")
	case errors.Is(err, ebpf.ErrNotSupported):
		e.fail(name, "missing", advice)
	default:
		e.warn(name, "cannot be tried: "+oneLine(err), asAgent)
	}
}

// asAgent is what to do where this process lacks what the agent has.
const asAgent = "run this as root, or with the capabilities of the agent"

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func probeBatch() error {
	spec, err := bpf.Load()
	if err != nil {
		return err
	}
	s := spec.Maps[bpf.MapIPCache]
	s.MaxEntries = 1
	m, err := ebpf.NewMap(s)
	if err != nil {
		return err
	}
	defer m.Close()
	_, err = m.BatchUpdate(make([]bpf.IPCacheKey, 1), make([]bpf.IPCacheValue, 1), nil)
	return err
}

func probeMmap() error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE})
	if err != nil {
		return err
	}
	return m.Close()
}

// sysctl reads a setting by its path; "" if it cannot be read.
func (e *examiner) sysctl(elem ...string) string {
	content, err := os.ReadFile(filepath.Join(append([]string{e.proc, "sys"}, elem...)...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(content))
}

// compiler looks at how the kernel runs programs.
func (e *examiner) compiler() {
	switch value := e.sysctl("net/core/bpf_jit_enable"); value {
	case "1":
		e.fine("jit", "on")
	case "":
		e.warn("jit", "net.core.bpf_jit_enable is not to be seen: root alone sees it, in the machine's first network namespace", "nsenter -t 1 -n weft diagnose")
	case "0":
		e.warn("jit", "off: programs are interpreted, at a fraction of the speed", "sysctl net.core.bpf_jit_enable=1")
	default:
		e.warn("jit", "net.core.bpf_jit_enable is "+value+", which is for debugging", "sysctl net.core.bpf_jit_enable=1")
	}
	switch value := e.sysctl("net/core/bpf_jit_harden"); value {
	case "0", "1":
		e.fine("jit hardening", "%s: not for programs of privileged users", value)
	case "":
		e.warn("jit hardening", "net.core.bpf_jit_harden is not to be seen, like the one above", "nsenter -t 1 -n weft diagnose")
	default:
		e.warn("jit hardening", value+": programs of privileged users are hardened too, and slower", "sysctl net.core.bpf_jit_harden=1")
	}
}

// settings looks at what else an administrator can set.
func (e *examiner) settings() {
	switch value := e.sysctl("kernel/unprivileged_bpf_disabled"); value {
	case "1", "2":
		e.fine("unprivileged bpf", "disabled (%s)", value)
	case "":
		e.warn("unprivileged bpf", "kernel.unprivileged_bpf_disabled cannot be read", "run this as root")
	default:
		e.warn("unprivileged bpf", "every user may load programs", "sysctl kernel.unprivileged_bpf_disabled=2")
	}
	for _, s := range []struct{ name, sysctl string }{
		{"forwarding IPv4", "net.ipv4.ip_forward"}, {"forwarding IPv6", "net.ipv6.conf.all.forwarding"},
	} {
		switch e.sysctl(strings.ReplaceAll(s.sysctl, ".", "/")) {
		case "1":
			e.fine(s.name, "on")
		case "":
			e.fine(s.name, "this kernel has no such family")
		default:
			e.warn(s.name, "off: packets of pods are not passed on", "sysctl "+s.sysctl+"=1, if this node has pods of that family")
		}
	}
}

// lockdown looks at whether the kernel is closed to root too.
func (e *examiner) lockdown() {
	content, err := os.ReadFile(filepath.Join(e.sys, "kernel/security/lockdown"))
	switch text := strings.TrimSpace(string(content)); {
	case err != nil:
		e.fine("lockdown", "not built in, or not to be seen")
	case strings.Contains(text, "[confidentiality]"):
		e.warn("lockdown", "confidentiality", "some programs are refused: boot with lockdown=integrity if the agent says so")
	default:
		e.fine("lockdown", "%s", text)
	}
}
