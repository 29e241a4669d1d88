// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

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
	missing  []MissingPod
	complete bool
}

// podKinds are the kinds of devices that may be the host's side of a pod's.
var podKinds = []string{"veth", "tuntap", "netkit"}

// planPods finds the devices of this node's pods among the existing ones, other than those in taken, which have programs
// for other reasons.
func (k *keeper) planPods(existing, taken []device) podPlan {
	plan := podPlan{keys: map[bpf.PodKey]bool{}}
	addresses, complete := k.datapath.cfg.Pods.Addresses()
	plan.complete = complete
	finder := podFinder{host: k.host, existing: existing, taken: taken}
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
	slices.SortFunc(plan.missing, func(a, b MissingPod) int { return a.Address.Compare(b.Address) })
	return plan
}

// podFinder finds the devices of pods. What it has read of bridges it reads once.
type podFinder struct {
	host            *host
	existing, taken []device
	ports           map[int]map[string]int // by bridge and hardware address
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
		if index, err = f.port(dev, addr); err != nil {
			return device{}, err
		}
		if dev, err = f.device(index); err != nil {
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

// port returns the port of a bridge that leads to an address.
func (f *podFinder) port(bridge device, addr netip.Addr) (int, error) {
	family := netlink.FAMILY_V4
	if addr.Is6() {
		family = netlink.FAMILY_V6
	}
	hardware := ""
	err := dump("list neighbours", func() error {
		list, err := f.host.handle.NeighList(bridge.Index, family)
		for _, n := range list {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == addr && len(n.HardwareAddr) > 0 {
				hardware = n.HardwareAddr.String()
			}
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	if hardware == "" {
		return 0, fmt.Errorf("behind bridge %s nobody has answered for it yet", bridge.Name)
	}
	if f.ports[bridge.Index] == nil {
		if err := f.readPorts(bridge.Index); err != nil {
			return 0, err
		}
	}
	index, ok := f.ports[bridge.Index][hardware]
	if !ok {
		return 0, fmt.Errorf("bridge %s does not know the port of %s", bridge.Name, hardware)
	}
	return index, nil
}

// readPorts reads which hardware addresses are behind which ports of a bridge.
func (f *podFinder) readPorts(bridge int) error {
	ports := map[string]int{}
	err := dump("list the addresses behind a bridge", func() error {
		list, err := f.host.handle.NeighList(0, unix.AF_BRIDGE)
		for _, n := range list {
			if n.MasterIndex == bridge && n.State&unix.NUD_PERMANENT == 0 { // the permanent ones are the ports' own
				ports[n.HardwareAddr.String()] = n.LinkIndex
			}
		}
		return err
	})
	if f.ports == nil {
		f.ports = map[int]map[string]int{}
	}
	f.ports[bridge] = ports
	return err
}

// wantedPods adds the devices of pods to those that are to have programs. While not all pods are known, the devices that
// have their programs keep them.
func (k *keeper) wantedPods(wanted, sticky, existing []device) (_, _ []device, plan podPlan) {
	if k.datapath.cfg.Pods == nil {
		return wanted, sticky, plan
	}
	plan = k.planPods(existing, wanted)
	if !plan.complete {
		sticky = slices.Clone(sticky)
		for _, dev := range existing {
			dev.Role = rolePod
			sticky = append(sticky, dev)
		}
	}
	return append(slices.Clone(wanted), plan.devices...), sticky, plan
}

// podChanges are the entries of the pods' map that are to be set and removed.
func (k *keeper) podChanges(plan podPlan) (add, remove []bpf.PodKey, err error) {
	if k.datapath.cfg.Pods == nil {
		plan.complete = true // of a life with pods
	}
	add = slices.Collect(maps.Keys(plan.keys))
	var key bpf.PodKey
	var value uint32
	entries := k.maps[bpf.MapPods].Iterate()
	for entries.Next(&key, &value) {
		switch {
		case plan.keys[key] && value == bpf.PodValue:
			add = slices.DeleteFunc(add, func(a bpf.PodKey) bool { return a == key })
		case !plan.keys[key] && plan.complete:
			remove = append(remove, key)
		}
	}
	if err := entries.Err(); err != nil {
		return nil, nil, fmt.Errorf("read map %s: %w", bpf.MapPods, err)
	}
	return add, remove, nil
}

// checkPods makes the pods' map what it should be around attach, which gives the devices their programs: no packet of a
// pod meets a program that does not know its address.
func (k *keeper) checkPods(plan podPlan, attach func() error) error {
	add, remove, err := k.podChanges(plan)
	errs := []error{err}
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
func (k *keeper) comparePods(report *Report, plan podPlan, names map[int]string) error {
	add, remove, err := k.podChanges(plan)
	report.Compared += len(plan.keys)
	name := func(key bpf.PodKey) string { return fmt.Sprintf("%v at %s", key.Addr(), names[int(key.IfIndex)]) }
	for _, key := range add {
		report.add(Difference{Kind: KindPod, Object: name(key), Want: "allowed as a source", Have: "absent"})
	}
	for _, key := range remove {
		report.add(Difference{Kind: KindPod, Object: name(key), Want: "absent", Have: "allowed as a source"})
	}
	return err
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
