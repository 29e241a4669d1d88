// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/weftmesh/weft/bpf"
)

// hooks are those of devices.
type hooks struct {
	host *host
	tcx  bool
	own  map[string]ebpf.ProgramID // of the pinned programs, by name; empty where they cannot be seen
}

func (e *examiner) openHooks(h *host) *hooks {
	on := &hooks{host: h, tcx: hasTCX(), own: map[string]ebpf.ProgramID{}}
	if e.pinned == nil {
		return on
	}
	for _, p := range bpf.DevicePrograms() {
		if id, err := programAt(e.pinned.file(pinProgramsDir, p.Name)); err == nil {
			on.own[p.Name] = ebpf.ProgramID(id)
		}
	}
	return on
}

// hooked is a program at a hook.
type hooked struct {
	id    ebpf.ProgramID // 0: it is no BPF program
	title string         // "" if this process may not ask for it
	ours  bool           // it is the one that is looked for
	weft  bool           // it is one of weft's
	what  string         // for the operator: where and what it is
	wrong string         // why weft cannot work beside it; "": it can
}

// at lists what runs at a hook, in its order: links, then filters.
func (on *hooks) at(index int, p bpf.Program) (all []hooked, err error) {
	if on.tcx {
		result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: p.Attach})
		if err != nil {
			return nil, err
		}
		for i, a := range result.Programs {
			title := programName(a.ID)
			all = append(all, hooked{
				id: a.ID, title: title, ours: on.owns(p.Name, a.ID, title), weft: on.knows(a.ID, title),
				what: fmt.Sprintf("a program of somebody else (%d %s) is at place %d of the hook of %s", a.ID, title, i+1, p.Name),
			})
		}
	}
	list, err := on.host.filters(index, parentOf(p.Attach))
	if err != nil {
		return nil, err
	}
	for _, f := range list {
		one := hooked{what: fmt.Sprintf("a filter of somebody else (%s, priority %d) is on the hook of %s", f.Type(), f.Attrs().Priority, p.Name)}
		if b, ok := f.(*netlink.BpfFilter); ok {
			one.id, one.title = ebpf.ProgramID(b.Id), b.Name
			one.weft = on.knows(one.id, b.Name)
			one.ours = b.Name == p.Name && b.Priority == filterPriority && on.owns(p.Name, one.id, b.Name)
		}
		if !one.weft && f.Attrs().Priority == filterPriority {
			one.what = fmt.Sprintf("a filter of somebody else (%s) has priority %d, which is weft's", f.Type(), filterPriority)
			one.wrong = "prio " + fmt.Sprint(filterPriority)
		}
		all = append(all, one)
	}
	return all, nil
}

// owns reports whether a program at the hook of one of ours is ours: by its pin, or else by its name.
func (on *hooks) owns(name string, id ebpf.ProgramID, title string) bool {
	const shown = 15 // characters of a name in the kernel, where it is not known from types
	if own, ok := on.own[name]; ok {
		return own == id
	}
	return title == name || title == name[:min(len(name), shown)]
}

// knows reports whether a program is any of weft's.
func (on *hooks) knows(id ebpf.ProgramID, title string) bool {
	return slices.ContainsFunc(bpf.DevicePrograms(), func(p bpf.Program) bool { return on.owns(p.Name, id, title) })
}

// programName is a program's name in the kernel; "" if this process may not ask.
func programName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// attached looks at the programs of a device: whether those that it should have run, and what of others is there, too.
func (e *examiner) attached(on *hooks, l netlink.Link, programs []bpf.Program) {
	a := l.Attrs()
	name := "device " + a.Name
	missing := e.beside(on, a, programs)
	switch {
	case e.pinned == nil || missing == nil: // no agent has run, or none is to be seen
	case len(missing) == 0:
		e.fine(name, "its programs are attached")
	case e.running:
		e.warn(name, "an agent runs, and "+strings.Join(missing, " and ")+" is not attached",
			"see in `weft status` whether it is one of the agent's devices: if not, name it with --devices")
	default:
		e.warn(name, strings.Join(missing, " and ")+" is not attached", "start the agent")
	}
}

// beside tells of what others have at the hooks of a device, and returns the names of our programs that are not there; nil if
// this process may not look.
func (e *examiner) beside(on *hooks, a *netlink.LinkAttrs, programs []bpf.Program) []string {
	missing := []string{}
	for _, p := range programs {
		all, err := on.at(a.Index, p)
		if err != nil {
			return nil // the privileges are told of
		}
		if !slices.ContainsFunc(all, func(o hooked) bool { return o.ours }) {
			missing = append(missing, p.Name)
		}
		for _, other := range all {
			unsure := other.id != 0 && other.title == "" && on.own[p.Name] == 0 && len(all) == 1
			switch {
			case other.weft || unsure:
			case other.wrong != "":
				e.fail("device "+a.Name, other.what, "remove it: tc filter del dev "+a.Name+" "+directionOf(p.Attach).String()+" "+other.wrong)
			default:
				e.warn("device "+a.Name, other.what, "nothing, unless it ends the way of packets before weft sees them: "+
					"bpftool net show dev "+a.Name)
			}
		}
	}
	return missing
}

// mostPods is how many devices of pods that are not as they should be are told of, each in a line.
const mostPods = 10

// pods looks at the devices of the pods that the last agent knew.
func (e *examiner) pods(on *hooks, links []netlink.Link) {
	addresses, err := e.podAddresses()
	if err != nil {
		e.warn("pods", oneLine(err), asAgent)
	}
	if len(addresses) == 0 {
		return
	}
	at := map[int]netlink.Link{}
	for _, l := range links {
		at[l.Attrs().Index] = l
	}
	var wrong []Finding
	for index, addrs := range addresses {
		if f := e.pod(on, at[index], index, addrs); f != nil {
			wrong = append(wrong, *f)
		}
	}
	slices.SortFunc(wrong, func(a, b Finding) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Detail, b.Detail)) })
	e.found = append(e.found, wrong[:min(len(wrong), mostPods)]...)
	if more := len(wrong) - mostPods; more > 0 {
		e.warn("pods", fmt.Sprintf("%d more devices of pods are not as they should be", more), "mend those above first")
	}
	if len(wrong) == 0 {
		e.fine("pods", "%d devices, and their programs are attached", len(addresses))
	}
	e.podMTU(at, addresses)
}

// podAddresses are those that the pinned map allows as sources, by the index of the device.
func (e *examiner) podAddresses() (map[int][]netip.Addr, error) {
	if e.pinned == nil {
		return nil, nil
	}
	m, err := ebpf.LoadPinnedMap(e.pinned.file(pinPods), &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, explain("open map "+e.pinned.file(pinPods), err)
	}
	defer m.Close()
	all := map[int][]netip.Addr{}
	var key bpf.PodKey
	var value uint32
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		all[int(key.IfIndex)] = append(all[int(key.IfIndex)], key.Addr())
	}
	return all, entries.Err()
}

// pod looks at the device of a pod, nil if it is gone. It returns what is wrong.
func (e *examiner) pod(on *hooks, l netlink.Link, index int, addrs []netip.Addr) *Finding {
	slices.SortFunc(addrs, netip.Addr.Compare)
	if l == nil {
		f := Finding{Level: Warning, Name: "pods", Advice: "start the agent, which forgets it when it knows all pods",
			Detail: fmt.Sprintf("the device of index %d, of pod %v, is gone", index, addrs[0])}
		if e.running {
			f.Advice = "wait a moment for the agent; if it stays, `weft status` has the reason"
		}
		return &f
	}
	a := l.Attrs()
	e.reversePath("device "+a.Name, a.Name)
	missing := e.beside(on, a, bpf.PodPrograms[:])
	if len(missing) == 0 {
		return nil
	}
	f := Finding{Level: Warning, Name: "device " + a.Name, Advice: "start the agent",
		Detail: fmt.Sprintf("%s is not attached: packets of pod %v are not identified there", strings.Join(missing, " and "), addrs[0])}
	if e.running {
		f.Level, f.Advice = Failure, "`weft status` has the reason; `weft verify --repair` tries again"
	}
	return &f
}

// podMTU compares the MTU of pods with that of the overlay, through which they may reach others.
func (e *examiner) podMTU(at map[int]netlink.Link, addresses map[int][]netip.Addr) {
	over := 0
	for _, l := range at {
		if isOverlay(l) {
			over = l.Attrs().MTU
		}
	}
	larger := 0
	for index := range addresses {
		if l := at[index]; l != nil && over != 0 && l.Attrs().MTU > over {
			larger++
		}
	}
	if larger > 0 {
		e.warn("pods", fmt.Sprintf("the mtu of %d devices is larger than the %d of the overlay: each connection into it has to find that out", larger, over),
			fmt.Sprintf("give pods an mtu of %d, in the configuration of the network plugin", over))
	}
}
