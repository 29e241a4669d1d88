// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/mesh"
)

// slowKernel has carried nothing until it is done.
type slowKernel struct{ done bool }

func (k *slowKernel) Now() datapath.Moment         { return datapath.Moment{} }
func (k *slowKernel) Carried(datapath.Moment) bool { return k.done }

// A cluster that has been listed is on its way until the kernel has its list, each time that it is listed anew; what comes later
// puts it back on its way no more.
func TestCarried(t *testing.T) {
	kernel := &slowKernel{}
	c := carried{kernel: kernel}
	look := func(states ...mesh.State) map[string]bool {
		var clusters []mesh.RemoteStatus
		for i, s := range states {
			clusters = append(clusters, mesh.RemoteStatus{Name: []string{"west", "north"}[i], State: s})
		}
		return c.look(clusters)
	}
	for i, step := range []struct {
		done   bool
		states []mesh.State
		want   map[string]bool
	}{
		{false, nil, map[string]bool{}},
		{false, []mesh.State{mesh.Syncing, mesh.Ready}, map[string]bool{"north": true}},
		{false, []mesh.State{mesh.Ready, mesh.Ready}, map[string]bool{"west": true, "north": true}},
		{true, []mesh.State{mesh.Ready, mesh.Ready}, map[string]bool{"west": false, "north": false}},
		{false, []mesh.State{mesh.Ready, mesh.Ready}, map[string]bool{"west": false, "north": false}},
		{false, []mesh.State{mesh.Stale, mesh.Ready}, map[string]bool{"north": false}},
		{false, []mesh.State{mesh.Ready}, map[string]bool{"west": true}},
	} {
		kernel.done = step.done
		if diff := cmp.Diff(step.want, look(step.states...)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}
