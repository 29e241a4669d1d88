// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"reflect"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// mirror is a C struct, its Go mirror and, by name of the Go field, the C members that lie where that field lies.
type mirror struct {
	c      string
	goType reflect.Type
	fields map[string][]string
}

var mirrors = []mirror{
	{"ipcache_key", reflect.TypeFor[IPCacheKey](), map[string][]string{
		"PrefixLen": {"lpm_key"}, "ClusterID": {"cluster_id"}, "Pad": {"pad1"}, "Family": {"family"}, "IP": {""},
	}},
	{"ipcache_value", reflect.TypeFor[IPCacheValue](), map[string][]string{
		"Identity": {"sec_identity"}, "TunnelEndpoint": {"tunnel_endpoint"}, "Pad": {"pad"}, "EncryptKey": {"key"},
		"Flags": {"flag_skip_tunnel", "flag_has_tunnel_ep", "flag_ipv6_tunnel_ep", "flag_remote_cluster", "pad2"},
	}},
	{"counter_key", reflect.TypeFor[CounterKey](), map[string][]string{
		"SrcIdentity": {"src_identity"}, "DstIdentity": {"dst_identity"},
		"Direction": {"direction"}, "Verdict": {"verdict"}, "Mode": {"mode"}, "Pad": {"pad"},
	}},
	{"counter_value", reflect.TypeFor[CounterValue](), map[string][]string{"Packets": {"packets"}, "Bytes": {"bytes"}}},
	{"front_counter", reflect.TypeFor[FrontCounter](), map[string][]string{"Key": {"key"}, "Check": {"check"}, "Value": {"value"}}},
	{"front_line", reflect.TypeFor[FrontLine](), map[string][]string{"Counters": {"counters"}}},
	{"pod_key", reflect.TypeFor[PodKey](), map[string][]string{"IfIndex": {"ifindex"}, "Family": {"family"}, "IP": {"addr"}}},
	{"missed", reflect.TypeFor[Missed](), map[string][]string{"Counts": {"counts"}, "Events": {"events"}}},
	{"config", reflect.TypeFor[Config](), map[string][]string{
		"FlowSample": {"flow_sample"}, "MarkMask": {"mark_mask"}, "Mark": {"mark"}, "MarkShift": {"mark_shift"},
		"DualStack": {"dual_stack"}, "Underlay6": {"underlay6"}, "OverlayLax": {"overlay_lax"}, "PodCheck": {"pod_check"}, "FastLayout": {"fast_layout"}, "Pad": {"pad"},
	}},
	{"fast_head", reflect.TypeFor[FastHead](), map[string][]string{
		"Seeds": {"seeds"}, "Shape": {"shape"}, "Epoch": {"epoch"}, "Others": {"others"}, "Pad": {"pad"},
	}},
	{"event", reflect.TypeFor[Event](), map[string][]string{
		"KtimeNS": {"ktime_ns"}, "IfIndex": {"ifindex"}, "Length": {"length"},
		"SrcIdentity": {"src_identity"}, "DstIdentity": {"dst_identity"}, "Mode": {"mode"},
		"EthType": {"eth_type"}, "SrcPort": {"src_port"}, "DstPort": {"dst_port"}, "Family": {"family"},
		"Protocol": {"protocol"}, "TCPFlags": {"tcp_flags"}, "Direction": {"direction"}, "Verdict": {"verdict"},
		"Pad": {"pad"}, "SrcIP": {"saddr"}, "DstIP": {"daddr"},
	}},
}

// specs are the objects as compiled.
func specs(t *testing.T) map[string]*ebpf.CollectionSpec {
	t.Helper()
	all := map[string]*ebpf.CollectionSpec{}
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){
		"from_netdev": LoadFromNetdev, "to_netdev": LoadToNetdev, "from_overlay": LoadFromOverlay, "to_overlay": LoadToOverlay,
		"from_pod": LoadFromPod, "to_pod": LoadToPod,
	} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		all[name] = spec
	}
	return all
}

// TestMirrors compares every struct that is shared with user space, member by member, with the types in the objects.
func TestMirrors(t *testing.T) {
	for object, spec := range specs(t) {
		types := typesOf(t, spec)
		for _, m := range mirrors {
			c := types[m.c]
			if c == nil {
				t.Errorf("%s: struct %s is not in its BTF", object, m.c)
				continue
			}
			if uintptr(c.Size) != m.goType.Size() {
				t.Errorf("%s: struct %s has %d bytes, %v has %d", object, m.c, c.Size, m.goType, m.goType.Size())
			}
			m.compare(t, object, c)
		}
	}
}

func (m mirror) compare(t *testing.T, object string, c *btf.Struct) {
	t.Helper()
	members := map[string]btf.Member{}
	for _, member := range c.Members {
		members[member.Name] = member
	}
	for i := range m.goType.NumField() {
		field := m.goType.Field(i)
		at, end := btf.Bits(field.Offset*8), btf.Bits((field.Offset+field.Type.Size())*8)
		for _, name := range m.fields[field.Name] {
			member, ok := members[name]
			if !ok || member.Offset != at {
				t.Errorf("%s: %s.%s is at bit %d, %v.%s at %d", object, m.c, name, member.Offset, m.goType, field.Name, at)
			}
			at += bitsOf(t, member)
			delete(members, name)
		}
		if at != end {
			t.Errorf("%s: %v.%s ends at bit %d, its members in %s at %d", object, m.goType, field.Name, end, m.c, at)
		}
	}
	for name := range members {
		t.Errorf("%s: %s.%s has no mirror in %v", object, m.c, name, m.goType)
	}
}

func bitsOf(t *testing.T, member btf.Member) btf.Bits {
	t.Helper()
	if member.BitfieldSize != 0 {
		return member.BitfieldSize
	}
	size, err := btf.Sizeof(member.Type)
	if err != nil {
		t.Fatal(err)
	}
	return btf.Bits(size * 8)
}

// typesOf finds the structs that maps and programs of a spec refer to.
func typesOf(t *testing.T, spec *ebpf.CollectionSpec) map[string]*btf.Struct {
	t.Helper()
	found := map[string]*btf.Struct{}
	for typ, err := range spec.Types.All() {
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := typ.(*btf.Struct); ok {
			found[s.Name] = s
		}
	}
	return found
}

// TestFlagBits has each flag where C has the bit-field of its name.
func TestFlagBits(t *testing.T) {
	value := typesOf(t, specs(t)["from_netdev"])["ipcache_value"]
	at := btf.Bits(8 * unsafe.Offsetof(IPCacheValue{}.Flags))
	want := map[string]btf.Bits{
		"flag_skip_tunnel": 0, "flag_has_tunnel_ep": 1, "flag_ipv6_tunnel_ep": 2, "flag_remote_cluster": 3,
	}
	flags := map[string]IPCacheFlags{
		"flag_skip_tunnel": FlagSkipTunnel, "flag_has_tunnel_ep": FlagHasTunnelEndpoint,
		"flag_ipv6_tunnel_ep": FlagIPv6TunnelEndpoint, "flag_remote_cluster": FlagRemoteCluster,
	}
	for _, member := range value.Members {
		if bit, ok := want[member.Name]; ok {
			if member.Offset-at != bit || member.BitfieldSize != 1 || flags[member.Name] != 1<<bit {
				t.Errorf("%s is bit %d of size %d, its mirror %#x", member.Name, member.Offset-at, member.BitfieldSize, flags[member.Name])
			}
			delete(want, member.Name)
		}
	}
	if len(want) != 0 {
		t.Errorf("not in struct ipcache_value: %v", want)
	}
}

// TestSharedMaps: the objects define the same maps, which is what lets Load merge them, and exactly these.
func TestSharedMaps(t *testing.T) {
	objects := specs(t)
	ignore := cmpopts.IgnoreFields(ebpf.MapSpec{}, "Key", "Value", "Tags")
	for name, object := range objects {
		if diff := cmp.Diff(objects["from_netdev"].Maps, object.Maps, ignore); diff != "" {
			t.Errorf("maps of the objects (-from_netdev +%s):\n%s", name, diff)
		}
	}
	spec, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	type shape struct {
		Type                          ebpf.MapType
		Key, Value, MaxEntries, Flags uint32
	}
	got := map[string]shape{}
	for name, m := range spec.Maps {
		got[name] = shape{m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags}
	}
	const noPrealloc, readOnlyProg, mmapable, innerMap = 1, 0x80, 0x400, 0x1000
	for _, name := range []string{MapHosts, MapNetworks} {
		inner := spec.Maps[name].InnerMap
		got["a table of "+name] = shape{inner.Type, inner.KeySize, inner.ValueSize, inner.MaxEntries, inner.Flags}
	}
	want := map[string]shape{
		"ipcache":       {ebpf.LPMTrie, 24, 24, 512000, noPrealloc | readOnlyProg},
		"weft_counters": {ebpf.PerCPUHash, 12, 16, 65536, noPrealloc},
		"weft_near":     {ebpf.PerCPUArray, 4, 32, 256, 0},
		"weft_front":    {ebpf.PerCPUArray, 4, 64, 1024, 0},
		"weft_missed":   {ebpf.PerCPUArray, 4, 64, 1, 0},
		"weft_events":   {ebpf.RingBuf, 0, 0, 1 << 20, 0},
		"weft_config":   {ebpf.Array, 4, 16, 1, readOnlyProg},
		"weft_pods":     {ebpf.Hash, 24, 4, 65536, noPrealloc | readOnlyProg},
		"weft_hosts":    {ebpf.ArrayOfMaps, 4, 4, 2, 0},
		"weft_fast":     {ebpf.Array, 4, 64, 2, mmapable},
		"weft_networks": {ebpf.ArrayOfMaps, 4, 4, 4 * NetworksSlots, 0},
		// Memory that is mapped writable cannot be read-only for programs.
		"a table of weft_hosts":    {ebpf.Array, 4, HostsLineBytes, 1, mmapable | innerMap},
		"a table of weft_networks": {ebpf.Array, 4, 8, NetworksChunkBytes / 8, mmapable},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("maps (-want +got):\n%s", diff)
	}
	for _, p := range AllPrograms() {
		if spec.Programs[p.Name] == nil {
			t.Errorf("program %s is not in the spec", p.Name)
		}
	}
	if len(spec.Programs) != len(AllPrograms()) {
		t.Errorf("the spec has %d programs, want %d", len(spec.Programs), len(AllPrograms()))
	}
}
