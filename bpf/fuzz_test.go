// SPDX-License-Identifier: Apache-2.0

package bpf

import "testing"

// mostFrame is a length that PROG_RUN surely takes.
const mostFrame = 2048

// FuzzParse runs any bytes through both programs and wants what the model wants: verdict, identity, addresses,
// protocol, ports, flags, and the frame unchanged.
//
// lesson: C7
func FuzzParse(f *testing.F) {
	k := loadKernel(f)
	for _, cases := range allCases() {
		for _, c := range cases {
			f.Add(c.frame)
		}
	}
	f.Add(longOptions())
	f.Fuzz(func(t *testing.T, frame []byte) {
		frame = frame[:min(len(frame), mostFrame)]
		if !runnable(frame) {
			return
		}
		k.check(t, Ingress, frame)
		k.check(t, Egress, frame)
	})
}
