// SPDX-License-Identifier: Apache-2.0

package bpf

// Config is the one value of MapConfig, read for each packet: struct config in lib/structs.h. While it is zero, nothing
// is sampled and the world is one.
type Config struct {
	FlowSample uint32 // one event in so many packets, at random; 0: none
	DualStack  uint8  // 1: the world of addresses without entry is told apart by family (9, 10), not 2
	Pad        [3]uint8
}

// MakeConfig returns the Config of the two settings.
func MakeConfig(flowSample uint32, dualStack bool) Config {
	c := Config{FlowSample: flowSample}
	if dualStack {
		c.DualStack = 1
	}
	return c
}
