// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

var netipEqual = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

// suffix is the key relative to its prefix and address space.
func suffix(key string) string { return strings.SplitN(key, "/", 6)[5] }

// mechanism: G9
func TestAnnouncementRoundTrip(t *testing.T) {
	for key, value := range golden.Values(t, "/ip/v1/") {
		a, err := ParseAnnouncement([]byte(suffix(key)), []byte(value))
		if err != nil {
			t.Errorf("%s: %v", key, err)
			continue
		}
		got, err := a.Marshal()
		if err != nil || string(got) != value {
			t.Errorf("%s: %v (-want +got):\n%s", key, err, cmp.Diff(value, string(got)))
		}
		if want := "cilium/state/ip/v1/default/" + suffix(key); a.Key() != want {
			t.Errorf("key: got %q, want %q", a.Key(), want)
		}
	}
}

func TestParseAnnouncement(t *testing.T) {
	const value = `{"IP":"10.2.1.10","Mask":null,"HostIP":"172.18.2.1","ID":131329,"Key":3,"Metadata":"m",` +
		`"K8sNamespace":"shop","K8sPodName":"web-0","K8sServiceAccount":"default","NamedPorts":[{"Name":"http","Port":8080,"Protocol":"TCP"}]}`
	got, err := ParseAnnouncement([]byte("10.2.1.10"), []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	want := Announcement{
		Prefix: netip.MustParsePrefix("10.2.1.10/32"), Host: netip.MustParseAddr("172.18.2.1"), Identity: 131329, EncryptKey: 3,
		Metadata: "m", Namespace: "shop", Pod: "web-0", ServiceAccount: "default", NamedPorts: NewNamedPorts([]NamedPort{{"http", 8080, "TCP"}}),
	}
	if diff := cmp.Diff(want, got, netipEqual); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAnnouncementValidation(t *testing.T) {
	for _, v := range golden.Verdicts(t, "ip") {
		_, err := ParseAnnouncement([]byte(v.Key), []byte(v.Value))
		if accepted := err == nil || errors.Is(err, ErrNoAddress); accepted != v.Accepted {
			t.Errorf("%s: got %v, want accepted=%v (%s)", v.Value, err, v.Accepted, v.Error)
		}
	}
	for _, v := range []struct{ name, key, value, want string }{
		{"IPv4-mapped", "10.2.1.10", `{"IP":"::ffff:10.2.1.10","ID":131329}`, ""},
		{"case of names", "10.2.1.10", `{"ip":"10.2.1.10","id":131329}`, ""},
		{"white space", "10.2.1.10", ` {"IP": "10.2.1.10"} `, ""},
		{"escapes", "10.2.1.10", `{"IP":"\u0031\u0030.2.1.10"}`, ""},
		{"unknown field", "10.2.1.10", `{"IP":"10.2.1.10","New":{"a":[1]}}`, ""},
		{"repeated field, last wins", "10.2.1.10", `{"IP":"10.2.1.11","IP":"10.2.1.10"}`, ""},
		{"IPv6 in short", "fd00::10", `{"IP":"fd00:0::10"}`, ""},
		{"key not in short", "fd00:0::10", `{"IP":"fd00:0::10"}`, "does not match key"},
		{"key is <nil>", "<nil>", `{"ID":1}`, ErrNoAddress.Error()},
		{"no address under a key", "10.2.1.10", `{"ID":1}`, "does not match key"},
		{"zone", "fe80::1%eth0", `{"IP":"fe80::1%eth0"}`, "invalid IP address"},
		{"no address", "x", `{"IP":"x"}`, "invalid IP address"},
		{"host no address", "10.2.1.10", `{"IP":"10.2.1.10","HostIP":"x"}`, "host: invalid IP address"},
		{"mask with holes", "10.2.1.0/24", `{"IP":"10.2.1.0","Mask":"/wD/AA=="}`, "invalid mask"},
		{"mask of the other family", "10.2.1.0/24", `{"IP":"10.2.1.0","Mask":"////////////////////AA=="}`, "invalid mask"},
		{"bits beyond the mask", "10.0.0.1/8", `{"IP":"10.0.0.1","Mask":"/wAAAA=="}`, "bits beyond its mask"},
		{"named ports in another form", "10.0.0.1", `{"IP":"10.0.0.1","NamedPorts":[ {"port":8080,"name":"h<"} ]}`, ""},
		{"no named ports", "10.0.0.1", `{"IP":"10.0.0.1","NamedPorts":[]}`, ""},
		{"named ports null", "10.0.0.1", `{"IP":"10.0.0.1","NamedPorts":null}`, ""},
		{"port of 17 bits", "10.0.0.1", `{"IP":"10.0.0.1","NamedPorts":[{"Name":"a","Port":65536,"Protocol":"TCP"}]}`, "named ports: "},
		{"named ports no list", "10.0.0.1", `{"IP":"10.0.0.1","NamedPorts":"http"}`, "named ports: "},
		{"/33", "10.0.0.0/33", `{"IP":"10.0.0.0","Mask":"/////4A="}`, "invalid mask"},
		{"identity of 33 bits", "10.0.0.1", `{"IP":"10.0.0.1","ID":4294967296}`, "ip: "},
		{"negative identity", "10.0.0.1", `{"IP":"10.0.0.1","ID":-1}`, "ip: "},
		{"leading zero", "10.0.0.1", `{"IP":"10.0.0.1","ID":01}`, "ip: "},
		{"fraction", "10.0.0.1", `{"IP":"10.0.0.1","ID":1.5}`, "ip: "},
		{"key of 9 bits", "10.0.0.1", `{"IP":"10.0.0.1","Key":256}`, "ip: "},
		{"rubbish after", "10.0.0.1", `{"IP":"10.0.0.1"}x`, "ip: "},
		{"truncated", "10.0.0.1", `{"IP":"10.0.0.1"`, "ip: "},
		{"not an object", "10.0.0.1", `"10.0.0.1"`, "ip: "},
		{"empty", "10.0.0.1", ``, "ip: "},
	} {
		_, err := ParseAnnouncement([]byte(v.key), []byte(v.value))
		switch {
		case v.want == "" && err != nil:
			t.Errorf("%s: %v", v.name, err)
		case v.want != "" && (err == nil || !strings.Contains(err.Error(), v.want)):
			t.Errorf("%s: got %v, want an error with %q", v.name, err, v.want)
		}
	}
}

func TestScanAllocatesNothing(t *testing.T) {
	value := []byte(`{"IP":"10.2.1.10","Mask":null,"HostIP":"172.18.2.1","ID":131329,"Key":0,"Metadata":"","K8sNamespace":"shop",` +
		`"K8sPodName":"web-0","K8sServiceAccount":"web","NamedPorts":[{"Name":"http","Port":8080,"Protocol":"TCP"},{"Name":"","Port":0,"Protocol":""}]}`)
	key := []byte("10.2.1.10")
	if n := testing.AllocsPerRun(100, func() {
		if _, err := ParseAnnouncement(key, value); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for one announcement, want none", n)
	}
}

// FuzzScan holds the fast decoder to the general one: what it accepts, both understand alike.
func FuzzScan(f *testing.F) {
	for _, value := range golden.Values(f, "/ip/v1/") {
		f.Add([]byte(value))
	}
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"IP":"10.0.0.1","ID":0,"Key":255,"Mask":"AAA="}`))
	f.Add([]byte(`{"NamedPorts":[{"Name":"http","Port":8080,"Protocol":"TCP"},{"Name":"dns","Port":53,"Protocol":"UDP"}]}`))
	f.Add([]byte(`{"NamedPorts":[{"Name":"<","Port":65536,"Protocol":"TCP"}]}`))
	f.Fuzz(func(t *testing.T, value []byte) {
		var fast, general wireAnnouncement
		if !scanAnnouncement(value, &fast) {
			return
		}
		if err := json.Unmarshal(value, &general); err != nil {
			t.Fatalf("the fast decoder accepts what is not JSON: %v", err)
		}
		if diff := cmp.Diff(general, fast); diff != "" {
			t.Errorf("(-general +fast):\n%s", diff)
		}
	})
}

// FuzzParseAnnouncement looks for input that breaks the decoder or does not survive a round trip.
func FuzzParseAnnouncement(f *testing.F) {
	for key, value := range golden.Values(f, "/ip/v1/") {
		f.Add([]byte(suffix(key)), []byte(value))
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		a, err := ParseAnnouncement(key, value)
		if err != nil {
			return
		}
		encoded, err := a.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseAnnouncement(key, encoded)
		if err != nil {
			t.Fatalf("cannot decode what was encoded: %v\n%s", err, encoded)
		}
		if diff := cmp.Diff(a, again, netipEqual, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("round trip (-first +second):\n%s", diff)
		}
	})
}

func BenchmarkParseAnnouncement(b *testing.B) {
	value := []byte(`{"IP":"10.2.1.10","Mask":null,"HostIP":"172.18.2.1","ID":131329,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"web-0"}`)
	key := []byte("10.2.1.10")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseAnnouncement(key, value); err != nil {
			b.Fatal(err)
		}
	}
}
