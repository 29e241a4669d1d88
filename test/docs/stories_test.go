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

// Two machines with an etcd, an operator and an agent each come to know the workloads of each other; then another authority takes
// the place of east's, and what the old one signed is worth nothing.
func TestMachines(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	w := newWorld(t, "east-1", "west-1")
	w.join(t, "east-1", "192.0.2.11/24", "west-1", "192.0.2.21/24")
	w.story(t, onPage("docs/vms.md", "east-1", ""))

	east, west := w.machines["east-1"], w.machines["west-1"]
	const try = "weft troubleshoot kvstore --kvstore-config /root/east"
	west.must(t, "a config of its own", "cp /etc/weft/tls/{remote-west.crt,remote-west.key,east-ca.crt} /root && sed s,/etc/weft/tls,/root, /etc/weft/clustermesh/east >/root/east && "+try)
	west.must(t, "etcd does not trust the old authority", "scp east-1:/etc/weft/pki-old/remote-west.{crt,key} /root && ! "+try)
	west.must(t, "nor does that one vouch for etcd", "cp /etc/weft/tls/remote-west.{crt,key} /root && "+try+" && scp east-1:/etc/weft/pki-old/ca.crt /root/east-ca.crt && ! "+try)
	east.must(t, "a workload more", `sed s,10.1.1.10,10.1.1.11,\;s,web-1,web-3, /etc/weft/endpoints/web.yaml >/etc/weft/endpoints/more.yaml`)
	west.must(t, "west still reads east", "for ((i = 0; i < 300; i++)); do ! weft ip get 10.1.1.11 | grep -q shop/web-3 || exit 0; sleep 0.1; done; weft status; exit 1")
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
