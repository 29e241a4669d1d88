// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// Pods tells of the pods of this node. It is safe for concurrent use.
type Pods interface {
	// Addresses returns the addresses of all pods. complete is false while there may be more than are known; then none that
	// an earlier agent knew of is forgotten.
	Addresses() (all []netip.Addr, complete bool)
	// Changed returns a channel that closes when Addresses has another answer.
	Changed() <-chan struct{}
}

// PodCheck says what becomes of a packet from a pod's device whose source is no address of that pod.
type PodCheck string

// The checks.
const (
	PodCheckOff   PodCheck = "off"   // nobody looks
	PodCheckCount PodCheck = "count" // it is counted, and passed on
	PodCheckDrop  PodCheck = "drop"  // it is counted, and dropped
)

// Valid reports whether c is one of the three.
func (c PodCheck) Valid() bool { return c == PodCheckOff || c == PodCheckCount || c == PodCheckDrop }

func (c PodCheck) setting() bpf.PodCheck {
	return map[PodCheck]bpf.PodCheck{PodCheckCount: bpf.PodCheckCount, PodCheckDrop: bpf.PodCheckDrop}[c]
}

// podPlan is where the pods of this node are.
type podPlan struct {
	devices  []device // each once
	keys     map[bpf.PodKey]bool
	have     map[bpf.PodKey]uint32 // what the pods' map has
	missing  []MissingPod
	complete bool
}

// podKinds are the kinds of devices that may be the host's side of a pod's.
var podKinds = []string{"veth", "tuntap", "netkit"}

// planPods finds the devices of this node's pods among the existing ones, other than those in taken, which have programs
// for other reasons.
func (k *keeper) planPods(existing, taken []device, have map[bpf.PodKey]uint32) podPlan {
	plan := podPlan{keys: map[bpf.PodKey]bool{}, have: have}
	addresses, complete := k.datapath.cfg.Pods.Addresses()
	plan.complete = complete
	finder := newPodFinder(k.host, existing, taken, have)
	settled := k.neighbours.read()
	for _, addr := range addresses {
		dev, err := finder.find(addr)
		if err != nil {
			plan.missing = append(plan.missing, MissingPod{Address: addr, Reason: err.Error()})
			continue
		}
		if !slices.ContainsFunc(plan.devices, func(d device) bool { return d.Index == dev.Index }) {
			dev.Role = rolePod
			plan.devices = append(plan.devices, dev)
		}
		plan.keys[bpf.MakePodKey(dev.Index, addr)] = true
	}
	if settled(finder.found) {
		mark(k.changed)
	}
	slices.SortFunc(plan.missing, func(a, b MissingPod) int { return a.Address.Compare(b.Address) })
	return plan
}

// podFinder finds the devices of pods. What it has read of bridges it reads once.
type podFinder struct {
	host            *host
	existing, taken []device
	last            map[netip.Addr]int // where pods were before, by the indexes of devices
	bridges         map[int]*bridgeView
	found           neighbourhood // behind bridges
}

// bridgeView is what the kernel knows of who is behind a bridge.
type bridgeView struct {
	hardware map[netip.Addr]string
	ports    map[string]int
}

func newPodFinder(h *host, existing, taken []device, have map[bpf.PodKey]uint32) *podFinder {
	f := &podFinder{
		host: h, existing: existing, taken: taken, last: map[netip.Addr]int{}, bridges: map[int]*bridgeView{}, found: newNeighbourhood(),
	}
	for key := range have {
		f.last[key.Addr()] = int(key.IfIndex)
	}
	return f
}

// find returns the device on the host's side of the pod with an address: the one that the route to it leads to, or where
// that is a bridge, the port behind which the address's neighbour is. The error is for the operator.
func (f *podFinder) find(addr netip.Addr) (device, error) {
	index, err := f.host.directDevice(addr)
	if err != nil {
		return device{}, err
	}
	dev, err := f.device(index)
	if err != nil {
		return device{}, err
	}
	if dev.Kind == "bridge" {
		if dev, err = f.behind(dev, addr); err != nil {
			return device{}, err
		}
	}
	switch {
	case slices.ContainsFunc(f.taken, func(d device) bool { return d.Index == dev.Index }):
		return device{}, fmt.Errorf("the route to it leads to %s, which is no pod's", dev.Name)
	case !dev.Ethernet || !slices.Contains(podKinds, dev.Kind):
		return device{}, fmt.Errorf("the route to it leads to %s, a device of type %s: a veth is wanted", dev.Name, dev.Kind)
	}
	return dev, nil
}

func (f *podFinder) device(index int) (device, error) {
	for _, dev := range f.existing {
		if dev.Index == index {
			return dev, nil
		}
	}
	return device{}, fmt.Errorf("the route to it leads to the device of index %d, which has just come or gone", index)
}

// behind returns the port of a bridge that leads to an address. Bridges forget who is silent: then it is the port that it was
// last.
func (f *podFinder) behind(bridge device, addr netip.Addr) (device, error) {
	index, unknown, err := f.port(bridge, addr)
	if err != nil {
		return device{}, err
	}
	if unknown == nil {
		return f.device(index)
	}
	if dev, err := f.device(f.last[addr]); err == nil && dev.Master == bridge.Index {
		return dev, nil
	}
	// The answer is a change that the kernel tells of.
	if err := f.host.callNeighbour(bridge.Index, addr); err != nil {
		return device{}, fmt.Errorf("%w, and: %w", unknown, err)
	}
	return device{}, unknown
}

// port returns the port behind which a bridge has learnt an address to be, or why it is unknown.
func (f *podFinder) port(bridge device, addr netip.Addr) (index int, unknown, err error) {
	view, err := f.view(bridge)
	if err != nil {
		return 0, nil, err
	}
	hardware := view.hardware[addr]
	f.found.hardware[addr] = hardware
	if hardware == "" {
		return 0, fmt.Errorf("behind bridge %s nobody has answered for it yet", bridge.Name), nil
	}
	index, ok := view.ports[hardware]
	f.found.ports[behindBridge{bridge.Index, hardware}] = index
	if !ok {
		return 0, fmt.Errorf("bridge %s does not know the port of %s", bridge.Name, hardware), nil
	}
	return index, nil, nil
}

func (f *podFinder) view(bridge device) (*bridgeView, error) {
	if view := f.bridges[bridge.Index]; view != nil {
		return view, nil
	}
	hardware, err := f.host.hardwareAddresses(bridge.Index)
	if err != nil {
		return nil, err
	}
	ports, err := f.host.learntPorts(bridge.Index)
	if err != nil {
		return nil, err
	}
	f.bridges[bridge.Index] = &bridgeView{hardware, ports}
	return f.bridges[bridge.Index], nil
}

// wantedPods adds the devices of pods to those that are to have programs. While not all pods are known, the devices that
// have their programs keep them.
func (k *keeper) wantedPods(wanted, sticky, existing []device) (_, _ []device, plan podPlan, err error) {
	have, err := k.podEntries()
	if k.datapath.cfg.Pods == nil {
		return wanted, sticky, podPlan{have: have, complete: true}, err // of a life with pods
	}
	plan = k.planPods(existing, wanted, have)
	if !plan.complete {
		sticky = slices.Clone(sticky)
		for _, dev := range existing {
			dev.Role = rolePod
			sticky = append(sticky, dev)
		}
	}
	return append(slices.Clone(wanted), plan.devices...), sticky, plan, err
}

// podEntries reads the pods' map.
func (k *keeper) podEntries() (map[bpf.PodKey]uint32, error) {
	have := map[bpf.PodKey]uint32{}
	var key bpf.PodKey
	var value uint32
	entries := k.maps[bpf.MapPods].Iterate()
	for entries.Next(&key, &value) {
		have[key] = value
	}
	if err := entries.Err(); err != nil {
		return have, fmt.Errorf("read map %s: %w", bpf.MapPods, err)
	}
	return have, nil
}

// changes are the entries of the pods' map that are to be set and removed.
func (p *podPlan) changes() (add, remove []bpf.PodKey) {
	for key := range p.keys {
		if p.have[key] != bpf.PodValue {
			add = append(add, key)
		}
	}
	for key := range p.have {
		if !p.keys[key] && p.complete {
			remove = append(remove, key)
		}
	}
	return add, remove
}

// checkPods makes the pods' map what it should be around attach, which gives the devices their programs: no packet of a
// pod meets a program that does not know its address.
func (k *keeper) checkPods(plan podPlan, attach func() error) error {
	add, remove := plan.changes()
	var errs []error
	drift := 0
	for _, key := range add {
		if k.leftPods[key] {
			drift++
		}
		if err := k.maps[bpf.MapPods].Put(key, bpf.PodValue); err != nil {
			errs = append(errs, fmt.Errorf("let packets from index %d have the source %v: %w", key.IfIndex, key.Addr(), err))
		}
	}
	errs = append(errs, attach())
	for _, key := range remove {
		if k.leftPods != nil && !k.leftPods[key] {
			drift++
		}
		if err := k.maps[bpf.MapPods].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("let packets from index %d have the source %v no more: %w", key.IfIndex, key.Addr(), err))
		}
	}
	k.drifted(KindPod, drift)
	if k.leftPods = plan.keys; !plan.complete {
		k.leftPods = nil
	}
	return errors.Join(errs...)
}

// comparePods notes what checkPods would change of the map.
func comparePods(report *Report, plan podPlan, names map[int]string) {
	add, remove := plan.changes()
	report.Compared += len(plan.keys)
	name := func(key bpf.PodKey) string { return fmt.Sprintf("%v at %s", key.Addr(), names[int(key.IfIndex)]) }
	for _, key := range add {
		report.add(Difference{Kind: KindPod, Object: name(key), Want: "allowed as a source", Have: "absent"})
	}
	for _, key := range remove {
		report.add(Difference{Kind: KindPod, Object: name(key), Want: "absent", Have: "allowed as a source"})
	}
}

// publishPods splits the devices of pods from the others, and puts them into the status.
func (k *keeper) publishPods(plan podPlan, devices []DeviceStatus) (others []DeviceStatus) {
	if k.datapath.cfg.Pods == nil || devices == nil {
		return devices
	}
	s := &PodStatus{Check: k.datapath.cfg.PodCheck, Addresses: len(plan.keys), Devices: []DeviceStatus{}, Missing: plan.missing}
	others = []DeviceStatus{}
	for _, d := range devices {
		if d.Role == rolePod.String() {
			s.Devices = append(s.Devices, d)
		} else {
			others = append(others, d)
		}
	}
	k.datapath.note(func(whole *Status) { whole.Pods = s })
	return others
}
