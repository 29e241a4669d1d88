// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// program is a loaded and pinned program.
type program struct {
	bpf.Program
	// Role is that of the devices that it is made for.
	Role   role
	ID     ebpf.ProgramID
	handle *ebpf.Program
	// wait, where it is not nil, says that what runs in its place is to go on for now.
	wait *atomic.Bool
}

// waits reports whether what runs in the program's place is to go on.
func (p program) waits() bool { return p.wait != nil && p.wait.Load() }

// isFor reports whether the device is of the kind that the program is made for.
func (p program) isFor(dev device) bool { return p.Role == dev.Role }

// wantedPrograms are those that a node with devices of these roles needs.
func wantedPrograms(roles ...role) []program {
	var all []program
	for _, r := range roles {
		for _, p := range map[role][]bpf.Program{
			roleUplink: bpf.Programs[:], roleOverlay: bpf.OverlayPrograms[:], rolePod: bpf.PodPrograms[:],
			roleService: bpf.TranslationPrograms[:],
		}[r] {
			all = append(all, program{Program: p, Role: r})
		}
	}
	return all
}

// direction is the way of the packets that the program sees.
func (p program) direction() bpf.Direction { return directionOf(p.Attach) }

// directionOf is the way of the packets at a hook.
func directionOf(attach ebpf.AttachType) bpf.Direction {
	if attach == ebpf.AttachTCXEgress {
		return bpf.Egress
	}
	return bpf.Ingress
}

func closePrograms(programs []program) {
	for _, p := range programs {
		_ = p.handle.Close()
	}
}

// openPrograms returns the wanted programs, working on maps: those that are pinned, where they equal what this version of weft
// would load, else new ones, which then are pinned in their place. The pins are what tells a later agent which program a
// link runs, without the privilege to look programs up by their number.
func openPrograms(dir *pinDir, wanted []program, spec *ebpf.CollectionSpec, maps mapSet) (_ []program, err error) {
	for name := range spec.Programs {
		if !slices.ContainsFunc(wanted, func(p program) bool { return p.Name == name }) {
			delete(spec.Programs, name)
		}
	}
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps})
	if err != nil {
		return nil, explain("load programs", err)
	}
	defer loaded.Close()
	var programs []program
	defer func() {
		if err != nil {
			closePrograms(programs)
		}
	}()
	for _, p := range wanted {
		fresh := loaded.Programs[p.Name]
		if fresh == nil {
			return nil, fmt.Errorf("program %s is not among those of this version", p.Name)
		}
		handle, err := adoptProgram(dir.file(pinProgramsDir, p.Name), fresh)
		if err != nil {
			return nil, err
		}
		info, err := handle.Info()
		if err != nil {
			_ = handle.Close()
			return nil, fmt.Errorf("program %s: %w", p.Name, err)
		}
		id, _ := info.ID()
		p.ID, p.handle = id, handle
		programs = append(programs, p)
	}
	return programs, nil
}

// adoptProgram returns the program that is pinned at path if it equals fresh; else it pins fresh there and returns a copy
// of it. The new pin is made aside and moved over the old one, so that there is always one.
func adoptProgram(path string, fresh *ebpf.Program) (*ebpf.Program, error) {
	pinned, err := ebpf.LoadPinnedProgram(path, nil)
	switch {
	case err == nil:
		equal, err := equalPrograms(pinned, fresh)
		if err == nil && equal {
			return pinned, nil
		}
		if err == nil {
			err = keepReplaced(path, pinned)
		}
		_ = pinned.Close()
		if err != nil {
			return nil, fmt.Errorf("compare with pinned program %s: %w", path, err)
		}
	case errors.Is(err, fs.ErrNotExist):
	default:
		return nil, explain("open program "+path, err)
	}
	handle, err := fresh.Clone()
	if err != nil {
		return nil, fmt.Errorf("pin program at %s: %w", path, err)
	}
	aside := path + "-new"
	if err := errors.Join(removePin(aside), handle.Pin(aside)); err != nil {
		_ = handle.Close()
		return nil, explain("pin program at "+aside, err)
	}
	if err := os.Rename(aside, path); err != nil {
		_ = handle.Close()
		return nil, explain("move program pin to "+path, err)
	}
	return handle, nil
}

// keepReplaced pins a program that is about to lose its pin under another name: while hooks still run it, it proves that
// they are ours. See dropReplaced.
func keepReplaced(path string, p *ebpf.Program) error {
	info, err := p.Info()
	if err != nil {
		return err
	}
	id, _ := info.ID()
	second, err := p.Clone()
	if err != nil {
		return err
	}
	defer second.Close()
	if err := second.Pin(fmt.Sprintf("%s-%d", path, id)); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// dropReplaced removes the pins of programs that no hook runs any more: all but those of the present programs.
func dropReplaced(dir *pinDir, programs []program) error {
	files, err := os.ReadDir(dir.file(pinProgramsDir))
	if err != nil {
		return explain("list pinned programs", err)
	}
	var errs []error
	for _, file := range files {
		if !slices.ContainsFunc(programs, func(p program) bool { return p.Name == file.Name() }) {
			errs = append(errs, removePin(dir.file(pinProgramsDir, file.Name())))
		}
	}
	return errors.Join(errs...)
}

// repinPrograms puts back the pins that somebody removed or replaced, and returns how many.
func repinPrograms(dir *pinDir, programs []program) (put int, err error) {
	var errs []error
	for _, p := range programs {
		did, err := putBack(dir.file(pinProgramsDir, p.Name), programAt, p.handle)
		if did {
			put++
		}
		errs = append(errs, err)
	}
	return put, errors.Join(errs...)
}

// equalPrograms compares the code, by the kernel's digest of it, and the maps that it works on.
func equalPrograms(a, b *ebpf.Program) (bool, error) {
	infoA, err := a.Info()
	if err != nil {
		return false, err
	}
	infoB, err := b.Info()
	if err != nil {
		return false, err
	}
	mapsA, _ := infoA.MapIDs()
	mapsB, _ := infoB.MapIDs()
	slices.Sort(mapsA)
	slices.Sort(mapsB)
	return infoA.Type == infoB.Type && infoA.Tag == infoB.Tag && slices.Equal(mapsA, mapsB), nil
}
