// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// onPage is a page done on a machine, in a shell of its own: "" is the machine's.
func onPage(file, on, shell string) *page {
	return &page{file: file, on: on, shell: shell, written: make(map[int][]string)}
}

// Two machines with an etcd, an operator and an agent each come to know the workloads of each other.
func TestMachines(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	w := newWorld(t, "east-1", "west-1")
	w.join(t, "east-1", "192.0.2.11/24", "west-1", "192.0.2.21/24")
	w.story(t, onPage("docs/vms.md", "east-1", ""))
}

// The lab, from its start to its end.
func TestLab(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	newWorld(t, "machine").story(t, onPage("docs/lab.md", "machine", ""))
}

// What the first node of a lab says.
func TestNodeOfLab(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	w := newWorld(t, "machine")
	w.machines["machine"].must(t, "the lab", "weft-lab up")
	t.Cleanup(func() { w.machines["machine"].must(t, "the end of the lab", "weft-lab down") })
	const shell = "weft-lab exec east-1"
	w.story(t, onPage("docs/cli.md", "machine", shell))
}
