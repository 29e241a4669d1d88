// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// Remnant is something in the kernel that weft left, or that stands where weft's things do.
type Remnant struct {
	Kind   string // "link", "filter", "qdisc", "route", "device", "program", "map" or "directory"
	Object string
	// Kept says why it is not removed: it cannot be proved to be weft's, or the kernel refused.
	Kept string
}

// Cleanup removes everything that is provably weft's from the network namespace of the calling thread and from below a BPF
// file system, and returns what that was, in order, and what it left. With dryRun it removes nothing. Root may clean up
// behind an agent that ran as another user. It removes nothing more once ctx has ended, and tells how many remnants it has
// found. The error wraps [ErrInUse] while an agent runs.
func Cleanup(ctx context.Context, bpffs string, dryRun bool, tell func(found int)) ([]Remnant, error) {
	if err := checkPrivileges(); err != nil {
		return nil, err
	}
	c := &cleaner{ctx: ctx, dryRun: dryRun, tell: tell}
	of := fileUser()
	path := filepath.Join(bpffs, pinDirName)
	switch _, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist): // what lies elsewhere may still be there
	case err != nil:
		return nil, explain("look at "+path, err)
	case checkBPFFS(path) != nil:
		return nil, fmt.Errorf("%w: %s is a directory of another kind: is --bpffs right?", ErrBPFFS, path)
	default:
		if of, err = ownerOf(path); err != nil {
			return nil, err
		}
		dir, err := lockPinDir(path)
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		c.dir = dir
	}
	h, err := openHost()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	c.host = h
	err = of.run(func() error {
		for _, step := range []func() error{c.links, c.filters, c.routes, c.overlay, c.services, c.programs, c.maps, c.directories} {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && c.dir != nil {
		c.directory(c.dir.path)
	}
	return c.found, err
}

// cleaner removes step by step: what works on packets first, what that needs after it.
type cleaner struct {
	dir    *pinDir // nil: there are no pins
	host   *host
	dryRun bool
	ctx    context.Context // of the call
	tell   func(found int)
	found  []Remnant
}

// remove notes a remnant, and removes it unless nothing is to be.
func (c *cleaner) remove(kind, object string, act func() error) {
	r := Remnant{Kind: kind, Object: object}
	if !c.dryRun {
		err := c.ctx.Err()
		if err == nil {
			err = act()
		}
		if err != nil {
			r.Kept = err.Error()
		}
	}
	c.note(r)
}

// note adds a remnant to those that are found.
func (c *cleaner) note(r Remnant) {
	c.found = append(c.found, r)
	c.tell(len(c.found))
}

// keep notes what is not provably ours.
func (c *cleaner) keep(kind, object, why string) {
	c.note(Remnant{Kind: kind, Object: object, Kept: why})
}

// list returns the names in a directory of pins; none if it does not exist.
func (c *cleaner) list(elem ...string) ([]string, error) {
	if c.dir == nil {
		return nil, nil
	}
	files, err := os.ReadDir(c.dir.file(elem...))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, explain("list "+c.dir.file(elem...), err)
	}
	var names []string
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names, nil
}

// links removes the pins of links, which end with them.
func (c *cleaner) links() error {
	names, err := c.list(pinLinksDir)
	if err != nil {
		return err
	}
	proof := programProof{}
	if len(names) > 0 {
		if proof, err = newProgramProof(c.dir, nil); err != nil {
			return err
		}
	}
	for _, name := range names {
		path := c.dir.file(pinLinksDir, name)
		if why := notOurLink(path, name, proof); why != "" {
			c.keep("link", path, why)
			continue
		}
		c.remove("link", path, func() error { return removePin(path) })
	}
	return nil
}

// notOurLink says why a pin is not that of a link of ours: one that runs a program of ours, or none any more under a name
// that we give.
func notOurLink(path, name string, proof programProof) string {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return "it is no link: " + err.Error()
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return err.Error()
	}
	tcx := info.TCX()
	named := slices.ContainsFunc(bpf.DevicePrograms(), func(p bpf.Program) bool { return strings.HasSuffix(name, "-"+p.Name) })
	dead := tcx != nil && tcx.Ifindex == 0
	if tcx == nil || !proof.ids[int(info.Program)] && (!dead || !named) {
		return "it runs a program that is not pinned as one of weft's"
	}
	return ""
}

// filters removes filters of tc, and the qdiscs that were made for them.
func (c *cleaner) filters() error {
	if c.dir == nil {
		return nil
	}
	a := &filterAttacher{dir: c.dir, host: c.host, programs: wantedPrograms(roleUplink, roleOverlay, rolePod, roleService)}
	if _, err := os.Lstat(c.dir.file(pinProgramsDir)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	devices, err := c.host.devices()
	if err != nil {
		return err
	}
	set, err := a.filters(devices)
	if err != nil {
		return err
	}
	for _, dev := range devices {
		for _, at := range []hook{
			{dev.Index, ebpf.AttachTCXIngress, false}, {dev.Index, ebpf.AttachTCXIngress, true},
			{dev.Index, ebpf.AttachTCXEgress, false}, {dev.Index, ebpf.AttachTCXEgress, true},
		} {
			if f := set.ours[at]; f != nil {
				c.remove("filter", dev.Name+" "+f.Name, func() error { return c.host.removeFilter(f) })
			}
			if what := set.foreign[at]; what != "" {
				c.keep("filter", dev.Name+" "+directionOf(at.Attach).String(), what+" that runs a program that is not pinned as one of weft's")
			}
		}
	}
	marks, err := c.list(pinQdiscsDir)
	if err != nil {
		return err
	}
	for _, mark := range marks {
		c.remove("qdisc", "clsact at index "+mark, func() error { return a.releaseQdiscs(nil) })
	}
	return nil
}

// routes removes ours, the less specific first.
func (c *cleaner) routes() error {
	routes, _, err := c.host.routes(func(netip.Prefix) bool { return false })
	if err != nil {
		return err
	}
	slices.SortFunc(routes, func(a, b kernelRoute) int { return comparePrecise(b.Prefix, a.Prefix) })
	for _, r := range routes {
		c.remove("route", r.Prefix.String(), func() error { return c.host.remove(r) })
	}
	return nil
}

// overlay removes the device of the overlay.
func (c *cleaner) overlay() error {
	l, err := c.host.overlay()
	if err != nil || l == nil {
		return err
	}
	if !isOverlay(l) {
		c.keep("device", overlayDevice, "it is no VXLAN device that takes its tunnels from programs")
		return nil
	}
	c.remove("device", overlayDevice, func() error { return c.host.handle.LinkDel(l) })
	return nil
}

// programs removes the pins of programs.
func (c *cleaner) programs() error {
	names, err := c.list(pinProgramsDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		path := c.dir.file(pinProgramsDir, name)
		p, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			c.keep("program", path, "it is no program: "+err.Error())
			continue
		}
		kind := p.Type()
		_ = p.Close()
		if kind != ebpf.SchedCLS || !slices.ContainsFunc(bpf.DevicePrograms(), func(p bpf.Program) bool { return strings.HasPrefix(name, p.Name) }) {
			c.keep("program", path, "weft makes none of this name and type")
			continue
		}
		c.remove("program", path, func() error { return removePin(path) })
	}
	return nil
}

// maps removes the pins of maps.
func (c *cleaner) maps() error {
	names, err := c.list()
	if err != nil {
		return err
	}
	spec, err := bpf.Load()
	if err != nil {
		return err
	}
	for _, name := range names {
		path := c.dir.file(name)
		if slices.Contains([]string{pinLinksDir, pinProgramsDir, pinQdiscsDir, pinServicesDir}, name) {
			continue
		}
		if why := notOurMap(path, name, spec); why != "" {
			c.keep("map", path, why)
			continue
		}
		c.remove("map", path, func() error { return removePin(path) })
	}
	return nil
}

// notOurMap says why a pin is not that of a map of ours: by its name, and the type of what it holds.
func notOurMap(path, name string, spec *ebpf.CollectionSpec) string {
	for inSpec, pin := range pins {
		if pin != strings.TrimSuffix(name, pinNewSuffix) {
			continue
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return "it is no map: " + err.Error()
		}
		defer m.Close()
		if want := spec.Maps[inSpec]; want != nil && m.Type() != want.Type {
			return fmt.Sprintf("it is of type %s, and weft's is a %s", m.Type(), want.Type)
		}
		return ""
	}
	return notOfAnotherVersion(path, name)
}

// notOfAnotherVersion says why a pin whose name this version does not know is no map of another one, which a downgrade leaves: the
// kernel's name for each of weft's maps is that of its pin after "weft_", as far as there is room for it.
func notOfAnotherVersion(path, name string) string {
	const unknown = "weft pins nothing of this name"
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return unknown
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil || info.Name != kernelNameOf(name) {
		return unknown
	}
	return ""
}

// kernelNameOf is how the kernel calls the map of a pin (BPF_OBJ_NAME_LEN).
func kernelNameOf(pin string) string {
	name := "weft_" + strings.TrimSuffix(pin, pinNewSuffix)
	return name[:min(len(name), unix.BPF_OBJ_NAME_LEN-1)]
}

// directories removes those in the directory of pins.
func (c *cleaner) directories() error {
	if c.dir == nil {
		return nil
	}
	for _, name := range []string{pinLinksDir, pinProgramsDir, pinQdiscsDir, pinServicesDir} {
		c.directory(c.dir.file(name))
	}
	return nil
}

// directory removes one that exists and is empty by now.
func (c *cleaner) directory(path string) {
	if _, err := os.Lstat(path); err != nil {
		return
	}
	if slices.ContainsFunc(c.found, func(r Remnant) bool { return r.Kept != "" && strings.HasPrefix(r.Object, path+"/") }) {
		c.keep("directory", path, "something in it is kept")
		return
	}
	c.remove("directory", path, func() error {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}
