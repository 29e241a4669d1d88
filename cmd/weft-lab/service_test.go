// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// testPatience bounds what a loaded machine may take. Who follows an API server that was away may look for it half a minute later.
const testPatience = 2 * time.Minute

// serviceLab is a lab that is up, with servers in all pods web.
type serviceLab struct {
	*testLab
	lab        *lab
	east, west clusterPlan
	servers    map[string]*backends // by cluster
}

func newServiceLab(t *testing.T, args ...string) *serviceLab {
	s := &serviceLab{testLab: newTestLab(t), servers: make(map[string]*backends)}
	s.must(append([]string{"up"}, args...)...)
	var err error
	if s.lab, err = openLab(s.dir, "", io.Discard); err != nil {
		t.Fatal(err)
	}
	s.lab.self, s.lab.weft = filepath.Join(binaries, "weft-lab"), filepath.Join(binaries, "weft")
	s.east, s.west = s.lab.Clusters[0], s.lab.Clusters[1]
	s.serve(s.east)
	s.serve(s.west)
	s.reach(s.east)
	s.reach(s.west)
	return s
}

// vmPod is a pod whose processes are in no cgroup of a node, as in a virtual machine. Were it one with others, ports would be the
// same by chance: their sockets talk to the backends themselves.
const vmPod = "vm"

// addVM adds such a pod to the first node of a cluster, and waits until it reaches the service.
func (s *serviceLab) addVM(c clusterPlan) {
	s.t.Helper()
	node := c.Nodes[0].Name
	s.must("pod", "add", node, vmPod)
	for _, addr := range []netip.Addr{c.Service4, c.Service6} {
		for _, protocol := range []string{"tcp", "udp"} {
			testutil.Eventually(s.t, testPatience, func() error {
				out, err := exec.Command(s.lab.self, "--state-dir", s.dir, "exec", "--outside-cgroup", node+"/"+vmPod,
					s.lab.self, "request", protocol, netip.AddrPortFrom(addr, frontPort).String()).CombinedOutput()
				if err != nil {
					return fmt.Errorf("%s from %s: %w: %s", addr, node, err, out)
				}
				return nil
			})
		}
	}
}

// reach waits until the client of a cluster reaches all servers by their own addresses: a node knows a pod, and leads to it, a moment
// before it has the route to the pod's node.
func (s *serviceLab) reach(from clusterPlan) {
	s.t.Helper()
	for _, pod := range slices.Concat(s.east.webPods(), s.west.webPods()) {
		for _, addr := range []netip.Addr{pod.IPv4, pod.IPv6} {
			testutil.Eventually(s.t, testPatience, func() error {
				out, err := exec.Command(s.lab.self, "--state-dir", s.dir, "exec", from.Nodes[0].Pods[1].path(),
					s.lab.self, "request", "tcp", netip.AddrPortFrom(addr, servicePort).String()).CombinedOutput()
				if err != nil {
					return fmt.Errorf("%s from %s: %w: %s", addr, from.Name, err, out)
				}
				return nil
			})
		}
	}
}

// serve starts the servers of a cluster.
func (s *serviceLab) serve(c clusterPlan) {
	s.t.Helper()
	b, err := startBackends(context.Background(), c)
	if err != nil {
		s.t.Fatal(err)
	}
	s.servers[c.Name] = b
	s.t.Cleanup(func() {
		if err := b.end(); err != nil {
			s.t.Error(err)
		}
	})
}

// killServers ends the servers of a cluster.
func (s *serviceLab) killServers(c clusterPlan) {
	s.t.Helper()
	if err := s.servers[c.Name].end(); err != nil {
		s.t.Error(err)
	}
}

// declare gives the service of a cluster an affinity, and backends or none.
func (s *serviceLab) declare(c clusterPlan, affinity string, backends bool) {
	s.t.Helper()
	web := c.web()
	web.Affinity = affinity
	if !backends {
		web.Backends = nil
	}
	if err := s.lab.declareService(c, web); err != nil {
		s.t.Fatal(err)
	}
}

// leads waits until the kernel of a cluster's first node gives those who ask its service the pods of these clusters.
func (s *serviceLab) leads(c clusterPlan, to ...clusterPlan) {
	s.t.Helper()
	for _, frontend := range []netip.Addr{c.Service4, c.Service6} {
		var want []netip.Addr
		for _, p := range slices.Concat(mapped(to, clusterPlan.webPods)...) {
			if frontend.Is4() {
				want = append(want, p.IPv4)
			} else {
				want = append(want, p.IPv6)
			}
		}
		testutil.Eventually(s.t, testPatience, func() error { return s.lab.leadsTo(c.Nodes[0], frontend, want) })
	}
}

// offered waits until a cluster's first node knows of all backends of another one, whether or not it uses them.
func (s *serviceLab) offered(c, by clusterPlan) {
	s.t.Helper()
	client := api.NewClient(s.lab.socket(c.Nodes[0].Name))
	testutil.Eventually(s.t, testPatience, func() error {
		web, err := client.Service(context.Background(), namespace, "web")
		if err != nil {
			return err
		}
		want := len(by.web().Backends)
		if !slices.ContainsFunc(web.Clusters, func(o api.ServiceCluster) bool { return o.Cluster == by.Name && o.Ready == want }) {
			return fmt.Errorf("%s knows of the offers %+v, want %d backends of %s", c.Name, web.Clusters, want, by.Name)
		}
		return nil
	})
}

func mapped[A, B any](all []A, f func(A) B) []B {
	var to []B
	for _, a := range all {
		to = append(to, f(a))
	}
	return to
}

// clients asks the service of a cluster from one of its pods, over both protocols and both families.
func (s *serviceLab) clients(c clusterPlan) []*asker {
	s.t.Helper()
	var all []*asker
	for _, protocol := range []string{"tcp", "udp"} {
		for _, addr := range []netip.Addr{c.Service4, c.Service6} {
			all = append(all, s.client(c.Nodes[0].Pods[1], protocol, addr))
		}
	}
	return all
}

// outside asks the service of a cluster from its pod vm, by packets of processes that are in no cgroup.
func (s *serviceLab) outside(c clusterPlan) []*asker {
	s.t.Helper()
	vm := podPlan{Node: c.Nodes[0].Name, Name: vmPod}
	return []*asker{s.client(vm, "tcp", c.Service6, "--outside-cgroup"), s.client(vm, "udp", c.Service4, "--outside-cgroup")}
}

func (s *serviceLab) client(p podPlan, protocol string, addr netip.Addr, options ...string) *asker {
	s.t.Helper()
	a, err := s.lab.ask(p, protocol, netip.AddrPortFrom(addr, frontPort), options...)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := a.stop(); err != nil {
			s.t.Errorf("a client in %s: %v", p.path(), err)
		}
	})
	return a
}

// answer waits until each client has had answers from pods of a cluster.
func (s *serviceLab) answer(clients []*asker, c clusterPlan) {
	s.t.Helper()
	if err := answered(context.Background(), clients, c.Name, 20); err != nil {
		s.t.Fatal(err)
	}
}

// only fails unless each client gets answers from one cluster, and none from the other.
func (s *serviceLab) only(clients []*asker, c, other clusterPlan) {
	s.t.Helper()
	s.answer(clients, c) // what was under way has come
	before := mapped(clients, func(a *asker) int { return a.from(other.Name) })
	s.answer(clients, c)
	for i, a := range clients {
		if more := a.from(other.Name) - before[i]; more > 0 {
			s.t.Errorf("%d answers from %s, which has to give none: %v", more, other.Name, a.counts())
		}
	}
}

// The whole way of a global service: files of two clusters, two operators, two etcds, agents, kernels, and clients that ask all
// the time, of which no request may fail while anybody has a backend.
func TestServices(t *testing.T) {
	s := newServiceLab(t)
	east, west := s.east, s.west
	s.leads(east, east)
	s.leads(west, west)
	s.addVM(east)
	inEast, inWest := append(s.clients(east), s.outside(east)...), s.clients(west)
	s.only(inEast, east, west)
	s.only(inWest, west, east)

	s.declare(east, "remote", true)
	s.leads(east, west)
	s.only(inEast, west, east)
	get := s.must("exec", "east-1", "weft", "service", "get", "shop/web")
	for _, want := range []string{"kernel: 2 backends, random", "10.1.1.10:8080 east ready: affinity prefers others", "* 10.2.1.10:8080 west ready\n"} {
		if !strings.Contains(get, want) {
			t.Errorf("weft service get does not say %q:\n%s", want, get)
		}
	}
	s.declare(east, "none", true)
	s.leads(east, east, west)
	s.answer(inEast, east)
	s.answer(inEast, west)
	s.only(inWest, west, east)

	// Backends go where they are, and return; each time the servers end when no client asks them any more.
	s.declare(east, "local", false)
	s.leads(east, west)
	s.only(inEast, west, east)
	s.killServers(east)
	s.answer(inEast, west)
	s.serve(east)
	s.declare(east, "remote", true)
	s.leads(east, west)
	s.offered(west, east)
	s.declare(west, "none", false) // known in east by way of west's etcd alone
	s.leads(east, east)
	s.leads(west, east)
	s.only(inEast, east, west)
	s.only(inWest, east, west)
	s.killServers(west)
	s.answer(inEast, east)
	s.serve(west)
	s.declare(west, "local", true)
	s.leads(east, west)
	s.leads(west, west)
	s.answer(inEast, west)
	s.answer(inWest, west)
	for _, a := range slices.Concat(inEast, inWest) {
		if err := a.stop(); err != nil {
			t.Error(err)
		}
	}
	s.testNoBackends()
	s.testDeadCluster()
	for _, node := range []string{"east-1", "east-2", "west-1", "west-2"} {
		s.must("exec", node, "weft", "verify")
	}
}

// testNoBackends has the service lose all backends of all clusters, and get some again.
func (s *serviceLab) testNoBackends() {
	s.t.Helper()
	s.declare(s.east, "local", false)
	s.declare(s.west, "local", false)
	s.leads(s.east)
	self := filepath.Join(binaries, "weft-lab")
	to := netip.AddrPortFrom(s.east.Service4, frontPort).String()
	s.fails(1, "connection refused", "exec", "east-1/db", self, "request", "tcp", to)
	s.fails(1, "connection refused", "exec", "east-1/db", self, "request", "udp", to)
	list := s.must("exec", "east-1", "weft", "bpf", "service", "list")
	for _, protocol := range []string{"TCP", "UDP"} {
		if refusedOnce := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(to) + `/` + protocol + ` .* 1$`); !refusedOnce.MatchString(list) {
			s.t.Errorf("the kernel has not counted one refusal over %s:\n%s", protocol, list)
		}
	}
	testutil.Eventually(s.t, testPatience, func() error {
		if flows := s.must("exec", "east-1", "weft", "flows", "--last", "1000"); !strings.Contains(flows, "no-backend") {
			return errors.New("no flow tells of a refusal")
		}
		return nil
	})
	refusals := regexp.MustCompile(`weft_service_flows_total +outcome="refused" +2\n`)
	testutil.Eventually(s.t, testPatience, func() error {
		if metrics := s.must("exec", "east-1", "weft", "metrics", "list"); !refusals.MatchString(metrics) {
			return errors.New("the metrics do not count two refusals")
		}
		return nil
	})
	// By packets, too.
	s.fails(1, "connection refused", "exec", "--outside-cgroup", "east-1/db", self, "request", "tcp", to)
	s.fails(1, "connection refused", "exec", "--outside-cgroup", "east-1/db", self, "request", "udp", to)
	s.declare(s.west, "local", true)
	s.leads(s.east, s.west)
	for _, protocol := range []string{"tcp", "udp"} {
		if out := s.must("exec", "east-1/db", self, "request", protocol, to); !strings.HasPrefix(out, "west-") {
			s.t.Errorf("%s: %q answered, want a pod of west", protocol, out)
		}
	}
	s.declare(s.east, "remote", true)
	s.leads(s.east, s.west)
}

// testDeadCluster has west's etcd be away for longer than east-1 wants to wait, while east prefers the backends of west.
func (s *serviceLab) testDeadCluster() {
	s.t.Helper()
	config := filepath.Join(s.dir, "nodes", "east-1", "agent.yaml")
	content, err := os.ReadFile(config)
	if err != nil {
		s.t.Fatal(err)
	}
	testutil.MustWriteFile(s.t, config, append(content, "service-withdraw-after: 1s\n"...))
	status, _ := s.status()
	s.kill(status.Nodes[0].PID)
	s.must("up")
	clients := s.clients(s.east)
	s.leads(s.east, s.west)
	s.only(clients, s.west, s.east)
	s.kill(status.Etcds[1].PID)
	testutil.Eventually(s.t, testPatience, func() error {
		status, _ := s.status() // who asks has the agent look at once
		if problems := strings.Join(status.Nodes[0].Problems, "; "); !strings.Contains(problems, "west is stale") {
			return fmt.Errorf("east-1 does not miss west: %q", problems)
		}
		return nil
	})
	s.leads(s.east, s.east)
	s.only(clients, s.east, s.west)
	if out := s.must("exec", "east-1", "weft", "service", "get", "shop/web"); !strings.Contains(out, "west ready lost") {
		s.t.Errorf("weft service get does not say that west is lost:\n%s", out)
	}
	s.must("up")
	s.leads(s.east, s.west)
	s.only(clients, s.west, s.east)
}

// A client that goes on asking tells of each request that fails, and of them all at its end.
func TestRequestEveryTellsFailures(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	var lines []string
	write := writerFunc(func(line []byte) (int, error) {
		if lines = append(lines, string(line)); len(lines) == 2 {
			cancel()
		}
		return len(line), nil
	})
	err := requestEvery(ctx, write, "tcp", netip.MustParseAddrPort("127.0.0.1:1"), time.Millisecond)
	if err == nil || err.Error() != fmt.Sprintf("%d requests failed", len(lines)) || len(lines) != 2 {
		t.Errorf("requestEvery = %v after %q", err, lines)
	}
	for _, line := range lines {
		if !strings.HasPrefix(line, failedPrefix) || !strings.Contains(line, "connection refused") {
			t.Errorf("a request to nobody is told as %q", line)
		}
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
