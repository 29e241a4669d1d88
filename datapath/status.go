// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"maps"
	"net/netip"
	"time"
)

// Status is what the datapath has made of the kernel, for people and for the API. Slices in it are never written again.
type Status struct {
	// PinDir is <bpffs>/weft.
	PinDir      string      `json:"pinDir"`
	RoutingMode RoutingMode `json:"routingMode"`
	// Ready: the programs are attached, and the first reconciliation is done.
	Ready    bool           `json:"ready"`
	Devices  []DeviceStatus `json:"devices"`
	IPCache  MapStatus      `json:"ipcache"`
	FastPath FastPathStatus `json:"fastPath"`
	// Pods is nil where the agent knows of no pods of its own.
	Pods *PodStatus `json:"pods,omitempty"`
	// Overlay is nil where nothing is reached through it.
	Overlay *OverlayStatus `json:"overlay,omitempty"`
	Routes  []RouteStatus  `json:"routes"`
	Flows   FlowStatus     `json:"flows"`
	// Services is nil where sockets are not given backends.
	Services *ServiceStatus `json:"services,omitempty"`
	// Drift is what somebody else changed and was put right or, by a comparison alone, found, by its kind: KindMap, KindPin
	// and so on. It begins with the agent, and should not grow.
	Drift map[string]uint64 `json:"drift"`
	// Errors are those that belong to no device, map or route, such as a list of routes that could not be read.
	Errors []string `json:"errors,omitempty"`

	clients []DeviceStatus // of Services.Translation
}

// DeviceStatus is a device that is to have, or has, programs.
type DeviceStatus struct {
	Name string `json:"name"`
	// IfIndex is 0 if the device does not exist.
	IfIndex  int             `json:"ifIndex,omitempty"`
	Role     string          `json:"role"` // "uplink", "overlay", "pod" or "service"
	Programs []ProgramStatus `json:"programs,omitempty"`
	// Error says why there are no programs: the device does not exist, or has no Ethernet header.
	Error string `json:"error,omitempty"`
}

// ProgramStatus is one program on one device.
type ProgramStatus struct {
	Name      string `json:"name"`
	Direction string `json:"direction"` // "ingress" or "egress"
	Attached  bool   `json:"attached"`
	// LinkID and ProgramID are the kernel's; 0 while the program is not attached. Filters of tc have no link.
	LinkID    uint32 `json:"linkID,omitempty"`
	ProgramID uint32 `json:"programID,omitempty"`
	Error     string `json:"error,omitempty"`
}

// MapStatus is the state of the map that identifies addresses. The counts begin with the agent.
type MapStatus struct {
	// Entries is how many entries the kernel's map holds; the kernel does not count them, so this is what follows from
	// what was written.
	Entries    int    `json:"entries"`
	MaxEntries uint32 `json:"maxEntries"`
	// Full: the map refuses new entries, so that some addresses are not identified. An alarm.
	Full bool `json:"full"`
	// Pending is how many entries the kernel refused; they are tried again.
	Pending int `json:"pending"`
	// Unclaimed is how many entries were found in the map that nobody has claimed yet. They stay, and work, until those
	// who would claim them have been heard completely.
	Unclaimed int `json:"unclaimed"`

	Adopted  uint64 `json:"adopted"`  // found in the map as they are wanted, and not written
	Written  uint64 `json:"written"`  // set
	Deleted  uint64 `json:"deleted"`  // removed, those that were pruned included
	Pruned   uint64 `json:"pruned"`   // removed because nobody claims them
	Failures uint64 `json:"failures"` // writes that the kernel refused
	Resets   uint64 `json:"resets"`   // times that deletions were missed and the whole map was compared
	Drift    uint64 `json:"drift"`    // entries that somebody else changed in the map
	// VerifiedAt is when the whole map was last compared with the table.
	VerifiedAt time.Time `json:"verifiedAt,omitzero"`

	// LastError is the last failure of what is not right yet; "" if all is.
	LastError   string    `json:"lastError,omitempty"`
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`
}

// PodStatus is what there is at the devices of this node's own pods.
type PodStatus struct {
	// Check is what becomes of packets from a pod's device that have another's address: "off", "count" or "drop".
	Check PodCheck `json:"check"`
	// Addresses is how many addresses of pods are known at their devices.
	Addresses int            `json:"addresses"`
	Devices   []DeviceStatus `json:"devices"`
	// Missing are pods' addresses whose device is not found. They are looked for again.
	Missing []MissingPod `json:"missing,omitempty"`
}

// MissingPod is an address of a pod without device.
type MissingPod struct {
	Address netip.Addr `json:"address"`
	Reason  string     `json:"reason"`
}

// OverlayStatus is the overlay's device.
type OverlayStatus struct {
	Device string `json:"device"`
	Port   uint16 `json:"port"`
	// MTU is that of the underlay without the outer headers; 0 while there is no device.
	MTU   int    `json:"mtu,omitempty"`
	Error string `json:"error,omitempty"`
}

// RouteStatus is a route that a node's pod CIDR asks for.
type RouteStatus struct {
	Prefix  netip.Prefix `json:"prefix"`
	Gateway netip.Addr   `json:"gateway,omitzero"`
	Device  string       `json:"device,omitempty"`
	Node    string       `json:"node"` // "<cluster>/<name>"
	// Installed: the kernel's route is as wanted.
	Installed bool `json:"installed"`
	// Error says why it is not.
	Error string `json:"error,omitempty"`
}

// FlowStatus counts sampled packets since the agent began.
type FlowStatus struct {
	Received uint64 `json:"received"`
	// Dropped is how many were not delivered to a subscriber that was too slow.
	Dropped uint64 `json:"dropped"`
	// Invalid is how many could not be decoded.
	Invalid uint64 `json:"invalid"`
	// LastError is why flows are not read any more; "" if they are.
	LastError string `json:"lastError,omitempty"`
}

// Status returns the current state. It is safe for concurrent use.
func (d *Datapath) Status() Status {
	d.mu.Lock()
	s := d.state
	reconciler, fast, flows, services := d.reconciler, d.fast, d.flows, d.services
	var translation TranslationStatus
	translated := d.translate != nil
	if translated {
		translation = d.translate.status() // under the lock, since it reads maps that Run closes
	}
	d.mu.Unlock()
	if reconciler != nil {
		s.IPCache = reconciler.status()
		s.FastPath = fast.status()
	}
	s.Flows = flows.status()
	if services != nil {
		status := services.status()
		s.Services = &status
		if translated {
			translation.Devices = s.clients
			status.Translation = &translation
		}
	}
	s.Drift = maps.Clone(s.Drift)
	if s.Drift == nil {
		s.Drift = map[string]uint64{}
	}
	drift := map[string]uint64{KindMap: s.IPCache.Drift, KindFastPath: s.FastPath.Drift}
	if s.Services != nil {
		drift[KindService] = s.Services.Drift
	}
	for kind, n := range drift {
		if n > 0 {
			s.Drift[kind] = n
		}
	}
	select {
	case <-d.ready:
		s.Ready = true
	default:
	}
	return s
}

// note changes the state.
func (d *Datapath) note(change func(*Status)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change(&d.state)
}
