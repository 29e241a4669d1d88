// SPDX-License-Identifier: Apache-2.0

package datapath

// Kinds of what can differ from what is wanted.
const (
	KindMap      = "map"       // an entry of the ipcache
	KindFastPath = "fast-path" // an entry of the tables in front of it
	KindRoute    = "route"     // a route of ours
	KindDevice   = "device"    // a device that cannot have programs, or the overlay's
	KindProgram  = "program"   // a pinned program
	KindLink     = "link"      // a program at a hook
	KindPin      = "pin"       // a pinned map
	KindService  = "service"   // a frontend of a service
	KindPod      = "pod"       // an address that packets from a pod's device may have
	KindSettings = "settings"  // what the programs are told of the configuration
)

// Kinds are all of them.
func Kinds() []string {
	return []string{KindMap, KindFastPath, KindRoute, KindDevice, KindProgram, KindLink, KindPin, KindService, KindPod, KindSettings}
}

// Difference is one thing in the kernel that is not as the tables and the configuration want it.
type Difference struct {
	Kind   string
	Object string
	Want   string
	Have   string
	// Repaired: it is as wanted by now.
	Repaired bool
}

// unplannable are the devices that cannot have programs.
func unplannable(states []DeviceStatus) []Difference {
	var found []Difference
	for _, s := range states {
		if s.Error != "" {
			found = append(found, Difference{Kind: KindDevice, Object: s.Name, Want: "programs", Have: s.Error})
		}
	}
	return found
}
