// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// probed is the identity behind the address that the probe sends from, as west recorded it.
const probed = 131329

// traffic is a thousand packets a second from a workload of west, and a stream from its node.
type traffic struct {
	sent, received, written, read atomic.Uint64
	stop                          func()
	failed                        error // of the stream; valid after stop
}

// startTraffic moves the far end of the wire into a namespace of west's and sends from there until stop.
func startTraffic(t *testing.T) *traffic {
	t.Helper()
	peer := testutil.NewNetNS(t)
	command(t, "ip", "link", "set", "wire", "netns", peer.Path())
	peer.Do(t, func() {
		command(t, "ip", "address", "add", "172.18.2.1/16", "dev", "wire")
		command(t, "ip", "address", "add", "10.2.1.10/32", "dev", "wire")
		command(t, "ip", "link", "set", "wire", "up")
	})
	command(t, "ip", "route", "add", "10.2.1.10/32", "via", "172.18.2.1")
	tr := &traffic{}
	in, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(172, 18, 1, 1), Port: 7777})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "172.18.1.1:7778")
	if err != nil {
		t.Fatal(err)
	}
	var (
		out    net.Conn
		stream net.Conn
	)
	testutil.Eventually(t, 10*time.Second, func() (err error) { // the device may not be up yet
		peer.Do(t, func() { stream, err = net.DialTimeout("tcp", "172.18.1.1:7778", time.Second) })
		return err
	})
	accepted, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	peer.Do(t, func() {
		out, err = net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(10, 2, 1, 10)}, &net.UDPAddr{IP: net.IPv4(172, 18, 1, 1), Port: 7777})
	})
	if err != nil {
		t.Fatal(err)
	}
	tr.run(t, in, out, accepted, stream)
	t.Cleanup(func() { listener.Close() })
	return tr
}

func (tr *traffic) run(t *testing.T, in *net.UDPConn, out, accepted, stream net.Conn) {
	done := make(chan struct{})
	var senders, receivers sync.WaitGroup
	senders.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		chunk := make([]byte, 1400)
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if _, err := out.Write([]byte("probe")); err == nil {
				tr.sent.Add(1)
			}
			n, err := stream.Write(chunk)
			tr.written.Add(uint64(n))
			if err != nil {
				tr.failed = err
				return
			}
		}
	})
	receivers.Go(func() {
		buf := make([]byte, 64)
		for {
			if _, err := in.Read(buf); err != nil {
				return
			}
			tr.received.Add(1)
		}
	})
	receivers.Go(func() {
		n, _ := io.Copy(io.Discard, accepted)
		tr.read.Store(uint64(n))
	})
	tr.stop = sync.OnceFunc(func() {
		close(done)
		senders.Wait()
		for deadline := time.Now().Add(10 * time.Second); tr.received.Load() < tr.sent.Load() && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		stream.Close()
		in.Close()
		out.Close()
		receivers.Wait()
		accepted.Close()
	})
	t.Cleanup(tr.stop)
}

// counters sums the packets that came in, by identity; 0 stands for IPv4 packets without one.
func (h host) counters(t *testing.T) map[uint32]uint64 {
	t.Helper()
	var list struct {
		Items []struct {
			SourceIdentity     uint32
			Direction, Verdict string
			Packets            uint64
		}
	}
	out := command(t, os.Getenv(weftEnv), "bpf", "counters", "list", "-o", "json", "--bpffs", h.bpffs)
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatalf("counters: %v\n%s", err, out)
	}
	sums := map[uint32]uint64{}
	for _, c := range list.Items {
		switch {
		case c.Direction != "ingress" || c.Verdict == "not-ip" || c.SourceIdentity == 10:
		case c.Verdict == "identified":
			sums[c.SourceIdentity] += c.Packets
		default:
			sums[0] += c.Packets
		}
	}
	return sums
}

// otherBuild is the agent as another version of it would be: its programs are compiled in another way, so that the kernel
// takes them for others.
func otherBuild(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	sources, err := filepath.Glob("../bpf/*.c")
	if err != nil || len(sources) == 0 {
		t.Fatalf("sources of the programs: %v, %v", sources, err)
	}
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for _, source := range sources {
		committed, err := filepath.Abs(strings.TrimSuffix(source, ".c") + "_bpfel.o")
		if err != nil {
			t.Fatal(err)
		}
		object := filepath.Join(dir, filepath.Base(committed))
		command(t, "clang-19", "-target", "bpfel", "-O2", "-g", "-mcpu=v3", "-mllvm", "-no-stack-coloring",
			"-idirafter", "/usr/include/x86_64-linux-gnu", "-idirafter", "/usr/include/aarch64-linux-gnu", "-c", source, "-o", object)
		command(t, "llvm-strip-19", "-g", object)
		overlay.Replace[committed] = object
	}
	content, err := json.Marshal(overlay)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	testutil.MustWriteFile(t, file, content)
	bin := filepath.Join(dir, "weft-other")
	build := exec.Command("go", "build", "-overlay", file, "-o", bin, "../cmd/weft")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build another weft: %v\n%s", err, out)
	}
	return bin
}

// The agent is killed at random instants, and started again as this or another build, with a map of this or another size,
// while traffic flows, while a cluster is read for the first time, and at last without any etcd to read. No packet is lost,
// none goes unidentified. In the end the kernel has what the cluster says.
//
// invariant 1
// lesson: A1, A2, A3, A4, X4, X10
func TestKilledAtRandom(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	kills, workloads := 20, 2000
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		kills, workloads = 200, 10000
	}
	builds := []string{os.Getenv(weftEnv), otherBuild(t)}
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	west.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	start := func(build int) *agent {
		t.Setenv(weftEnv, builds[build])
		// Both families are known, so that what the kernels say to each other over IPv6 is told apart.
		return h.start(t, "east", 1, "--node-ip", "fd00:18:1::1", "--max-ipcache-entries", fmt.Sprint(20000+10000*build))
	}
	a := start(0)
	h.awaitEntry(t, "10.2.1.10")
	h.awaitVerified(t) // the programs are attached, too
	a.stop(t, syscall.SIGKILL)
	for i := range workloads {
		ip := fmt.Sprintf("10.2.%d.%d", 100+i/250, i%250)
		west.Put(t, "cilium/state/ip/v1/default/"+ip, fmt.Sprintf(`{"IP":"%s","Mask":null,"HostIP":"172.18.2.1","ID":%d,"Key":0,"Metadata":""}`, ip, probed))
	}

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	before := h.counters(t)
	traffic := startTraffic(t)
	tags := map[string]bool{}
	for i := range kills {
		if i == kills*3/4 {
			west.Stop(t)
		}
		a := start(rng.IntN(len(builds)))
		time.Sleep(time.Duration(rng.IntN(400)) * time.Millisecond) // the random instant
		a.stop(t, syscall.SIGKILL)
		tags[h.programTag(t)] = true
	}
	west.Restart(t)
	a = start(0)
	h.awaitEntry(t, "10.2.101.1")
	h.awaitVerified(t)
	traffic.stop()
	after := h.counters(t)
	sent, received := traffic.sent.Load(), traffic.received.Load()
	identified, not := after[probed]-before[probed], after[0]-before[0]
	t.Logf("%d kills, %d versions of the program; %d packets sent, %d received, %d identified, %d not; %d bytes of %d came by the stream",
		kills, len(tags), sent, received, identified, not, traffic.read.Load(), traffic.written.Load())
	if received != sent || identified != sent || not != 0 {
		t.Errorf("of %d packets %d came, %d were identified, %d not: want all, all and none; packets by identity before %v, after %v",
			sent, received, identified, not, before, after)
	}
	if traffic.failed != nil || traffic.read.Load() != traffic.written.Load() {
		t.Errorf("stream: %v, %d bytes of %d came", traffic.failed, traffic.read.Load(), traffic.written.Load())
	}
	if len(tags) != len(builds) {
		t.Errorf("programs seen: %v, want those of %d builds", tags, len(builds))
	}
	a.stop(t, syscall.SIGTERM)
}

// awaitEntry waits until the kernel identifies an address as the probe's.
func (h host) awaitEntry(t *testing.T, address string) {
	t.Helper()
	testutil.Eventually(t, 30*time.Second, func() error {
		out, err := exec.Command(os.Getenv(weftEnv), "bpf", "ipcache", "get", address, "--bpffs", h.bpffs).CombinedOutput()
		if err == nil && !strings.Contains(string(out), fmt.Sprintf("identity=%d ", probed)) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
}

// awaitVerified waits until the agent finds nothing that differs between the cluster and the kernel.
func (h host) awaitVerified(t *testing.T) {
	t.Helper()
	testutil.Eventually(t, 30*time.Second, func() error {
		out, err := exec.Command(os.Getenv(weftEnv), "verify", "--api-socket", h.socket).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// programTag is the kernel's digest of the code that is pinned; "" if none is yet.
func (h host) programTag(t *testing.T) string {
	t.Helper()
	var p struct{ Tag string }
	out := command(t, "bpftool", "-j", "prog", "show", "pinned", filepath.Join(h.bpffs, "weft/programs/weft_from_netdev"))
	if err := json.Unmarshal(out, &p); err != nil {
		t.Fatalf("bpftool: %v\n%s", err, out)
	}
	return p.Tag
}
