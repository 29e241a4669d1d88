// SPDX-License-Identifier: Apache-2.0

package test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

const (
	patience = time.Minute
	ipPrefix = "cilium/state/ip/v1/default/"
	// leaseTTL is the least that an agent takes.
	leaseTTL = 25 * time.Second
)

var identityText = regexp.MustCompile(`identity=(\d+) `)

// kernelIdentity is what the kernel takes an address for; 0 if it has no entry for it.
func (h host) kernelIdentity(address string) uint32 {
	out, err := exec.Command(os.Getenv(weftEnv), "bpf", "ipcache", "get", address, "--bpffs", h.bpffs).CombinedOutput()
	m := identityText.FindSubmatch(out)
	if err != nil || m == nil {
		return 0
	}
	id, _ := strconv.ParseUint(string(m[1]), 10, 32)
	return uint32(id)
}

// awaitIdentity waits until the kernel takes an address for an identity.
func (h host) awaitIdentity(t *testing.T, address string, want uint32) {
	t.Helper()
	testutil.Eventually(t, patience, func() error {
		if got := h.kernelIdentity(address); got != want {
			return fmt.Errorf("%s is %d in the kernel, want %d", address, got, want)
		}
		return nil
	})
}

// endpoint asks the agent for a workload.
func (h host) endpoint(t *testing.T, name string) (api.Endpoint, error) {
	s, err := api.NewClient(h.socket).Status(t.Context())
	if err != nil {
		return api.Endpoint{}, err
	}
	for _, e := range s.Endpoints.Items {
		if e.Namespace+"/"+e.Name == name {
			return e, nil
		}
	}
	return api.Endpoint{}, fmt.Errorf("there is no %s: %v, errors %v", name, s.Endpoints.Items, s.Endpoints.Errors)
}

// awaitState waits until a workload is in a state, and returns its identity.
func (h host) awaitState(t *testing.T, name, state string) uint32 {
	t.Helper()
	var id uint32
	testutil.Eventually(t, patience, func() error {
		e, err := h.endpoint(t, name)
		if id = e.Identity; err == nil && e.State != state {
			err = fmt.Errorf("it is %+v, want it %s", e, state)
		}
		return err
	})
	return id
}

// declare writes a file of workloads.
func (h host) declare(t *testing.T, file, content string) {
	t.Helper()
	testutil.MustWriteFile(t, filepath.Join(h.endpoints, file), []byte(content))
}

// described is what somebody may put to say how east is read: at once. Without it, east's agent says it, and what is complete
// ten seconds later.
const described = `{"id":1,"capabilities":{"maxConnectedClusters":255}}`

// meshOfTwo is an agent of east that publishes into an etcd, and a node of west, whose agent reads there.
func meshOfTwo(t *testing.T, config string, flags ...string) (etcd *testutil.Etcd, east, west host, start func() *agent) {
	t.Helper()
	etcd = testutil.StartEtcd(t)
	if config != "" {
		etcd.Put(t, "cilium/cluster-config/east", config)
	}
	east, west = newHost(t), newNeighbour(t, "172.18.1.2")
	own := filepath.Join(t.TempDir(), "kvstore")
	etcd.WriteConfig(t, own)
	etcd.WriteConfig(t, filepath.Join(west.clustermesh, "east"))
	west.start(t, "west", 2)
	return etcd, east, west, func() *agent {
		return east.start(t, "east", 1, append([]string{"--kvstore-config", own, "--kvstore-lease-ttl", leaseTTL.String()}, flags...)...)
	}
}

// A pod of each source reaches a node of the other cluster, whose kernel knows it; removed, it is known no more. Nobody but
// the agents writes anything into etcd.
func TestEverySourceReachesTheOtherCluster(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	objects := testutil.StartEtcd(t)
	kube := testutil.StartKubeAPIServer(t, objects)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	kube.WriteKubeconfig(t, kubeconfig, "", "")
	_, east, west, start := meshOfTwo(t, "", "--kubernetes", "--kubeconfig", kubeconfig)
	start()
	west.awaitVerified(t)
	weft := func(args ...string) { command(t, os.Getenv(weftEnv), append(args, "--api-socket", east.socket)...) }

	const pods = "/api/v1/namespaces/shop/pods"
	kube.Create(t, "/api/v1/namespaces", `{"metadata": {"name": "shop"}}`)
	sources := []struct {
		source, name, address, other string
		add, remove                  func()
	}{
		{"file", "shop/vm", "10.1.1.10", "fd00:10:1:1::10", func() {
			east.declare(t, "vm.yaml", "{name: vm, namespace: shop, ips: [10.1.1.10, 'fd00:10:1:1::10'], labels: {app: vm}, ports: [{name: http, port: 80}]}\n")
		}, func() { east.declare(t, "vm.yaml", "") }},
		{"api", "shop/db", "10.1.1.11", "", func() {
			weft("endpoint", "add", "db", "--namespace", "shop", "--ip", "10.1.1.11", "--label", "app=db")
		}, func() { weft("endpoint", "remove", "db", "--namespace", "shop") }},
		{"kubernetes", "shop/web", "10.1.1.12", "fd00:10:1:1::12", func() {
			kube.Create(t, pods, `{"metadata": {"name": "web", "labels": {"app": "web"}}, "spec": {"nodeName": "east-n1", "containers": [{"name": "c", "image": "i"}]}}`)
			kube.Patch(t, pods+"/web/status", `{"status": {"phase": "Running", "podIP": "10.1.1.12", "podIPs": [{"ip": "10.1.1.12"}, {"ip": "fd00:10:1:1::12"}]}}`)
		}, func() { kube.Delete(t, pods+"/web") }},
	}
	peer := testutil.NewNetNS(t)
	command(t, "ip", "link", "set", "wire", "netns", peer.Path())
	peer.Do(t, func() { command(t, "ip", "link", "set", "wire", "up") })
	command(t, "ip", "route", "add", "10.1.1.0/24", "dev", "eth0")
	in, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(172, 18, 1, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()

	ids := make(map[uint32]string)
	for _, s := range sources {
		s.add()
		id := east.awaitState(t, s.name, "ready")
		if other, taken := ids[id]; taken {
			t.Errorf("%s and %s are both %d", s.name, other, id)
		}
		ids[id] = s.name
		if e, err := east.endpoint(t, s.name); err != nil || e.Source != s.source {
			t.Errorf("%s is from %q, %v", s.name, e.Source, err)
		}
		for _, address := range []string{s.address, s.other} {
			if address != "" {
				east.awaitIdentity(t, address, id)
				west.awaitIdentity(t, address, id)
			}
		}
		peer.Do(t, func() {
			command(t, "ip", "address", "add", s.address+"/32", "dev", "wire")
			command(t, "ip", "route", "replace", "172.18.0.0/16", "dev", "wire", "src", s.address)
		})
		reaches(t, peer, in, s.address)
		if n := west.counters(t)[id]; n == 0 {
			t.Errorf("no packet of %s was identified: %v", s.name, west.counters(t))
		}
	}
	for _, s := range sources {
		s.remove()
		for _, address := range []string{s.address, s.other} {
			if address != "" {
				west.awaitIdentity(t, address, 0)
				east.awaitIdentity(t, address, 0)
			}
		}
	}
}

// reaches waits until a packet comes from an address.
func reaches(t *testing.T, peer *testutil.NetNS, in *net.UDPConn, address string) {
	t.Helper()
	testutil.Eventually(t, patience, func() (err error) {
		peer.Do(t, func() {
			var out net.Conn
			out, err = net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(address)}, in.LocalAddr().(*net.UDPAddr))
			if err == nil {
				_, err = out.Write([]byte("x"))
				err = errors.Join(err, out.Close())
			}
		})
		if err != nil {
			return err
		}
		if err := in.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			return err
		}
		_, from, err := in.ReadFromUDP(make([]byte, 8))
		if err == nil && from.IP.String() != address {
			err = fmt.Errorf("a packet came from %s, want %s", from.IP, address)
		}
		return err
	})
}

// An agent that is killed leaves what it has published; the next one, within the lease, takes it over, and at no moment
// is it gone. What went while no agent ran is withdrawn then, unless another node has that address now. Without another agent
// it all goes with the lease, and not before.
//
// mechanism: Q7
// lesson: X8
func TestPublishedOutlivesTheAgent(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	etcd, east, west, start := meshOfTwo(t, described)
	east.declare(t, "a.yaml", "{name: web, namespace: shop, ip: 10.1.1.10, labels: {app: web}, ports: [{name: http, port: 80}, {name: admin, port: 81}]}\n")
	east.declare(t, "b.yaml", "- {name: gone, namespace: shop, ip: 10.1.1.11, labels: {app: gone}}\n- {name: moved, namespace: shop, ip: 10.1.1.12, labels: {app: moved}}\n")
	a := start()
	id := east.awaitState(t, "shop/web", "ready")
	east.awaitState(t, "shop/moved", "ready")
	for _, address := range []string{"10.1.1.10"} {
		west.awaitIdentity(t, address, id)
	}
	testutil.Eventually(t, patience, func() error {
		for _, address := range []string{"10.1.1.11", "10.1.1.12"} {
			if west.kernelIdentity(address) == 0 {
				return fmt.Errorf("%s is not known", address)
			}
		}
		return nil
	})
	checkAnnouncement(t, etcd, id)
	began := revision(t, etcd)
	a.stop(t, syscall.SIGKILL)
	if err := os.Remove(filepath.Join(east.endpoints, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	const theirs = `{"IP":"10.1.1.12","Mask":null,"HostIP":"172.18.1.3","ID":66000,"Key":0,"Metadata":"cilium-global:default:east-n3:7"}`
	etcd.Put(t, "cilium/state/nodes/v1/east/east-n3", `{"Name":"east-n3","Cluster":"east","IPAddresses":[{"Type":"InternalIP","IP":"172.18.1.3"}],"ClusterID":1}`)
	etcd.Put(t, ipPrefix+"10.1.1.12", theirs)
	west.awaitIdentity(t, "10.1.1.12", 66000)

	a = start()
	if got := east.awaitState(t, "shop/web", "ready"); got != id {
		t.Errorf("after the restart the identity is %d, was %d", got, id)
	}
	west.awaitIdentity(t, "10.1.1.11", 0)
	testutil.Eventually(t, patience, func() error { // the new agent has made it its own
		if s, err := api.NewClient(east.socket).Status(t.Context()); err != nil || s.KVStore == nil || s.KVStore.Pending != 0 {
			return fmt.Errorf("something is not written yet: %w", err)
		}
		return nil
	})
	if got, _ := etcd.Get(t, ipPrefix+"10.1.1.12"); got != theirs {
		t.Errorf("the address of another node is announced as %q", got)
	}
	neverDeleted(t, etcd, ipPrefix+"10.1.1.10", began)
	if got := west.kernelIdentity("10.1.1.10"); got != id {
		t.Errorf("the kernel takes it for %d", got)
	}

	lease := leaseOf(t, etcd, ipPrefix+"10.1.1.10")
	a.stop(t, syscall.SIGKILL)
	west.awaitEnd(t, etcd, lease, "10.1.1.10", id)
}

// awaitEnd waits until the kernel does not know an address any more, which it must as long as the lease lives under which its
// node has announced it. Without WEFT_TEST_FAULTS the lease is ended as etcd does when the time has come.
func (h host) awaitEnd(t *testing.T, etcd *testutil.Etcd, lease clientv3.LeaseID, address string, id uint32) {
	t.Helper()
	begun, looks := time.Now(), 0
	testutil.Eventually(t, patience, func() error {
		got := h.kernelIdentity(address)
		left, err := etcd.Client().TimeToLive(t.Context(), lease) // asked after the look: it lived then
		switch {
		case err != nil:
			return err
		case left.TTL > 0 && left.GrantedTTL != int64(leaseTTL/time.Second):
			t.Fatalf("the lease is %+v, want one of %s", left, leaseTTL)
		case left.TTL > 0 && got != id:
			t.Fatalf("%v after the end of the agent, with %d s left of its lease, the kernel takes %s for %d", time.Since(begun), left.TTL, address, got)
		case left.TTL > 0:
			if looks++; looks == 20 && os.Getenv("WEFT_TEST_FAULTS") == "" {
				_, err = etcd.Client().Revoke(t.Context(), lease)
			}
			return errors.Join(fmt.Errorf("the lease has %d s left", left.TTL), err)
		case got != 0:
			return fmt.Errorf("the lease has ended, and %s is %d in the kernel", address, got)
		}
		return nil
	})
	t.Logf("gone %v after the agent, after %d looks that found it while the lease lived", time.Since(begun), looks)
}

// checkAnnouncement compares what is published of shop/web.
func checkAnnouncement(t *testing.T, etcd *testutil.Etcd, id uint32) {
	t.Helper()
	var a struct {
		IP, HostIP, Metadata, K8sNamespace, K8sPodName string
		ID                                             uint32
		NamedPorts                                     []struct {
			Name     string
			Port     uint16
			Protocol string
		}
	}
	value, _ := etcd.Get(t, ipPrefix+"10.1.1.10")
	if err := json.Unmarshal([]byte(value), &a); err != nil {
		t.Fatalf("%q: %v", value, err)
	}
	if a.IP != "10.1.1.10" || a.HostIP != "172.18.1.1" || a.ID != id || !strings.HasPrefix(a.Metadata, "cilium-global:default:east-n1:") ||
		a.K8sNamespace != "shop" || a.K8sPodName != "web" || len(a.NamedPorts) != 2 || a.NamedPorts[0].Name != "admin" || a.NamedPorts[1].Port != 80 {
		t.Errorf("announced is %s", value)
	}
}

func revision(t *testing.T, etcd *testutil.Etcd) int64 {
	t.Helper()
	resp, err := etcd.Client().Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	return resp.Header.Revision
}

func leaseOf(t *testing.T, etcd *testutil.Etcd, key string) clientv3.LeaseID {
	t.Helper()
	resp, err := etcd.Client().Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].Lease == 0 {
		t.Fatalf("%s: %v, %v", key, resp, err)
	}
	return clientv3.LeaseID(resp.Kvs[0].Lease)
}

// neverDeleted goes through etcd's history of a key since a revision.
func neverDeleted(t *testing.T, etcd *testutil.Etcd, key string, since int64) {
	t.Helper()
	etcd.Put(t, key+".end", "")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	puts := 0
	for resp := range etcd.Client().Watch(ctx, key, clientv3.WithPrefix(), clientv3.WithRev(since+1)) {
		for _, e := range resp.Events {
			switch {
			case string(e.Kv.Key) == key+".end":
				if puts == 0 {
					t.Errorf("%s was never written by the new agent", key)
				}
				etcd.Delete(t, key+".end")
				return
			case e.Type == clientv3.EventTypeDelete:
				t.Errorf("%s was gone at revision %d", key, e.Kv.ModRevision)
			default:
				puts++
			}
		}
	}
	t.Fatalf("the history of %s: %v", key, ctx.Err())
}

// What this node says of its own workloads is its own: no other cluster gets an address of them.
func TestLocalIsNotOverridden(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	etcd, east, _, start := meshOfTwo(t, described)
	north := testutil.StartEtcd(t)
	north.Put(t, "cilium/cluster-config/north", `{"id":3,"capabilities":{"maxConnectedClusters":255}}`)
	north.Put(t, "cilium/state/nodes/v1/north/n", `{"Name":"n","Cluster":"north","IPAddresses":[{"Type":"InternalIP","IP":"172.18.3.1"}],"ClusterID":3}`)
	for _, address := range []string{"10.1.1.10", "10.3.1.10"} {
		north.Put(t, ipPrefix+address, fmt.Sprintf(`{"IP":%q,"Mask":null,"HostIP":"172.18.3.1","ID":196700,"Key":0,"Metadata":""}`, address))
	}
	north.WriteConfig(t, filepath.Join(east.clustermesh, "north"))
	a := start()
	east.awaitIdentity(t, "10.1.1.10", 196700) // nobody here has it yet
	east.declare(t, "a.yaml", "{name: web, namespace: shop, ip: 10.1.1.10, labels: {app: web}}\n")
	id := east.awaitState(t, "shop/web", "ready")
	east.awaitIdentity(t, "10.1.1.10", id)
	north.Put(t, ipPrefix+"10.1.1.10", `{"IP":"10.1.1.10","Mask":null,"HostIP":"172.18.3.1","ID":196701,"Key":0,"Metadata":""}`)
	north.Put(t, ipPrefix+"10.3.1.10", `{"IP":"10.3.1.10","Mask":null,"HostIP":"172.18.3.1","ID":196701,"Key":0,"Metadata":""}`)
	east.awaitIdentity(t, "10.3.1.10", 196701) // which came after
	if got := east.kernelIdentity("10.1.1.10"); got != id {
		t.Errorf("the kernel takes a workload of the node for %d, want %d", got, id)
	}
	// Nor does another node of the own cluster.
	etcd.Put(t, "cilium/state/nodes/v1/east/east-n3", `{"Name":"east-n3","Cluster":"east","IPAddresses":[{"Type":"InternalIP","IP":"172.18.1.3"}],"ClusterID":1}`)
	for _, address := range []string{"10.1.1.10", "10.1.3.10"} {
		etcd.Put(t, ipPrefix+address, fmt.Sprintf(`{"IP":%q,"Mask":null,"HostIP":"172.18.1.3","ID":66000,"Key":0,"Metadata":""}`, address))
	}
	east.awaitIdentity(t, "10.1.3.10", 66000)
	if got := east.kernelIdentity("10.1.1.10"); got != id {
		t.Errorf("the kernel takes a workload of the node for %d, want %d", got, id)
	}
	a.stop(t, syscall.SIGTERM)
}

// An agent that is killed, and starts again while its etcd is away, has its workloads' identities in force at once: at no
// moment does the kernel take one of them for anything else.
//
// lesson: A2
func TestRestartWithoutEtcd(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	etcd, east, _, start := meshOfTwo(t, described)
	east.declare(t, "a.yaml", "{name: web, namespace: shop, ip: 10.1.1.10, labels: {app: web}}\n")
	a := start()
	id := east.awaitState(t, "shop/web", "ready")
	east.awaitIdentity(t, "10.1.1.10", id)
	east.awaitVerified(t)
	testutil.Eventually(t, patience, func() error {
		content, err := os.ReadFile(filepath.Join(east.endpoints+".state", "identities.json"))
		if err == nil && !strings.Contains(string(content), strconv.Itoa(int(id))) {
			err = fmt.Errorf("the state is %s", content)
		}
		return err
	})
	a.stop(t, syscall.SIGKILL)
	etcd.Stop(t)
	a = start()
	testutil.Eventually(t, patience, func() error {
		if got := east.kernelIdentity("10.1.1.10"); got != id {
			t.Fatalf("the kernel takes the workload for %d, want %d", got, id)
		}
		e, err := east.endpoint(t, "shop/web")
		if err == nil && (e.State != "restored" || e.Identity != id) {
			err = fmt.Errorf("it is %+v", e)
		}
		return err
	})
	east.declare(t, "b.yaml", "{name: new, namespace: shop, ip: 10.1.1.11, labels: {app: new}}\n")
	const initIdentity = 5
	if got := east.awaitState(t, "shop/new", "waiting-for-identity"); got != initIdentity {
		t.Errorf("a new workload is %d, want %d", got, initIdentity)
	}
	east.awaitIdentity(t, "10.1.1.11", initIdentity)
	etcd.Restart(t)
	if got := east.awaitState(t, "shop/web", "ready"); got != id {
		t.Errorf("the identity is %d, was %d", got, id)
	}
	if got := east.awaitState(t, "shop/new", "ready"); got == initIdentity || got == id {
		t.Errorf("the new workload is %d", got)
	}
	if got := east.kernelIdentity("10.1.1.10"); got != id {
		t.Errorf("the kernel takes the workload for %d, want %d", got, id)
	}
	a.stop(t, syscall.SIGTERM)
}
