// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
)

var serviceMirrors = []mirror{
	{"service_address", reflect.TypeFor[ServiceAddress](), map[string][]string{
		"Addr": {"addr"}, "Port": {"port"}, "Protocol": {"protocol"}, "Family": {"family"}, "Pad": {"pad"},
	}},
	{"service", reflect.TypeFor[Service](), map[string][]string{
		"Choice": {"choice"}, "Frontend": {"frontend"}, "Affinity": {"affinity"}, "Generation": {"generation"}, "Room": {"room"},
		"Flags": {"flags"}, "Pad": {"pad"}, "Chosen": {"chosen"}, "Refused": {"refused"}, "ToldNS": {"told_ns"}, "Pad2": {"pad2"},
	}},
	{"backend", reflect.TypeFor[Backend](), map[string][]string{"At": {"at"}, "Generation": {"generation"}, "Service": {"service"}}},
	{"reverse_key", reflect.TypeFor[ReverseKey](), map[string][]string{"Socket": {"socket"}, "Backend": {"backend"}}},
	{"affinity_key", reflect.TypeFor[AffinityKey](), map[string][]string{
		"Client": {"client"}, "Service": {"service"}, "Generation": {"generation"},
	}},
	{"affinity", reflect.TypeFor[Affinity](), map[string][]string{
		"Backend": {"backend"}, "Generation": {"generation"}, "UsedNS": {"used_ns"},
	}},
	{"socket_state", reflect.TypeFor[SocketState](), map[string][]string{
		"Frontend": {"frontend"}, "Backend": {"backend"}, "Service": {"service"}, "BackendID": {"backend_id"},
		"Generation": {"generation"}, "Connected": {"connected"},
	}},
}

func TestServiceMirrors(t *testing.T) {
	spec, err := LoadServices(true)
	if err != nil {
		t.Fatal(err)
	}
	types := typesOf(t, spec)
	for _, m := range serviceMirrors {
		c := types[m.c]
		if c == nil {
			t.Errorf("struct %s is not in the BTF", m.c)
			continue
		}
		if uintptr(c.Size) != m.goType.Size() {
			t.Errorf("struct %s has %d bytes, %v has %d", m.c, c.Size, m.goType, m.goType.Size())
		}
		m.compare(t, "sock", c)
	}
}

// TestServiceSpecs: the programs are those of ServicePrograms, for the hooks that they are made for, and the maps have the
// sizes that user space counts on.
func TestServiceSpecs(t *testing.T) {
	spec, err := LoadServices(true)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range ServicePrograms {
		if s := spec.Programs[p.Name]; s == nil || s.Type != ebpf.CGroupSockAddr || s.AttachType != p.Attach {
			t.Errorf("%s: %+v, want a program for %v", p.Name, s, p.Attach)
		}
	}
	if len(spec.Programs) != len(ServicePrograms) {
		t.Errorf("%d programs, want %d", len(spec.Programs), len(ServicePrograms))
	}
	type shape struct {
		Type                          ebpf.MapType
		Key, Value, MaxEntries, Flags uint32
	}
	got := map[string]shape{}
	for name, m := range spec.Maps {
		got[name] = shape{m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags}
	}
	const noPrealloc, readOnlyProg, mmapable = 1, 0x80, 0x400
	want := map[string]shape{
		MapFrontends: {ebpf.Hash, 24, 4, 65536, noPrealloc | readOnlyProg},
		MapServices:  {ebpf.Array, 4, 128, 65536, mmapable},
		MapSlots:     {ebpf.Array, 4, 8, 1 << 20, mmapable},
		MapBackends:  {ebpf.Array, 4, 32, 524288, mmapable},
		MapAffinity:  {ebpf.LRUHash, 16, 16, 65536, 0},
		MapSockets:   {ebpf.SkStorage, 4, 64, 0, noPrealloc},
		MapPeers:     {ebpf.Array, 4, 8, MaxPeers, 0},
		MapReverse:   {ebpf.LRUHash, 32, 24, 65536, 0},
		MapRefusals:  {ebpf.RingBuf, 0, 0, 1 << 16, 0},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("maps (-want +got):\n%s", diff)
	}
}

// TestServicesLoad loads the programs as the kernels do that let them say ECONNREFUSED, and as those that do not.
func TestServicesLoad(t *testing.T) {
	testutil.RequireRoot(t)
	if err := rlimit.RemoveMemlock(); err != nil { // before 5.11 maps count against the limit of locked memory
		t.Fatal(err)
	}
	for _, setRetval := range []bool{true, false} {
		spec, err := LoadServices(setRetval)
		if err != nil {
			t.Fatal(err)
		}
		calls := 0
		for _, p := range spec.Programs {
			for _, ins := range p.Instructions {
				if ins.IsBuiltinCall() && asm.BuiltinFunc(ins.Constant) == asm.FnSetRetval {
					calls++
				}
			}
		}
		if setRetval != (calls > 0) {
			t.Errorf("setRetval %v: %d calls of bpf_set_retval", setRetval, calls)
		}
		if setRetval && !hasSetRetval() {
			continue
		}
		coll, err := ebpf.NewCollection(spec)
		if err != nil {
			t.Fatalf("setRetval %v: load: %+v", setRetval, err)
		}
		for _, p := range ServicePrograms {
			info, err := coll.Programs[p.Name].Info()
			if err != nil {
				t.Fatal(err)
			}
			if verified, ok := info.VerifiedInstructions(); ok {
				t.Logf("%s: %d instructions verified", p.Name, verified)
				if verified > mostVerified {
					t.Errorf("%s: the verifier walked %d instructions, want at most %d", p.Name, verified, mostVerified)
				}
			}
		}
		coll.Close()
	}
}

func TestServiceAddress(t *testing.T) {
	for _, tc := range []struct {
		addr string
		want ServiceAddress
	}{
		{"10.96.0.10", ServiceAddress{Addr: [16]byte{10, 96, 0, 10}, Port: [2]byte{0x1f, 0x90}, Protocol: 6, Family: FamilyIPv4}},
		{"::ffff:10.96.0.10", ServiceAddress{Addr: [16]byte{10, 96, 0, 10}, Port: [2]byte{0x1f, 0x90}, Protocol: 6, Family: FamilyIPv4}},
		{"fd00::a", ServiceAddress{Addr: [16]byte{0xfd, 15: 0xa}, Port: [2]byte{0x1f, 0x90}, Protocol: 6, Family: FamilyIPv6}},
	} {
		addr := netip.MustParseAddr(tc.addr)
		got := MakeServiceAddress(addr, 8080, ProtocolTCP)
		if got != tc.want || got.AddrPort() != netip.AddrPortFrom(addr.Unmap(), 8080) {
			t.Errorf("%s: %+v is %v, want %+v", tc.addr, got, got.AddrPort(), tc.want)
		}
	}
	if got := (ServiceAddress{}).AddrPort(); got.IsValid() {
		t.Errorf("the zero address is %v", got)
	}
}

func TestChoice(t *testing.T) {
	for _, maglev := range []bool{false, true} {
		for _, want := range [][2]uint32{{0, 0}, {1 << 31, 1}, {4, MaxChoice}} {
			place, slots, m := SplitChoice(MakeChoice(want[0], want[1], maglev))
			if place != want[0] || slots != want[1] || m != maglev {
				t.Errorf("%v %v: got %d %d %v", want, maglev, place, slots, m)
			}
		}
	}
}

// hasSetRetval: the kernel lets programs of sockets choose their error.
func hasSetRetval() bool {
	return features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil
}
