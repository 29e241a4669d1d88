// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/spf13/cobra"
)

// help is what a command says of itself beyond its one line.
type help struct {
	long     string
	examples []string
}

// helpTexts has the help of every command that does something, by its name below weft. It stands in one place because it is
// one text: the reference in docs/reference and the manual pages are made of it.
var helpTexts = map[string]help{
	"agent": {"Run the agent of this node until it is interrupted. It follows the clusters of --clustermesh-config, keeps the kernel equal to " +
		"what it reads, and publishes this node and its workloads with --kvstore-config. What is in the kernel and in etcd stays when it ends.",
		[]string{
			"weft agent --cluster-name east --cluster-id 1 --clustermesh-config /etc/weft/clustermesh",
			"weft agent --config /etc/weft/agent.yaml --log-level debug",
			"weft agent --config /etc/weft/agent.yaml --metrics-address 127.0.0.1:9879",
		}},
	"status": {"Show how the agent, the clusters it follows and the kernel are, on one screen, with a tree for each cluster. The exit code is 0 if " +
		"all is well, 1 if it is not, 3 if no agent answers.",
		[]string{"weft status", "weft status --all-controllers", "weft status --wait --timeout 1m --brief", "weft status -o jsonpath={.problems[*]}"}},
	"ip list": {"List every prefix that somebody claims, with the claim that is in force. With --watch, go on with what is added, changes or is " +
		"removed.",
		[]string{"weft ip list", "weft ip list -o wide --watch", "weft ip list -o jsonpath='{.items[*].prefix}'"}},
	"ip get": {"Show whose an address is: the claim in force for the longest known prefix that contains it, and the claims that it keeps out. " +
		"`weft explain` tells why, and what the kernel makes of it.",
		[]string{"weft ip get 10.2.1.10", "weft ip get fd00:10:2:1::10 -o yaml"}},
	"ip conflicts": {"List the prefixes of which several clusters or sources say different things: the claim that is in force, those that it keeps " +
		"out, and what it has before them. One of them is wrong; when a claim goes, the next one takes over.",
		[]string{"weft ip conflicts", "weft ip conflicts --watch"}},
	"explain": {"Tell all that is known of an address: every claim for every prefix that contains it, with the cluster, the key in its etcd, the " +
		"revision and the age; which claim is in force and why; the labels of the identity; the node behind the address; the kernel's entry, and " +
		"whether it is what the agent wants; the route that the kernel takes; the state of the cluster. While no agent answers, the kernel " +
		"alone is asked, and the exit code is 3.",
		[]string{"weft explain 10.2.1.10", "weft explain 10.2.1.10 -o json", "weft explain fd00:10:2:1::10"}},
	"node list": {"List the nodes of every cluster, with their addresses, the prefixes of their pods, and their encryption key.", []string{"weft node list", "weft node list -o json"}},
	"identity list": {"List the identities of every cluster, or of one, with the labels that they stand for and, of our own cluster, how many workloads of " +
		"this node have each.",
		[]string{"weft identity list", "weft identity list --cluster west", "weft identity list --watch"}},
	"identity get": {"Show which labels an identity stands for, and which cluster allocated it. Reserved identities go by their names, too.",
		[]string{"weft identity get 131329", "weft identity get remote-node"}},
	"clusters list": {"List the clusters that the agent follows: state, counts, the revision of their etcd and how far behind it we are, how fresh " +
		"that is, and how much was rejected. The own cluster, followed for its other nodes, stands last.",
		[]string{"weft clusters list", "weft clusters list -o wide", "weft clusters list --watch"}},
	"clusters get": {"Show everything about a cluster as a tree: its etcd, certificates, configuration, what has been listed, what was rejected, and " +
		"the last error.",
		[]string{"weft clusters get west", "weft clusters get west -o yaml"}},
	"clusters rejected": {"Show what clusters published that was not accepted, of all clusters or of one: how often for which reason since the agent " +
		"started, and the last 100 of each cluster with time, key and reason. What is rejected never reaches the kernel.",
		[]string{"weft clusters rejected", "weft clusters rejected west", "weft clusters rejected west -o json"}},
	"clusters watch": {"List the clusters, as `weft clusters list` does, and go on with those that are added, change or are removed.",
		[]string{"weft clusters watch", "weft clusters watch -o json"}},
	"clusters add": {"Try to reach the etcd of a remote cluster, step by step as `weft troubleshoot kvstore` does, and, if that goes well, write its " +
		"config file, which a running agent finds by itself. It needs no agent. What fails is told with what to do about it, nothing is written " +
		"then, and the exit code is 1. The file has the group of its directory; the files that it names must be readable for the agent, too.",
		[]string{
			"weft clusters add west --endpoint https://west.example.net:2379 --ca-file west-ca.crt --cert-file east.crt --key-file east.key",
			"weft clusters add west --endpoint https://west.example.net:2379 --username remote-east --password-file - --dry-run",
		}},
	"clusters remove": {"Remove the config file of a remote cluster. A running agent then withdraws exactly what that cluster claimed, in the kernel, too.",
		[]string{"weft clusters remove west", "weft clusters remove west --clustermesh-config /etc/weft/clustermesh"}},
	"config view": {"List the options that the running agent goes by; with --origin, where each comes from: a flag, a variable of the environment, a " +
		"line of the file of --config, or nobody, and it is the default. The configs of etcds are files of their own, and only named here.",
		[]string{"weft config view", "weft config view --origin", "weft config view -o json"}},
	"gather": {"Write a file for those who are asked for help: what the agent, the kernel and this machine say, each as the output of a command. What " +
		"is in it is a fixed list, and printed: no config of an etcd, no certificate, no key, no password, not even where an error quotes one; " +
		"no addresses of workloads and no flows but with --addresses. It needs no agent; what is missing without one is said.",
		[]string{"weft gather", "weft gather --addresses --file /tmp/weft.tar.gz"}},
	"page": {"Print the address at which a browser of this machine finds the agent's page, where the agent runs with --page-address. The token in it " +
		"is a secret: who knows it reads the page until the agent ends. Without --page-address, the page is on the agent's socket, and the exit code is 1.",
		[]string{"weft page", "weft page -o json"}},
	"log-level": {"Show the least level of what the running agent logs, or change it until the agent ends: debug, info, warn or error. Lines that " +
		"repeat themselves are left out after 50 in a minute, but for those of debug.",
		[]string{"weft log-level", "weft log-level debug"}},
	"verify": {"Compare what the clusters say, what is known of them and what is in the kernel: the map, routes, devices, programs and pins. Each " +
		"difference is a line. The exit code is 0 if there is none, or none that was not repaired, 1 otherwise, 3 if no agent answers.",
		[]string{"weft verify", "weft verify --repair", "weft verify -o json"}},
	"cleanup": {"Remove everything that is provably weft's from this node: programs, maps, links, filters, routes, the overlay's device. Packets " +
		"are not identified any more, and routes to remote pods are gone. It refuses while an agent runs. The exit code is 1 if something is " +
		"left that cannot be proved to be weft's.",
		[]string{"weft cleanup --dry-run", "weft cleanup"}},
	"diagnose": {"Look for what on this machine is in weft's way: the kernel, privileges, the BPF file system, settings, devices, programs of others, " +
		"the overlay's port and MTU. It needs no agent, and no root for most. A line begins with ✓ if all is well, with ! for a warning, and " +
		"with ✗ for what keeps weft from working; then the exit code is 1.",
		[]string{"weft diagnose", "weft diagnose --devices eth0,eth1", "weft diagnose -o json"}},
	"metrics": {"Show the metrics of the agent, those that Prometheus reads from /metrics, as they are now. They are on the agent's socket, and " +
		"on TCP with --metrics-address.",
		[]string{"weft metrics", "weft metrics --match ^weft_clustermesh"}},
	"metrics list": {"List the metrics of the agent, those that Prometheus reads from /metrics, as they are now. Histograms come as their buckets.",
		[]string{"weft metrics list", "weft metrics list --match bpf_map -o json"}},
	"service list": {"List the services of our own cluster and those that other clusters offer backends for: how many backends each cluster " +
		"has, how many of them are in use, and why those. What others offer is used only where our own cluster has a service of the name " +
		"that is global. A cluster that is lost is used where there is nobody else.",
		[]string{"weft service list", "weft service list -o wide", "weft service list -o yaml"}},
	"service get": {"Show a service of our own cluster: what others offer for it, and the backends of each frontend; * marks those in use.",
		[]string{"weft service get shop/web", "weft service get shop/web -o json"}},
	"service watch": {"Show the services, and go on with what changes, as weft service list --watch does.",
		[]string{"weft service watch", "weft service watch -o json"}},
	"endpoint list": {"List the workloads of this node: their addresses, identities and labels, which source knows them, and whether " +
		"their identity is allocated. One that waits for it is known as init on this node, and is not announced to others.",
		[]string{"weft endpoint list", "weft endpoint list -o wide", "weft endpoint list -o json"}},
	"endpoint get": {"Show a workload of this node, by its namespace and name, or by one of its addresses; why, if it waits for its identity.",
		[]string{"weft endpoint get shop/web-1", "weft endpoint get 10.1.1.20 -o json"}},
	"endpoint add": {"Add a workload of this node: a process, a container or a virtual machine that has addresses of its own. The agent gives it the " +
		"identity that belongs to its labels and tells the mesh of it. It is kept in the agent's --state-dir, so that it is there after a " +
		"restart, until it is removed. One of the same namespace and name is replaced.",
		[]string{
			"weft endpoint add db-1 --ip 10.1.1.20 --label app=db --namespace shop",
			"weft endpoint add web-1 --ip 10.1.1.21,fd00:10:1:1::21 --label app=web --port http=8080 --port metrics=9100/udp",
		}},
	"endpoint remove": {"Remove a workload that was added with `weft endpoint add`. Pods and what files declare are removed where they come from.",
		[]string{"weft endpoint remove db-1 --namespace shop"}},
	"operator": {"Run what is done once per cluster until it is interrupted: publish what is the cluster's rather than a node's, and clean up. " +
		"Several replicas may run; they elect a leader, and nothing that another one believes to have to write is written. No packet and no " +
		"identity waits for an operator. What is in etcd stays when it ends.",
		[]string{
			"weft operator --cluster-name east --cluster-id 1 --kvstore-config /etc/weft/kvstore.yaml",
			"weft operator --config /etc/weft/operator.yaml --election kubernetes --namespace kube-system",
		}},
	"operator status": {"Show how a replica of the operator is: who leads, whether its etcd and its sources answer, and what the leader's duties " +
		"have done. The exit code is 0 if all is well, 1 if it is not, 3 if no operator answers.",
		[]string{"weft operator status", "weft operator status -o json"}},
	"operator export": {"Show what the leader would write and delete now of the cluster's services and nodes: each key that is created, changed or deleted, " +
		"and with -o wide those that are as they should be. It reads what the operator reads, with the same options, and touches nothing.",
		[]string{
			"weft operator export --dry-run --config /etc/weft/operator.yaml",
			"weft operator export --dry-run --cluster-name east --cluster-id 1 --kvstore-config /etc/weft/kvstore.yaml --services-dir /etc/weft/services -o json",
		}},
	"operator gc": {"Show what nobody needs any more and the leader would begin to collect now: identities that no node uses, announced addresses " +
		"whose node or pod is gone, and with --kubernetes the CiliumEndpoint objects of pods, and what nodes said of policies, that are gone. " +
		"The leader collects what two looks in a row have found. This is one, made here, which touches nothing; it takes the options of " +
		"`weft operator`, and needs none to run.",
		[]string{
			"weft operator gc --dry-run --config /etc/weft/operator.yaml",
			"weft operator gc --dry-run --cluster-name east --cluster-id 1 --kvstore-config /etc/weft/kvstore.yaml -o json",
		}},
	"operator etcd-init": {"Make the users and roles of the cluster's etcd: administrators, the cluster's own agents and operators, and for each " +
		"remote cluster a user that may read what clusters share, and no more. A user is who shows a certificate of that common name. " +
		"What is there already stays; roles that may more than they should are narrowed, users of clusters that are not named are deleted. " +
		"At the end etcd asks everybody who they are; that is not done if it would not know the one who does it. With --certificates, " +
		"the authority, and a certificate for the etcd and each user, are made first, where they are not there or near their end; without " +
		"--kvstore-config that is all, as there is no etcd before it has one. Done again, it changes what is not so any more.",
		[]string{
			"weft operator etcd-init --cluster-name east --remote west,north --certificates /etc/weft/pki --server-name east.mesh.cilium.io,127.0.0.1",
			"weft operator etcd-init --cluster-name east --remote west,north --kvstore-config /etc/weft/admin.yaml --dry-run",
			"weft operator etcd-init --cluster-name east --remote west,north --kvstore-config /etc/weft/admin.yaml",
		}},
	"bpf ipcache list": {"List the entries of the kernel's map that identifies addresses, read off its pin: it needs no agent.",
		[]string{"weft bpf ipcache list", "weft bpf ipcache list -o json"}},
	"bpf ipcache get": {"Look an address up in the kernel's map as the programs do. It needs no agent. The kernel tells the value, not the prefix " +
		"that it stands for.",
		[]string{"weft bpf ipcache get 10.2.1.10"}},
	"bpf counters list": {"List the packets and bytes that the programs have seen, by direction, identity of the peer, and verdict, read off the " +
		"kernel's map: it needs no agent. The counters outlive the agent.",
		[]string{"weft bpf counters list", "weft bpf counters list --watch"}},
	"bpf service list": {"List the services of the kernel's table: frontends, the backends that sockets are given now, how one is chosen, and how many " +
		"flows got one or were refused. It is read off its pins and needs no agent.",
		[]string{"weft bpf service list", "weft bpf service list -o json"}},
	"bpf conntrack list": {"List the flows that programs at devices translate to backends of services, and back, as with --service-tc: who " +
		"asked for what, and which backend answers. A flow is asked, answered or closed. It is read off the kernel's map and needs no agent.",
		[]string{"weft bpf conntrack list", "weft bpf conntrack list -o json"}},
	"flows": {"Show sampled packets with the identities of both sides, as the kernel's programs saw them: the agent remembers the last 4096. How " +
		"many packets are sampled is the agent's --flow-sample. Of several filters all count; those about a peer let through what either side " +
		"is. With --pcap, what is known of each packet goes into a file that Wireshark and tcpdump read.",
		[]string{
			"weft flows", "weft flows --follow --cluster west", "weft flows --identity 131329 --port 443 --verdict identified", "weft flows --label app=web,tier!=db --ip 10.2.0.0/16",
			"weft flows --last 10 -o json", "weft flows --pcap flows.pcapng",
		}},
	"bench": {"Measure what weft's work costs on this machine: the time of a packet and of a written entry, on maps and programs of its own that are not " +
		"attached and go at the end, and, of the clusters or configs that are named, how fast their etcds list: some keys are read, nothing is written. " +
		"Each figure has a baseline of the same run: compare ratios, between machines and between times. It needs CAP_BPF and CAP_NET_ADMIN.",
		[]string{"weft bench", "weft bench west --entries 1000000 -o json"}},
	"top": {"Watch the clusters, how fast they change, and the pairs of identities that send most, as the kernel's counters have them: exact, and not " +
		"sampled. On a terminal it is painted again and again; q quits, s sorts by packets, bytes or identities. Elsewhere it is one view.",
		[]string{"weft top", "weft top --sort bytes --interval 5s", "weft top --once -o json"}},
	"kvstore get": {"Print the value of a key in an etcd, or, with --recursive, of all keys that begin with it. It needs no agent. As JSON, it is a " +
		"dump that `weft kvstore set --from` loads.",
		[]string{
			"weft kvstore get cilium/cluster-config/east --kvstore-config /etc/weft/kvstore.yaml",
			"weft kvstore get --recursive cilium/ --cluster west --clustermesh-config /etc/weft/clustermesh -o json",
		}},
	"kvstore list": {"List the keys of an etcd that begin with a prefix, with their revision, version and lease, without their values.",
		[]string{"weft kvstore list cilium/state/nodes/v1/ --kvstore-config /etc/weft/kvstore.yaml"}},
	"kvstore watch": {"Print what is below a prefix of an etcd, and then what happens to it, until interrupted. A lost connection is made again, and " +
		"what happened meanwhile is told.",
		[]string{"weft kvstore watch cilium/state/ip/ --changes-only --kvstore-config /etc/weft/kvstore.yaml"}},
	"kvstore set": {"Write a key of an etcd, or, with --from, all keys of a dump, without a lease. What a mesh publishes is written by its agents " +
		"and operators; this is for repairs and tests.",
		[]string{"weft kvstore set example/key value --kvstore-config /etc/weft/kvstore.yaml"}},
	"kvstore delete": {"Delete a key of an etcd, or, with --recursive, all keys that begin with it. Agents write again what they publish.",
		[]string{"weft kvstore delete example/key --kvstore-config /etc/weft/kvstore.yaml"}},
	"kvstore leases": {"List the leases of an etcd with the time they have left, how long they were granted for, and the keys that go when they do.",
		[]string{"weft kvstore leases --kvstore-config /etc/weft/kvstore.yaml"}},
	"troubleshoot kvstore": {"", []string{
		"weft troubleshoot kvstore --clustermesh-config /etc/weft/clustermesh",
		"weft troubleshoot kvstore west --clustermesh-config /etc/weft/clustermesh",
	}},
	"version": {"Show the version of this binary, the revision of its source, and the Go release that built it; or, with --agent, those of the " +
		"running agent, which may be another one after an upgrade.",
		[]string{"weft version", "weft version --agent -o json"}},
}

// helpWidth is where the lines of a paragraph end.
const helpWidth = 100

// addHelp gives the commands below cmd their texts. A command that brings its own keeps it.
func addHelp(cmd *cobra.Command) {
	_, path, _ := strings.Cut(cmd.CommandPath(), " ")
	if h, ok := helpTexts[path]; ok {
		if cmd.Long == "" {
			cmd.Long = wrap(h.long, helpWidth)
		}
		if cmd.Example == "" {
			cmd.Example = "  " + strings.Join(h.examples, "\n  ")
		}
	}
	for _, sub := range cmd.Commands() {
		addHelp(sub)
	}
}

// wrap breaks a text into lines of at most width characters, if no word is longer.
func wrap(text string, width int) string {
	var b strings.Builder
	length := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case length == 0:
		case length+1+len(word) > width:
			b.WriteByte('\n')
			length = 0
		default:
			b.WriteByte(' ')
			length++
		}
		b.WriteString(word)
		length += len(word)
	}
	return b.String()
}
