// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// ErrCgroup indicates that the configured directory is no cgroup of the unified hierarchy.
var ErrCgroup = errors.New("no usable cgroup")

// DefaultCgroup returns the root of the unified hierarchy, as mounted for this process. The error wraps [ErrCgroup].
func DefaultCgroup() (string, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrCgroup, err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		// 30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw
		mount, source, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if !strings.HasPrefix(source, "cgroup2 ") || len(fields) < 5 {
			continue
		}
		// A mount of a part of the hierarchy, such as /docker/c0ffee, is not its root; one of a parent of ours, /../.., is nearer to it.
		if of := fields[3]; of == "/" || strings.HasPrefix(of, "/..") {
			return fields[4], nil
		}
	}
	return "", fmt.Errorf("%w: cgroup2 is mounted nowhere: mount it with `mount -t cgroup2 cgroup2 /sys/fs/cgroup`, and name the "+
		"directory with --service-cgroup if it is another one", ErrCgroup)
}

// openCgroup opens the directory of a cgroup, and returns the number by which the kernel knows it.
func openCgroup(path string) (_ *os.File, id uint64, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: --service-cgroup: %w", ErrCgroup, err)
	}
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	var fsStat unix.Statfs_t
	var stat unix.Stat_t
	if err := errors.Join(unix.Fstatfs(int(file.Fd()), &fsStat), unix.Fstat(int(file.Fd()), &stat)); err != nil {
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrCgroup, path, err)
	}
	if fsStat.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, 0, fmt.Errorf("%w: %s is none of the unified hierarchy: name one with --service-cgroup", ErrCgroup, path)
	}
	return file, stat.Ino, nil
}

// serviceAttacher makes the sockets of a cgroup, and of those below it, run the programs, by pinned links. It is for one
// goroutine.
type serviceAttacher struct {
	dir      *pinDir
	cgroup   string
	programs []program
	held     map[string]link.Link // by the name of the program
	drift    int                  // see drifted
}

func newServiceAttacher(dir *pinDir, cgroup string, programs []program) *serviceAttacher {
	return &serviceAttacher{dir: dir, cgroup: cgroup, programs: programs, held: map[string]link.Link{}}
}

// Close lets go of the links and leaves them attached.
func (a *serviceAttacher) Close() {
	for _, l := range a.held {
		_ = l.Close()
	}
	a.held = nil
}

// drifted returns, once, how many links that had been at work were found otherwise: without their pin, with another program,
// or detached.
func (a *serviceAttacher) drifted() (n int) {
	n, a.drift = a.drift, 0
	return n
}

func (a *serviceAttacher) path(p program) string {
	return a.dir.file(pinServicesDir, p.Name+pinServiceSuffix)
}

// linkState is what a pin of a link holds.
type linkState struct {
	link.Link
	program ebpf.ProgramID
	cgroup  uint64 // 0: it is gone, or the link was detached
}

// open opens a pinned link. Without one, or with something else in its place, it returns no Link.
func (a *serviceAttacher) open(p program) (linkState, error) {
	l, err := link.LoadPinnedLink(a.path(p), nil)
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE):
		return linkState{}, explain("open link "+a.path(p), err)
	case err != nil:
		return linkState{}, nil
	}
	s, err := inspectServiceLink(l, p.Attach)
	if err != nil {
		_ = l.Close()
		return linkState{}, nil
	}
	return s, nil
}

func inspectServiceLink(l link.Link, attach ebpf.AttachType) (linkState, error) {
	info, err := l.Info()
	if err != nil {
		return linkState{}, err
	}
	at := info.Cgroup()
	if at == nil || ebpf.AttachType(at.AttachType) != attach {
		return linkState{}, errDeadLink
	}
	return linkState{Link: l, program: info.Program, cgroup: at.CgroupId}, nil
}

// attached reports whether an earlier agent left a link that works.
func (a *serviceAttacher) attached() (bool, error) {
	found := false
	for _, p := range a.programs {
		s, err := a.open(p)
		if err != nil {
			return false, err
		}
		if s.Link != nil {
			found = found || s.cgroup != 0
			_ = s.Close()
		}
	}
	return found, nil
}

// sync attaches what is not attached. A link that runs another program is updated in one step; one of another cgroup goes
// when the new one is there. What is right is not touched.
func (a *serviceAttacher) sync() ([]ProgramStatus, error) {
	all := make([]ProgramStatus, len(a.programs))
	for i, p := range a.programs {
		all[i] = ProgramStatus{Name: p.Name}
	}
	cgroup, id, err := openCgroup(a.cgroup)
	if err != nil {
		return all, err
	}
	defer cgroup.Close()
	var errs []error
	for i, p := range a.programs {
		linkID, err := a.attach(p, cgroup, id)
		if err != nil {
			all[i].Error = err.Error()
			errs = append(errs, err)
			continue
		}
		all[i].Attached, all[i].LinkID, all[i].ProgramID = true, uint32(linkID), uint32(p.ID)
	}
	return all, errors.Join(errs...)
}

func (a *serviceAttacher) attach(p program, cgroup *os.File, id uint64) (link.ID, error) {
	state, err := a.open(p)
	if err != nil {
		return 0, err
	}
	right := state.Link != nil && state.cgroup == id && state.program == p.ID
	if !right && a.held[p.Name] != nil {
		a.drift++
	}
	if state.Link == nil {
		if state, err = a.reopen(p); err != nil {
			return 0, err
		}
	}
	switch {
	case state.Link != nil && state.cgroup == id && state.program == p.ID:
	case state.Link != nil && state.cgroup == id:
		if err := state.Update(p.handle); err != nil {
			_ = state.Close()
			return 0, explain("update "+p.Name, err)
		}
	default:
		fresh, err := a.create(p, cgroup)
		if state.Link != nil {
			if err == nil {
				_ = state.Detach() // a link of a cgroup that is gone is detached already
			}
			_ = state.Close()
		}
		if err != nil {
			return 0, err
		}
		state = linkState{Link: fresh, program: p.ID, cgroup: id}
	}
	if old := a.held[p.Name]; old != nil {
		_ = old.Close()
	}
	a.held[p.Name] = state.Link
	info, err := state.Info()
	if err != nil {
		return 0, explain("look at the link of "+p.Name, err)
	}
	return info.ID, nil
}

// reopen puts the pin of a link back that is still held, if there is one.
func (a *serviceAttacher) reopen(p program) (linkState, error) {
	held := a.held[p.Name]
	if held == nil {
		return linkState{}, nil
	}
	again, err := copyLink(held)
	if err != nil {
		return linkState{}, nil
	}
	s, err := inspectServiceLink(again, p.Attach)
	if err != nil || s.cgroup == 0 {
		_ = again.Close()
		return linkState{}, nil
	}
	if err := replacePin(again, a.path(p)); err != nil {
		_ = again.Close()
		return linkState{}, err
	}
	return s, nil
}

// create attaches a program behind those of others and pins the link in place of what is there.
func (a *serviceAttacher) create(p program, cgroup *os.File) (link.Link, error) {
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: int(cgroup.Fd()), Program: p.handle, Attach: p.Attach})
	if err != nil {
		return nil, explain("attach "+p.Name+" to "+a.cgroup, err)
	}
	if err := replacePin(l, a.path(p)); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// intact glances at the pins and links, of whose end the kernel tells nobody.
func (a *serviceAttacher) intact() bool {
	for _, p := range a.programs {
		held := a.held[p.Name]
		if held == nil {
			return false
		}
		if s, err := inspectServiceLink(held, p.Attach); err != nil || s.cgroup == 0 || s.program != p.ID {
			return false
		}
		for _, path := range []string{a.path(p), a.dir.file(pinServicesDir, p.Name)} {
			if _, err := os.Lstat(path); err != nil {
				return false
			}
		}
	}
	return true
}

// compare tells what sync would change.
func (a *serviceAttacher) compare(report *Report) error {
	cgroup, id, err := openCgroup(a.cgroup)
	if err != nil {
		report.add(Difference{Kind: KindLink, Object: a.cgroup, Want: "a cgroup", Have: err.Error()})
		return nil
	}
	defer cgroup.Close()
	for _, p := range a.programs {
		report.Compared++
		s, err := a.open(p)
		if err != nil {
			return err
		}
		d := Difference{Kind: KindLink, Object: a.cgroup + " " + p.Name, Want: fmt.Sprintf("program %d", p.ID)}
		switch {
		case s.Link == nil:
			d.Have = "no pinned link"
		case s.cgroup != id:
			d.Have = "not attached"
		case s.program != p.ID:
			d.Have = fmt.Sprintf("program %d", s.program)
		}
		if s.Link != nil {
			_ = s.Close()
		}
		if d.Have != "" {
			report.add(d)
		}
	}
	return nil
}

// openServicePrograms returns the programs, working on maps: see openPrograms.
func openServicePrograms(dir *pinDir, spec *ebpf.CollectionSpec, maps mapSet) (_ []program, err error) {
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps})
	if err != nil {
		return nil, explain("load programs of services", err)
	}
	defer loaded.Close()
	var programs []program
	defer func() {
		if err != nil {
			closePrograms(programs)
		}
	}()
	for _, p := range bpf.ServicePrograms {
		path := dir.file(pinServicesDir, p.Name)
		handle, err := adoptServiceProgram(path, loaded.Programs[p.Name])
		if err != nil {
			return nil, err
		}
		info, err := handle.Info()
		if err != nil {
			_ = handle.Close()
			return nil, fmt.Errorf("program %s: %w", p.Name, err)
		}
		id, _ := info.ID()
		programs = append(programs, program{Program: p, ID: id, handle: handle})
	}
	return programs, nil
}

// adoptServiceProgram returns the program that is pinned at path if it equals fresh, else fresh, which is pinned in its
// place. The pin of the link proves whose the link is, so that the old program needs no other pin.
func adoptServiceProgram(path string, fresh *ebpf.Program) (*ebpf.Program, error) {
	pinned, err := ebpf.LoadPinnedProgram(path, nil)
	if err == nil {
		if equal, err := equalPrograms(pinned, fresh); err == nil && equal {
			return pinned, nil
		}
		_ = pinned.Close()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, explain("open program "+path, err)
	}
	handle, err := fresh.Clone()
	if err != nil {
		return nil, fmt.Errorf("pin program at %s: %w", path, err)
	}
	if err := errors.Join(removePin(path), handle.Pin(path)); err != nil {
		_ = handle.Close()
		return nil, explain("pin program at "+path, err)
	}
	return handle, nil
}
