// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// services looks at what sockets need to reach services: what the kernel has, the cgroup, and the programs there.
func (e *examiner) services() {
	used := e.ServiceCgroup != ""
	if e.pinned != nil {
		names, err := os.ReadDir(e.pinned.file(pinServicesDir))
		used = used || err == nil && len(names) > 0
	}
	const name = "service cgroup"
	path, err := e.ServiceCgroup, error(nil)
	if path == "" {
		path, err = DefaultCgroup()
	}
	var cgroup *os.File
	if err == nil {
		cgroup, _, err = openCgroup(path)
	}
	if err != nil {
		detail := strings.TrimPrefix(err.Error(), ErrCgroup.Error()+": ")
		const advice = "name a directory of the unified hierarchy with --service-cgroup"
		if used {
			e.fail(name, detail, advice)
		} else {
			e.warn(name, detail, "nothing, unless --service-lb is wanted; then "+advice)
		}
		return
	}
	defer cgroup.Close()
	e.fine(name, "%s", path)
	e.serviceFeatures()
	if !used {
		return // whoever is there is in nobody's way
	}
	e.podNamespaces()
	for _, p := range bpf.ServicePrograms {
		e.servicesBeside(cgroup, path, p)
	}
	if e.pinned != nil {
		e.servicesAttached(cgroup, path)
	}
}

func (e *examiner) serviceFeatures() {
	const lacks = "the kernel lacks it: do without --service-lb"
	e.probe("cgroup programs", features.HaveProgramType(ebpf.CGroupSockAddr), lacks)
	e.probe("socket storage", features.HaveMapType(ebpf.SkStorage), lacks)
	e.probe("lru hash", features.HaveMapType(ebpf.LRUHash), lacks)
	switch err := features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval); {
	case err == nil:
		e.fine("refusals", "a service without backends refuses connections")
	case errors.Is(err, ebpf.ErrNotSupported):
		e.warn("refusals", "before Linux 6.1, what asks for a service without backends gets EPERM rather than ECONNREFUSED",
			"nothing, unless clients mind: a newer kernel")
	default:
		e.warn("refusals", "cannot be tried: "+oneLine(err), asAgent)
	}
	e.destroying(tryDestroy())
}

// destroying tells whether connected UDP sockets whose backend is gone can be ended.
func (e *examiner) destroying(err error) {
	const name = "connected UDP"
	switch {
	case err == nil:
		e.fine(name, "sockets whose backend is gone are ended, so that they connect again")
	case errors.Is(err, errNoUDPDiag):
		what, advice, _ := strings.Cut(err.Error(), ": modprobe")
		e.warn(name, what, "modprobe"+advice)
	case errors.Is(err, errNoDestroy):
		e.warn(name, err.Error(), "nothing, unless clients of UDP services connect their sockets and keep them: a kernel with CONFIG_INET_DIAG_DESTROY=y")
	default:
		e.warn(name, "cannot be tried: "+oneLine(err), asAgent)
	}
}

// servicesBeside tells of programs of others at the cgroup and those above it.
func (e *examiner) servicesBeside(cgroup *os.File, path string, p bpf.Program) {
	own := ebpf.ProgramID(0)
	if e.pinned != nil {
		if id, err := programAt(e.pinned.file(pinServicesDir, p.Name)); err == nil {
			own = ebpf.ProgramID(id)
		}
	}
	hook := "the hook of " + p.Name
	result, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: p.Attach})
	if err != nil {
		return // the privileges are told of
	}
	for _, a := range result.Programs {
		if a.ID == own {
			break // those behind it see what it made of the address
		}
		title := programName(a.ID)
		e.warn("service cgroup", fmt.Sprintf("a program of somebody else (%d %s) is before weft at %s", a.ID, title, hook),
			"let only one of the two give services their backends")
	}
	for dir := path; ; dir = filepath.Dir(dir) {
		flags, count, err := cgroupFlags(dir, p.Attach)
		if err != nil {
			return // above the root of the hierarchy
		}
		const both = unix.BPF_F_ALLOW_MULTI | unix.BPF_F_ALLOW_OVERRIDE
		if count > 0 && (dir == path && flags&unix.BPF_F_ALLOW_MULTI == 0 || flags&both == 0) {
			e.fail("service cgroup", fmt.Sprintf("a program of somebody else at %s, on %s, lets no other be attached", dir, hook),
				"have its owner attach it with BPF_F_ALLOW_MULTI, or remove it: bpftool cgroup show "+dir)
		}
	}
}

// cgroupFlags asks how the programs of a cgroup were attached, and how many there are. The BPF library does not tell.
func cgroupFlags(dir string, attach ebpf.AttachType) (flags, count uint32, err error) {
	file, _, err := openCgroup(dir)
	if err != nil {
		return 0, 0, err
	}
	defer file.Close()
	query := struct { // of union bpf_attr, for BPF_PROG_QUERY
		target, attach, queryFlags, attachFlags uint32
		programs                                uint64
		count, pad                              uint32
	}{target: uint32(file.Fd()), attach: uint32(attach)}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_QUERY, uintptr(unsafe.Pointer(&query)), unsafe.Sizeof(query))
	if errno != 0 {
		return 0, 0, errno
	}
	return query.attachFlags, query.count, nil
}

// podNamespaces looks at where connected UDP sockets of pods can be ended.
func (e *examiner) podNamespaces() {
	const name = "connected UDP of pods"
	if e.ServiceNetNSDir == "" {
		e.fine(name, "stay with backends that are gone, as --service-netns-dir names no network namespaces")
		return
	}
	ender, err := newSocketEnder(nil, e.ServiceNetNSDir)
	if err != nil {
		e.warn(name, oneLine(err), asAgent)
		return
	}
	defer ender.Close()
	switch found := ender.end(nil); {
	case found.err != nil:
		e.warn(name, "cannot be tried: "+oneLine(found.err), asAgent)
	case found.namespaces == 1:
		e.warn(name, "no network namespace has a name in "+e.ServiceNetNSDir,
			"nothing, if there are no pods; else name the directory of their runtime with --service-netns-dir")
	default:
		e.fine(name, "are ended in %d network namespaces of %s", found.namespaces-1, e.ServiceNetNSDir)
	}
}

// servicesAttached looks at the links that an agent left.
func (e *examiner) servicesAttached(cgroup *os.File, path string) {
	var missing []string
	for _, p := range bpf.ServicePrograms {
		pin := e.pinned.file(pinServicesDir, p.Name)
		id, err := programAt(pin)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return // the pins cannot be seen
		}
		result, queryErr := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: p.Attach})
		if queryErr != nil {
			return
		}
		runs := func(a link.AttachedProgram) bool { return a.ID == ebpf.ProgramID(id) }
		if err != nil || !slices.ContainsFunc(result.Programs, runs) {
			missing = append(missing, p.Name)
		}
	}
	const name = "service programs"
	switch {
	case len(missing) == 0:
		e.fine(name, "all are attached to %s", path)
	case e.running:
		e.fail(name, fmt.Sprintf("%s: not attached to %s", strings.Join(missing, ", "), path),
			"`weft status` has the reason; if the agent has another --service-cgroup, name that")
	default:
		e.warn(name, fmt.Sprintf("%s: not attached to %s", strings.Join(missing, ", "), path),
			"start the agent; if it has another --service-cgroup, name that")
	}
}
