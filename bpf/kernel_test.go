// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/internal/testutil"
)

// identities are what the tests put into ipcache. 10.2.0.0/16 is a known prefix of the world, 192.0.2.66 an entry that
// names no identity.
var identities = map[netip.Prefix]uint32{
	netip.MustParsePrefix("10.1.0.0/16"):         65800,
	netip.MustParsePrefix("10.1.1.10/32"):        65793,
	netip.MustParsePrefix("10.2.0.0/16"):         2,
	netip.MustParsePrefix("10.2.1.10/32"):        131329,
	netip.MustParsePrefix("192.0.2.66/32"):       0,
	netip.MustParsePrefix("fd00:10:1::/48"):      65800,
	netip.MustParsePrefix("fd00:10:1:1::10/128"): 65793,
	netip.MustParsePrefix("fd00:10:2:2::10/128"): 131329,
}

// kernel is the programs, loaded and with their maps filled.
type kernel struct {
	*ebpf.Collection
	model  model
	events *ringbuf.Reader
}

// loadKernel loads the programs with identities and a sampling of 1 in 1. edit may change the spec before.
func loadKernel(t testing.TB, edit ...func(*ebpf.CollectionSpec)) *kernel {
	t.Helper()
	testutil.RequireRoot(t)
	spec, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range edit {
		e(spec)
	}
	// Before 5.11 maps count against the limit of locked memory.
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("load the programs: %+v", err)
	}
	t.Cleanup(coll.Close)
	k := &kernel{Collection: coll, model: model{identities: identities}}
	for prefix, id := range identities {
		mustPut(t, coll.Maps[MapIPCache], MakeIPCacheKey(prefix), MakeIPCacheValue(id, netip.Addr{}, 0, 0))
	}
	k.configure(t, MakeConfig(1, false))
	k.events, err = ringbuf.NewReader(coll.Maps[MapEvents])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.events.Close() })
	return k
}

func mustPut(t testing.TB, m *ebpf.Map, key, value any) {
	t.Helper()
	if err := m.Put(key, value); err != nil {
		t.Fatalf("put into %v: %v", m, err)
	}
}

// configure sets the one value of MapConfig.
func (k *kernel) configure(t testing.TB, c Config) {
	t.Helper()
	mustPut(t, k.Maps[MapConfig], uint32(0), c)
	k.model.config = c
}

// program returns the program of a direction.
func (k *kernel) program(d Direction) *ebpf.Program { return k.Programs[Programs[d].Name] }

// repeat runs a frame exactly times times, which one PROG_RUN does not promise: when a signal interrupts it, it starts
// again.
func (k *kernel) repeat(t testing.TB, d Direction, times int, frame []byte) {
	t.Helper()
	for range times {
		k.run(t, d, frame, nil)
	}
}

// run sends a frame through the program of a direction and checks that the program left the frame and its fate alone.
func (k *kernel) run(t testing.TB, d Direction, frame []byte, context any) {
	t.Helper()
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)), Context: context}
	ret, err := k.program(d).Run(&opts)
	if err != nil {
		t.Fatalf("%v: run on %d bytes %x: %v", d, len(frame), frame, err)
	}
	if ret != math.MaxUint32 {
		t.Fatalf("%v: program returned %d on %x, want -1 (TC_ACT_UNSPEC)", d, int32(ret), frame)
	}
	if !bytes.Equal(opts.DataOut, frame) {
		t.Fatalf("%v: program changed the frame (-want +got):\n%s", d, cmp.Diff(frame, opts.DataOut))
	}
}

// runnable says whether every kernel's PROG_RUN takes a frame: newer ones refuse, before the program runs, a frame whose
// own type is IP and whose IP header is cut.
func runnable(frame []byte) bool {
	if len(frame) < 14 {
		return false
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case ethTypeIPv4:
		return len(frame) >= 14+20
	case ethTypeIPv6:
		return len(frame) >= 14+40
	}
	return true
}

// next returns the oldest event that is not read yet.
func (k *kernel) next(t testing.TB) Event {
	t.Helper()
	k.events.SetDeadline(time.Now().Add(10 * time.Second))
	record, err := k.events.Read()
	if err != nil {
		t.Fatalf("read an event: %v", err)
	}
	event, err := ParseEvent(record.RawSample)
	if err != nil {
		t.Fatal(err)
	}
	if len(record.RawSample) != EventBytes {
		t.Fatalf("event of %d bytes, want %d", len(record.RawSample), EventBytes)
	}
	return event
}

// drain returns how many events wait to be read, and reads them.
func (k *kernel) drain(t testing.TB) uint64 {
	t.Helper()
	var n uint64
	for k.events.AvailableBytes() > 0 {
		k.next(t)
		n++
	}
	return n
}

// check runs a frame through the program of a direction and compares its event with the model's, which it returns.
func (k *kernel) check(t testing.TB, d Direction, frame []byte) Event {
	t.Helper()
	k.run(t, d, frame, nil)
	want := k.model.event(d, frame, false)
	got := k.next(t)
	if got.KtimeNS == 0 || got.IfIndex == 0 {
		t.Errorf("%v: event without time or device: %+v", d, got)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Event{}, "KtimeNS", "IfIndex")); diff != "" {
		t.Errorf("%v: event of frame %x (-model +kernel):\n%s", d, frame, diff)
	}
	return got
}

// counters returns what ReadCounters does.
func (k *kernel) counters(t testing.TB) map[CounterKey]CounterValue {
	t.Helper()
	sums, err := ReadCounters(k.Maps[MapCounters], k.Maps[MapFront])
	if err != nil {
		t.Fatal(err)
	}
	return sums
}

// missed returns the sum of MapMissed.
func (k *kernel) missed(t testing.TB) Missed {
	t.Helper()
	var perCPU []Missed
	if err := k.Maps[MapMissed].Lookup(uint32(0), &perCPU); err != nil {
		t.Fatalf("read what was missed: %v", err)
	}
	return SumMissed(perCPU)
}

// clear empties the counters.
func (k *kernel) clear(t testing.TB) {
	t.Helper()
	for key := range k.counters(t) {
		if err := k.Maps[MapCounters].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatalf("delete counter %+v: %v", key, err)
		}
	}
	front := k.Maps[MapFront]
	for i := range front.MaxEntries() {
		mustPut(t, front, i, make([]FrontLine, ebpf.MustPossibleCPU()))
	}
}

// gsoContext is a struct __sk_buff, as PROG_RUN takes it, of a GSO packet.
func gsoContext(t *testing.T, size uint32) []byte {
	t.Helper()
	skb := typesOf(t, specs(t)["from_netdev"])["__sk_buff"]
	for _, member := range skb.Members {
		if member.Name == "gso_size" {
			context := make([]byte, skb.Size)
			binary.NativeEndian.PutUint32(context[member.Offset.Bytes():], size)
			return context
		}
	}
	t.Fatal("struct __sk_buff has no gso_size")
	return nil
}

// peerIdentity is that of the end that the verdict is about.
func peerIdentity(e Event) uint32 {
	if e.Direction == Egress {
		return e.DstIdentity
	}
	return e.SrcIdentity
}

// line shows the event that a frame made, for tables of expectations.
func line(e Event) string {
	s := fmt.Sprintf("%v %d type %04x", e.Verdict, peerIdentity(e), e.EthType)
	if e.Family != FamilyNone {
		s += fmt.Sprintf(" %v to %v protocol %d", e.Source(), e.Destination(), e.Protocol)
	}
	if typ, code, ok := e.ICMP(); ok {
		s += fmt.Sprintf(" icmp %d/%d", typ, code)
	} else if e.SrcPort != 0 || e.DstPort != 0 {
		s += fmt.Sprintf(" ports %d %d", e.SrcPort, e.DstPort)
	}
	if e.TCPFlags != 0 {
		s += fmt.Sprintf(" flags %02x", e.TCPFlags)
	}
	return s
}
