// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// Filters of ours have a priority and a handle of their own: several products at priority 1 have taken one another's
// filters for theirs.
const (
	filterPriority = 119
	filterHandle   = 119
	filterBehind   = filterPriority + 1 // the priority of those that run behind the others
)

// priority is that of the filter at a hook.
func (h hook) priority() uint16 {
	if h.Behind {
		return filterBehind
	}
	return filterPriority
}

// filterAttacher attaches by clsact filters, on kernels before 6.6, which have no tcx. A filter is ours if it stands at
// our priority and handle, has the name of a program of ours, and runs one that is pinned or equals one. A filter is
// only ever replaced in place, in one step; the qdisc is removed only if this attacher made it and nobody else uses it.
type filterAttacher struct {
	dir      *pinDir
	programs []program
	host     *host
	left     map[hook]int // the programs that the last sync left, by their numbers
	drift    int
}

var _ attacher = (*filterAttacher)(nil)

func (a *filterAttacher) Close() {}

func (a *filterAttacher) drifted() (n int) {
	n, a.drift = a.drift, 0
	return n
}

// intact is true: the kernel tells of changes of filters.
func (a *filterAttacher) intact() bool { return true }

// filterSet is what stands at our place of each hook.
type filterSet struct {
	ours    map[hook]*netlink.BpfFilter
	foreign map[hook]string // described
}

// name is that of our program at a hook; "" if there is none.
func (s filterSet) name(at hook) string {
	if f := s.ours[at]; f != nil {
		return f.Name
	}
	return ""
}

// parentOf is the half of the qdisc where the filters of a direction stand.
func parentOf(at ebpf.AttachType) uint32 {
	if at == ebpf.AttachTCXEgress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// filters lists what stands at our place on the devices.
func (a *filterAttacher) filters(devices []device) (filterSet, error) {
	set := filterSet{ours: map[hook]*netlink.BpfFilter{}, foreign: map[hook]string{}}
	proof, err := newProgramProof(a.dir, a.programs)
	if err != nil {
		return set, err
	}
	for _, dev := range devices {
		if dev.Index == 0 {
			continue
		}
		for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			list, err := a.host.filters(dev.Index, parentOf(attach))
			if err != nil {
				return set, err
			}
			for _, f := range list {
				attrs := f.Attrs()
				b, isBPF := f.(*netlink.BpfFilter)
				at := hook{dev.Index, attach, attrs.Priority == filterBehind}
				switch {
				case attrs.Priority != at.priority():
				case isBPF && attrs.Handle == filterHandle && proof.has(b):
					set.ours[at] = b
				case !isBPF || attrs.Handle == filterHandle:
					set.foreign[at] = fmt.Sprintf("a filter of type %s", f.Type())
				}
			}
		}
	}
	return set, nil
}

func (a *filterAttacher) sync(wanted, sticky []device) ([]DeviceStatus, error) {
	everywhere := slices.Concat(wanted, sticky)
	set, err := a.filters(everywhere)
	if err != nil {
		return nil, err
	}
	wanted = withSticky(wanted, sticky, a.programs, set.name)
	all, jobs := plan(a.dir, a.programs, wanted)
	var errs []error
	used := map[hook]bool{}
	left := map[hook]int{}
	for _, job := range jobs {
		used[job.hook] = true
		if was, is := a.left[job.hook], set.ours[job.hook]; was != 0 && (was == int(job.ID) || job.waits()) && (is == nil || is.Id != was) {
			a.drift++
		}
		if err := a.attach(job, set); err != nil {
			job.status.Error = err.Error()
			errs = append(errs, unrecoverable(err))
			continue
		}
		left[job.hook] = int(job.status.ProgramID)
	}
	a.left = left
	existing, err := a.host.devices()
	if err != nil {
		return all, errors.Join(append(errs, err)...)
	}
	if set, err = a.filters(existing); err != nil {
		return all, errors.Join(append(errs, err)...)
	}
	for at, f := range set.ours {
		if !used[at] {
			errs = append(errs, a.host.removeFilter(f))
		}
	}
	return all, errors.Join(append(errs, a.releaseQdiscs(used))...)
}

// attach makes a hook run its program.
func (a *filterAttacher) attach(job attachment, set filterSet) error {
	if what := set.foreign[job.hook]; what != "" {
		return fmt.Errorf("attach %s: %s of another owner is at priority %d: remove it", job.Name, what, job.priority())
	}
	if f := set.ours[job.hook]; f == nil || f.Id != int(job.ID) && !job.waits() || !f.DirectAction {
		if f == nil {
			if err := a.addQdisc(job.IfIndex); err != nil {
				return explain("attach "+job.Name, err)
			}
		}
		if err := a.host.setFilter(job); err != nil {
			return explain("attach "+job.Name, err)
		}
	}
	job.status.Attached, job.status.ProgramID = true, uint32(job.ID)
	if f := set.ours[job.hook]; f != nil && job.waits() {
		job.status.ProgramID = uint32(f.Id)
	}
	return nil
}

func (a *filterAttacher) compare(wanted, sticky []device) ([]Difference, error) {
	set, err := a.filters(slices.Concat(wanted, sticky))
	if err != nil {
		return nil, err
	}
	wanted = withSticky(wanted, sticky, a.programs, set.name)
	states, jobs := plan(a.dir, a.programs, wanted)
	found := unplannable(states)
	for _, job := range jobs {
		d := Difference{Kind: KindLink, Object: job.device + " " + job.Name, Want: fmt.Sprintf("program %d", job.ID)}
		switch f := set.ours[job.hook]; {
		case set.foreign[job.hook] != "":
			d.Have = set.foreign[job.hook] + " of another owner"
		case f == nil:
			d.Have = "not attached"
		case f.Id != int(job.ID) && !job.waits():
			d.Have = fmt.Sprintf("program %d", f.Id)
		default:
			continue
		}
		found = append(found, d)
	}
	return found, nil
}

// addQdisc gives a device the qdisc that filters of both directions need, and notes that it was us.
func (a *filterAttacher) addQdisc(index int) error {
	kind, err := a.host.clsact(index)
	switch {
	case err != nil || kind == "clsact":
		return err
	case kind != "":
		return fmt.Errorf("the device has a qdisc %s where clsact is needed: remove it, or leave the device out with --devices", kind)
	}
	mark := a.dir.file(pinQdiscsDir, strconv.Itoa(index))
	if err := os.Mkdir(mark, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return explain("note the qdisc at "+mark, err)
	}
	return a.host.addClsact(index)
}

// releaseQdiscs removes the qdiscs that addQdisc made on devices that are not used any more, unless somebody else has
// come to use them. Notes of devices that are gone go too.
func (a *filterAttacher) releaseQdiscs(used map[hook]bool) error {
	marks, err := os.ReadDir(a.dir.file(pinQdiscsDir))
	if err != nil {
		return explain("list notes of qdiscs", err)
	}
	var errs []error
	for _, mark := range marks {
		index, err := strconv.Atoi(mark.Name())
		if err == nil && slices.ContainsFunc(a.programs, func(p program) bool { return used[hook{index, p.Attach, p.Behind}] }) {
			continue
		}
		gone, err := a.releaseQdisc(index, err)
		if errs = append(errs, err); gone {
			errs = append(errs, removePin(a.dir.file(pinQdiscsDir, mark.Name())))
		}
	}
	return errors.Join(errs...)
}

// releaseQdisc removes a qdisc of ours; gone is false as long as it is in use.
func (a *filterAttacher) releaseQdisc(index int, bad error) (gone bool, err error) {
	if bad != nil {
		return true, nil // not a note of ours
	}
	kind, err := a.host.clsact(index)
	if errors.Is(err, unix.ENODEV) || err == nil && kind != "clsact" {
		return true, nil
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		list, err := a.host.filters(index, parent)
		if err != nil || len(list) > 0 {
			return false, err
		}
	}
	return true, a.host.removeClsact(index)
}

// programProof tells programs of ours from others.
type programProof struct {
	ids  map[int]bool
	tags map[string]map[string]bool // digests of the code, by name
}

// newProgramProof collects what is pinned, programs of an earlier version that may still run included, and the present
// programs.
func newProgramProof(dir *pinDir, programs []program) (programProof, error) {
	proof := programProof{ids: map[int]bool{}, tags: map[string]map[string]bool{}}
	for _, p := range bpf.DevicePrograms() {
		proof.tags[p.Name] = map[string]bool{}
	}
	for _, p := range programs {
		if err := proof.add(p.Name, p.handle); err != nil {
			return proof, err
		}
	}
	files, err := os.ReadDir(dir.file(pinProgramsDir))
	if err != nil {
		return proof, explain("list pinned programs", err)
	}
	for _, file := range files {
		p, err := ebpf.LoadPinnedProgram(dir.file(pinProgramsDir, file.Name()), nil)
		if err != nil {
			continue // not a program: it proves nothing
		}
		err = proof.add(file.Name(), p)
		_ = p.Close()
		if err != nil {
			return proof, err
		}
	}
	return proof, nil
}

func (p programProof) add(name string, handle *ebpf.Program) error {
	if handle == nil {
		return nil
	}
	info, err := programInfo(handle)
	if err != nil {
		return explain("look at program "+name, err)
	}
	id, _ := info.ID()
	p.ids[int(id)] = true
	if tags := p.tags[name]; tags != nil && info.Tag != "" {
		tags[info.Tag] = true
	}
	return nil
}

// has reports whether a filter is provably ours.
func (p programProof) has(f *netlink.BpfFilter) bool {
	tags, named := p.tags[f.Name]
	return named && (p.ids[f.Id] || tags[f.Tag])
}
