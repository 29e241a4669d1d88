// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"strings"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// stories are the pages of each test, in this order.
var stories = map[string][]*page{
	"TestMachines": {
		{file: "docs/vms.md", on: "east-1", after: newAuthority},
		onPage("docs/services.md", "east-1", ""),
		onPage("docs/endpoints.md", "east-1", "", "rm /etc/weft/endpoints/*"),
		onPage("docs/limits.md", "east-1", ""),
		onPage("docs/agent.md", "east-1", ""),
		onPage("docs/operator.md", "east-1", "", "systemctl stop weft-operator"),
		onPage("docs/operator-gc.md", "east-1", "",
			`weft kvstore set --kvstore-config /etc/weft/kvstore-operator.yaml cilium/state/identities/v1/id/65999 'k8s:app=a;'`,
			`weft kvstore set --kvstore-config /etc/weft/kvstore-operator.yaml cilium/state/ip/v1/default/10.1.1.99 \`,
			`  '{"IP":"10.1.1.99","HostIP":"192.0.2.99","ID":65999,"Metadata":"weft:east/east-9"}'`),
		onPage("docs/operations.md", "east-1", ""),
	},
	"TestNode": {
		onPage("docs/install.md", "node", ""),
		onPage("README.md", "node", "", "systemctl stop weft-agent"),
		onPage("docs/page.md", "node", ""),
		onPage("docs/cilium.md", "node", "", "rm /etc/weft/clustermesh/west; echo 192.0.2.10 west.mesh.cilium.io >>/etc/hosts; systemctl start weft-agent"),
		onPage("docs/etcd.md", "node", ""),
		onPage("docs/kvstore.md", "node", "", "sed -i '/west.mesh/d' /etc/hosts"),
	},
	"TestLab": {
		onPage("docs/lab.md", "machine", ""),
	},
	"TestNodeOfLab": {
		onPage("docs/cli.md", "machine", "weft-lab exec east-1"),
	},
}

// onPage is a page done on a machine, in a shell of its own: "" is the machine's. What must be there before it begins is made by scripts.
func onPage(file, on, shell string, before ...string) *page {
	return &page{file: file, on: on, shell: shell, before: strings.Join(before, "\n")}
}

// Two machines with an etcd, an operator and an agent each come to know the workloads of each other, and one of them is operated.
func TestMachines(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	w := newWorld(t, "east-1", "west-1")
	w.join(t, "east-1", "192.0.2.11/24", "west-1", "192.0.2.21/24")
	w.story(t)
}

// newAuthority: docs/vms.md has let another authority take the place of east's, and what the old one signed is worth nothing.
func newAuthority(t *testing.T, w *world) {
	east, west := w.machines["east-1"], w.machines["west-1"]
	const try = "weft troubleshoot kvstore --kvstore-config /root/east"
	west.must(t, "a config of its own", "cp /etc/weft/tls/{remote-west.crt,remote-west.key,east-ca.crt} /root && sed s,/etc/weft/tls,/root, /etc/weft/clustermesh/east >/root/east && "+try)
	west.must(t, "etcd does not trust the old authority", "scp east-1:/etc/weft/pki-old/remote-west.{crt,key} /root && ! "+try)
	west.must(t, "nor does that one vouch for etcd", "cp /etc/weft/tls/remote-west.{crt,key} /root && "+try+" && scp east-1:/etc/weft/pki-old/ca.crt /root/east-ca.crt && ! "+try)
	east.must(t, "a workload more", `sed s,10.1.1.10,10.1.1.11,\;s,web-1,web-3, /etc/weft/endpoints/web.yaml >/etc/weft/endpoints/more.yaml`)
	west.must(t, "west still reads east", "for ((i = 0; i < 300; i++)); do ! weft ip get 10.1.1.11 | grep -q shop/web-3 || exit 0; sleep 0.1; done; weft status; exit 1")
}

// A machine joins a cluster that is there already: its etcd has what a Cilium cluster of that name had.
func TestNode(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	w := newWorld(t, "node", "west")
	w.join(t, "node", "192.0.2.11/24", "west", "192.0.2.10/24")
	command(t, "cp", golden.Path(t, "kvstore-state-west.jsonl"), w.dir)
	w.machines["west"].must(t, "the etcd of west", `
weft operator etcd-init --cluster-name west --remote east --certificates pki --server-name west.example.net,west.mesh.cilium.io,192.0.2.10,127.0.0.1 >/dev/null
cat >/etc/default/etcd <<ENV
ETCD_DATA_DIR=/var/lib/etcd/west
ETCD_INITIAL_CLUSTER_TOKEN=west
ETCD_LISTEN_CLIENT_URLS=https://192.0.2.10:2379
ETCD_ADVERTISE_CLIENT_URLS=https://192.0.2.10:2379
ETCD_CERT_FILE=/root/pki/etcd.crt
ETCD_KEY_FILE=/root/pki/etcd.key
ETCD_TRUSTED_CA_FILE=/root/pki/ca.crt
ETCD_CLIENT_CERT_AUTH=true
ENV
systemctl start etcd
printf 'endpoints: ["https://192.0.2.10:2379"]\ntrusted-ca-file: /root/pki/ca.crt\ncert-file: /root/pki/admin-west.crt\nkey-file: /root/pki/admin-west.key\n' >admin.yaml
grep -v '"cilium/.heartbeat"' /mnt/kvstore-state-west.jsonl | weft kvstore set --kvstore-config admin.yaml --timeout 60s --from -
printf 'cluster-name: west\ncluster-id: 2\nkvstore-config: /root/admin.yaml\n' >/etc/weft/operator.yaml
systemctl start weft-operator
setsid ping -q -i 0.01 192.0.2.11 >/dev/null 2>&1 &
mkdir /mnt/west/given
cp pki/ca.crt pki/remote-east.crt pki/remote-east.key /mnt/west/given
`)
	w.machines["node"].must(t, "what the node has been given", `
echo 192.0.2.10 west.example.net >>/etc/hosts
mkdir -p bin /etc/weft/tls
ln -s /usr/local/bin/weft bin/weft
given=/mnt/west/given
cp $given/ca.crt /etc/weft/tls/west-ca.crt; cp $given/remote-east.crt /etc/weft/tls/client.crt; cp $given/remote-east.key /etc/weft/tls/client.key
cp $given/ca.crt west-ca.crt; cp $given/remote-east.crt east.crt; cp $given/remote-east.key east.key
printf 'cluster-name: east\ncluster-id: 1\nclustermesh-config: /etc/weft/clustermesh\nflow-sample: 1\n' >/etc/weft/agent.yaml
`)
	w.story(t)
}

// The lab, from its start to its end.
func TestLab(t *testing.T) {
	t.Parallel()
	if !testutil.Isolate(t) {
		return
	}
	newWorld(t, "machine").story(t)
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
	w.story(t)
}
