// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

// What Cilium's own code makes of annotations.
func TestSettings(t *testing.T) {
	for _, v := range golden.Lines[struct {
		Affinity        string
		Annotations     map[string]string
		IncludeExternal bool `json:"include_external"`
		Shared          bool
	}](t, "service-annotations.jsonl") {
		s, err := ParseSettings(v.Annotations)
		affinity := s.Affinity.String()
		if v.Affinity == "" && affinity == "none" {
			affinity = ""
		}
		if err != nil || s.Global != v.IncludeExternal || s.Shared != v.Shared || affinity != v.Affinity {
			t.Errorf("%v: got %+v, %v, want %+v", v.Annotations, s, err, v)
		}
	}
	s, err := ParseSettings(map[string]string{
		"service.cilium.io/global": "true", "service.cilium.io/affinity": "near", "service.cilium.io/lb-algorithm": "Maglev", "io.cilium/service-affinity": "local",
	})
	if err == nil || !strings.Contains(err.Error(), "service.cilium.io/affinity") || s != (Settings{Global: true, Shared: true, Algorithm: Maglev}) {
		t.Errorf("got %+v, %v", s, err)
	}
}

// All that real clusters have published is read by the scanner, and as the general decoder reads it.
func TestScanReadsWhatClustersWrite(t *testing.T) {
	for key, value := range golden.Values(t, "/services/v1/") {
		scanned, ok := scanOffer([]byte(value))
		decoded, strange, err := decodeOffer([]byte(value))
		if !ok || err != nil || strange != 0 {
			t.Errorf("%s: scanned %v, %d strange ports, %v", key, ok, strange, err)
		}
		if diff := cmp.Diff(decoded, scanned, sameAddr); diff != "" {
			t.Errorf("%s (-decoded +scanned):\n%s", key, diff)
		}
	}
}

func TestParseOffer(t *testing.T) {
	o, err := ParseOffer([]byte(`{"cluster":"west","namespace":"shop","name":"web","backends":{` +
		`"::ffff:10.2.1.1":{"http":{"Protocol":"TCP","Port":80},"icmp":{"Protocol":"ICMP","Port":1},"none":{"Protocol":"UDP","Port":0}},` +
		`"10.2.1.2":{"http":{"Protocol":"tcp","Port":80}}},"shared":true,"clusterID":2}`))
	want := []Subset{{Ports: []NamedPort{{"http", TCP, 80}}, Addrs: addrs("10.2.1.1", "10.2.1.2")}}
	if diff := cmp.Diff(want, o.Backends, sameAddr); diff != "" || !errors.Is(err, ErrPartial) || !strings.Contains(err.Error(), "2 ports") {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// The scanner and the general decoder agree on everything that the scanner accepts.
func FuzzParseOffer(f *testing.F) {
	for _, value := range golden.Values(f, "/services/v1/") {
		f.Add([]byte(value))
	}
	f.Add([]byte(`{"name":"a","backends":{"::1":{},"::2":{"":{"Protocol":"SCTP","Port":1}}},"labels":{"a":["b",null,true,{}]}}`))
	f.Fuzz(func(t *testing.T, value []byte) {
		scanned, ok := scanOffer(value)
		if !ok {
			_, _ = ParseOffer(value)
			return
		}
		decoded, strange, err := decodeOffer(value)
		if err != nil || strange != 0 || !same(&scanned, &decoded) {
			t.Fatalf("scanned %+v\ndecoded %+v, %d strange, %v", scanned, decoded, strange, err)
		}
		NewTable().Put(scanned)
	})
}

// A slice that is written is byte for byte the one that a real cluster writes, and says all that is known of its endpoints.
//
// mechanism: L4
func TestWrittenSlice(t *testing.T) {
	w, err := NewSliceWriter()
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr
	s := Slice{
		Cluster: "east", ClusterID: 1, Service: web, Name: "web-abcde", Ports: []NamedPort{{"http", TCP, 8080}},
		Endpoints: []SliceEndpoint{{Addr: addr("10.1.1.10"), Ready: true, Serving: true, Node: "east-n1"}},
	}
	value, err := w.Marshal(&s)
	if want := goldenSlice(t); err != nil || !bytes.Equal(value, want) {
		t.Errorf("%v\n%q\nwant\n%q", err, value, want)
	}
	s.Endpoints = []SliceEndpoint{
		{Addr: addr("fd00::1"), Ready: true, Serving: true, Hostname: "web-0", Node: "n", Zone: "z1", ForZones: []string{"z1", "z2"}},
		{Addr: addr("fd00::2"), Serving: true, Terminating: true}, {Addr: addr("fd00::3")},
	}
	s.Ports = append(s.Ports, NamedPort{"", UDP, 53})
	if value, err = w.Marshal(&s); err != nil {
		t.Fatal(err)
	}
	o, err := newReader(t).Parse(value)
	want := Offer{
		Service: web, Cluster: "east", ClusterID: 1, Slice: "web-abcde", Shared: true, IncludeExternal: true, Backends: []Subset{
			{Ports: []NamedPort{{"", UDP, 53}, {"http", TCP, 8080}}, Addrs: []netip.Addr{addr("fd00::1")}},
			{Ports: []NamedPort{{"", UDP, 53}, {"http", TCP, 8080}}, State: Draining, Addrs: []netip.Addr{addr("fd00::2")}},
		},
	}
	if err != nil || !same(&o, &want) {
		t.Errorf("%v\n%+v\nwant\n%+v", err, o, want)
	}
	// What readers pass over is there for those that do not.
	for _, text := range []string{"web-0", "z1", "z2", "fd00::3", "IPv6"} {
		if !bytes.Contains(s.message(), []byte(text)) {
			t.Errorf("%s is not in the message", text)
		}
	}
	s.Endpoints = nil
	if _, err := w.Marshal(&s); err == nil {
		t.Error("a slice without endpoints is written")
	}
}

// same compares offers, to which it is all one whether a list is empty or not there.
func same(a, b *Offer) bool {
	return fmt.Sprint(*a) == fmt.Sprint(*b)
}

func goldenSlice(t testing.TB) []byte {
	t.Helper()
	for _, kv := range golden.Lines[struct {
		Key         string
		ValueBase64 string `json:"value_base64"`
	}](t, "kvstore-state-east.jsonl") {
		if strings.HasPrefix(kv.Key, SlicePrefix+"/") {
			value, err := base64.StdEncoding.DecodeString(kv.ValueBase64)
			if err != nil {
				t.Fatal(err)
			}
			return value
		}
	}
	t.Fatal("no slice is recorded")
	return nil
}

func newReader(t testing.TB) *SliceReader {
	t.Helper()
	r, err := NewSliceReader()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func pack(t testing.TB, message []byte, options ...zstd.EOption) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil, append(options, zstd.WithEncoderConcurrency(1))...)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(message, nil)
}

func TestGoldenSlice(t *testing.T) {
	o, err := newReader(t).Parse(goldenSlice(t))
	want := Offer{
		Service: web, Cluster: "east", ClusterID: 1, Slice: "web-abcde", Shared: true, IncludeExternal: true,
		Backends: []Subset{{Ports: []NamedPort{{"http", TCP, 8080}}, Addrs: addrs("10.1.1.10")}},
	}
	if diff := cmp.Diff(want, o, sameAddr); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if err := o.Validate("shop/web-abcde", "east", 1); err != nil {
		t.Error(err)
	}
	for _, wrong := range []error{o.Validate("shop/web", "east", 1), o.Validate("shop/web-abcde", "west", 1), o.Validate("shop/web-abcde", "east", 2)} {
		if wrong == nil {
			t.Error("accepted under what is not its own")
		}
	}
}

// message writes fields of a message: strings and messages as they are, numbers as varints.
func message(fields ...any) []byte {
	var m []byte
	for i := 0; i < len(fields); i += 2 {
		n := protowire.Number(fields[i].(int))
		switch v := fields[i+1].(type) {
		case string:
			m = protowire.AppendString(protowire.AppendTag(m, n, protowire.BytesType), v)
		case []byte:
			m = protowire.AppendBytes(protowire.AppendTag(m, n, protowire.BytesType), v)
		case int:
			m = protowire.AppendVarint(protowire.AppendTag(m, n, protowire.VarintType), uint64(v))
		}
	}
	return m
}

// sliceOf is a slice of shop/web with these endpoints and ports.
func sliceOf(fields ...any) []byte {
	return message(append([]any{1, "east", 2, 1, 3, "shop", 4, "web-a", 5, message(1, nameLabel, 2, "web")}, fields...)...)
}

func TestSliceConditions(t *testing.T) {
	r := newReader(t)
	no, yes := 0, 1
	o, err := r.Parse(pack(t, sliceOf(7, "IPv4",
		8, message(1, "10.1.1.1"), // says nothing: ready
		8, message(1, "10.1.1.2", 2, message(1, no)),
		8, message(1, "10.1.1.3", 2, message(1, no, 2, yes, 3, yes)), // ends, and serves
		8, message(1, "10.1.1.4", 2, message(1, no, 2, no)),
		8, message(1, "10.1.1.5", 1, "10.1.1.6", 2, message(1, yes, 3, yes), 6, "n1", 7, "z1"),
		9, message(1, "http", 2, "TCP", 3, 8080), 9, message(3, 53), 9, message(1, "dns", 2, "UDP"), 99, 7)))
	want := []Subset{
		{Ports: []NamedPort{{"", TCP, 53}, {"http", TCP, 8080}}, Addrs: addrs("10.1.1.1", "10.1.1.5", "10.1.1.6")},
		{Ports: []NamedPort{{"", TCP, 53}, {"http", TCP, 8080}}, State: Draining, Addrs: addrs("10.1.1.3")},
	}
	if diff := cmp.Diff(want, o.Backends, sameAddr); diff != "" || !errors.Is(err, ErrPartial) {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// lesson: C8
func TestBadSlices(t *testing.T) {
	r := newReader(t)
	good := sliceOf(7, "IPv4", 8, message(1, "10.1.1.1"))
	if _, err := r.Parse(pack(t, good)); err != nil {
		t.Fatal(err)
	}
	packed := pack(t, good)
	bomb := pack(t, make([]byte, 64<<20), zstd.WithEncoderLevel(zstd.SpeedBestCompression))
	many := []byte{}
	for range 64 {
		many = append(many, pack(t, make([]byte, 1<<20-1))...)
	}
	for name, value := range map[string][]byte{
		"empty": nil, "not packed": good, "truncated": packed[:len(packed)-5], "trailing": append(packed[:len(packed):len(packed)], 'x'),
		"flipped":          append(append([]byte{}, packed[:10]...), make([]byte, len(packed)-10)...),
		"a bomb of 64 MiB": bomb, "64 MiB in frames": many,
		"a window of 2 GiB":     {0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00},
		"a declared TiB":        {0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0, 0, 0, 0, 0, 1, 0, 0, 0x01, 0x00, 0x00},
		"no name":               pack(t, message(1, "east", 3, "shop", 7, "IPv4", 5, message(1, nameLabel, 2, "web"))),
		"no service":            pack(t, message(1, "east", 3, "shop", 4, "web-a", 7, "IPv4")),
		"FQDN":                  pack(t, sliceOf(7, "FQDN")),
		"no address type":       pack(t, sliceOf()),
		"no address":            pack(t, sliceOf(7, "IPv4", 8, message(1, "web-0"))),
		"a prefix":              pack(t, sliceOf(7, "IPv4", 8, message(1, "10.0.0.0/8"))),
		"a zone":                pack(t, sliceOf(7, "IPv6", 8, message(1, "fe80::1%eth0"))),
		"cluster ID of 33 bits": pack(t, sliceOf(7, "IPv4", 2, 1<<32)),
		"no message":            pack(t, []byte{0xff, 0xff}),
		"endpoint, no message":  pack(t, sliceOf(7, "IPv4", 8, "\xff")),
	} {
		if o, err := r.Parse(value); err == nil || errors.Is(err, ErrPartial) {
			t.Errorf("%s: accepted as %+v", name, o)
		}
	}
	if got := testing.AllocsPerRun(3, func() { _, _ = r.Parse(bomb) }); got > 100 {
		t.Errorf("a bomb costs %v allocations", got)
	}
	o, err := r.Parse(pack(t, sliceOf(7, "IPv6", 8, message(1, "10.1.1.1"), 8, message(1, "fd00::1"))))
	if !errors.Is(err, ErrPartial) || len(o.Backends) != 1 || !reflect.DeepEqual(o.Backends[0].Addrs, []netip.Addr{netip.MustParseAddr("fd00::1")}) {
		t.Errorf("an address of the other family: %+v, %v", o, err)
	}
}

func FuzzSlice(f *testing.F) {
	f.Add(goldenSlice(f))
	f.Add(pack(f, sliceOf(7, "IPv4", 8, message(1, "10.1.1.1", 2, message(1, 1)), 9, message(1, "http", 3, 80))))
	f.Fuzz(func(t *testing.T, value []byte) {
		r := newReader(t)
		if o, err := r.Parse(value); err == nil {
			NewTable().Put(o)
		}
		if o, err := parseSlice(value); err == nil {
			NewTable().Put(o)
		}
	})
}
