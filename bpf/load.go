// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"maps"
	"slices"

	"github.com/cilium/ebpf"
)

// Names of the maps, in the specs and in the kernel.
const (
	MapIPCache  = FromNetdevMapIpcache      // IPCacheKey to IPCacheValue
	MapCounters = FromNetdevMapWeftCounters // CounterKey to CounterValue, per CPU
	MapNear     = FromNetdevMapWeftNear     // what programs remember of addresses, per CPU
	MapFront    = FromNetdevMapWeftFront    // FrontLine by its number, per CPU
	MapMissed   = FromNetdevMapWeftMissed   // 0 to Missed, per CPU
	MapEvents   = FromNetdevMapWeftEvents   // ring buffer of Event
	MapConfig   = FromNetdevMapWeftConfig   // 0 to Config
	MapPods     = FromPodMapWeftPods        // PodKey to PodValue
	MapFast     = FromNetdevMapWeftFast     // 0 (IPv4) and 1 (IPv6) to FastHead
	MapNetworks = FromNetdevMapWeftNetworks // memory of Networks
	MapHosts    = FromNetdevMapWeftHosts    // 0 (IPv4) and 1 (IPv6) to a table, see HostTable
)

// Program is one program and the hook that it is made for.
type Program struct {
	// Name is the program's name in the spec. The kernel shows its first 15 characters.
	Name string
	// Attach is the tcx hook; on kernels before 6.6 it stands for the clsact hook of the same direction. The spec is
	// for both: it does not name the hook.
	Attach ebpf.AttachType
	// Behind: it runs behind the other program of ours that the hook may have.
	Behind bool
}

// Programs are those of native devices. Each returns TC_ACT_UNSPEC for every packet and changes no byte of any. They
// expect devices whose frames begin with an Ethernet header.
var Programs = [...]Program{
	{Name: FromNetdevProgWeftFromNetdev, Attach: ebpf.AttachTCXIngress},
	{Name: ToNetdevProgWeftToNetdev, Attach: ebpf.AttachTCXEgress},
}

// OverlayPrograms are those of the overlay's device, a VXLAN device that takes its tunnels from metadata. They drop what
// is not to be carried.
var OverlayPrograms = [...]Program{
	{Name: FromOverlayProgWeftFromOverlay, Attach: ebpf.AttachTCXIngress},
	{Name: ToOverlayProgWeftToOverlay, Attach: ebpf.AttachTCXEgress},
}

// PodPrograms are those of the host's side of pods' devices. They change no byte of a packet, and drop one only if the
// configuration says so.
var PodPrograms = [...]Program{
	{Name: FromPodProgWeftFromPod, Attach: ebpf.AttachTCXIngress},
	{Name: ToPodProgWeftToPod, Attach: ebpf.AttachTCXEgress},
}

// AllPrograms are all of them together.
func AllPrograms() []Program { return slices.Concat(Programs[:], OverlayPrograms[:], PodPrograms[:]) }

// Load returns the specs of AllPrograms and of the maps, each of which they share by its name. The spec is the caller's
// to change.
func Load() (*ebpf.CollectionSpec, error) {
	spec, err := LoadFromNetdev()
	if err != nil {
		return nil, err
	}
	for _, load := range []func() (*ebpf.CollectionSpec, error){LoadToNetdev, LoadFromOverlay, LoadToOverlay, LoadFromPod, LoadToPod} {
		more, err := load()
		if err != nil {
			return nil, err
		}
		maps.Copy(spec.Programs, more.Programs)
		maps.Copy(spec.Maps, more.Maps)
	}
	return spec, nil
}
