// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// valueOf is a value with backends in the order in which they are given, each with what stands behind it.
func valueOf(backends []string, ports, behind string) []byte {
	var b strings.Builder
	b.WriteString(`{"cluster":"west","namespace":"shop","name":"web","frontends":{},"backends":{`)
	for i, addr := range backends {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q%s", addr, ports)
	}
	b.WriteString(`}` + behind + `,"includeExternal":true,"shared":true,"clusterID":2}`)
	return []byte(b.String())
}

const httpPort = `:{"http":{"Protocol":"TCP","Port":8080}}`

// previousPair is a table whose offer is decoded whole each time, and one whose offer is revised where that is possible.
type previousPair struct {
	t           *testing.T
	whole, part *Table
	previous    *Previous
	at          Revision // of a reader of part
	has         map[Backend]bool
	revised     int
}

func newPreviousPair(t *testing.T) *previousPair {
	p := &previousPair{t: t, whole: NewTable(), part: NewTable(), has: map[Backend]bool{}}
	for _, table := range []*Table{p.whole, p.part} {
		l := webLocal(Settings{Global: true})
		l.Addrs = append(l.Addrs, addrs("fd00:96::10")...)
		table.PutLocal(l)
	}
	return p
}

// put takes the next value, and compares the two tables and the reader.
func (p *previousPair) put(value []byte) {
	p.t.Helper()
	o, err := ParseOffer(value)
	if err == nil {
		p.whole.Put(o)
	}
	taken := false
	if p.previous != nil {
		removed, added, ok := p.previous.Next(value)
		taken = ok && (len(removed)+len(added) == 0 || p.part.Revise("west", web, removed, added))
	}
	if taken && err != nil {
		p.t.Fatalf("a value is taken that is none: %v", err)
	}
	if !taken {
		if o, p.previous, err = DecodeOffer(value); err == nil {
			p.part.Put(o)
		}
	} else {
		p.revised++
		if string(p.previous.value) != string(value) {
			p.t.Fatalf("the value that is kept is not the one that was read")
		}
	}
	want, _ := p.whole.Offer("west", web, "")
	got, _ := p.part.Offer("west", web, "")
	if (want == nil) != (got == nil) || want != nil && !same(want, got) {
		p.t.Fatalf("the offer is not the same, read where it differs and whole (-want +got):\n%s", cmp.Diff(want, got, sameAddr))
	}
	p.follow()
	s, _ := p.whole.Select(webFront)
	if len(p.has) != len(s.Backends) || slices.ContainsFunc(s.Backends, func(b Backend) bool { return !p.has[b] }) {
		p.t.Fatalf("a reader has %d backends, want %d", len(p.has), len(s.Backends))
	}
}

// follow reads what has changed.
func (p *previousPair) follow() {
	for {
		batch, next, _ := p.part.Changes(p.at, 16)
		if p.at = next; len(batch) == 0 {
			return
		}
		for _, c := range batch {
			if c.Frontend != webFront {
				continue
			}
			if c.Whole {
				clear(p.has)
				for _, b := range c.Backends {
					p.has[b] = true
				}
			}
			for _, b := range c.Removed {
				delete(p.has, b)
			}
			for _, b := range c.Added {
				p.has[b] = true
			}
		}
	}
}

// TestPrevious: values that are changed at random, mostly by little, come to the same whether they are read whole or where they
// differ: backends that come, go and are exchanged at both ends and between, other ports, other labels, what is no value.
func TestPrevious(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	p := newPreviousPair(t)
	var backends []string
	for i := range 600 {
		backends = append(backends, podAddr(1000+i).String())
	}
	for i := range 50 {
		backends = append(backends, fmt.Sprintf("fd00::%x", 0x100+i))
	}
	slices.Sort(backends)
	ports, behind := httpPort, `,"labels":{"app":"web"}`
	steps := 500
	for range steps {
		for range 1 + random.IntN(3) {
			i := random.IntN(len(backends))
			if random.IntN(4) == 0 {
				i = []int{0, len(backends) - 1}[random.IntN(2)]
			}
			fresh := podAddr(random.IntN(4000)).String()
			if random.IntN(12) == 0 {
				fresh = fmt.Sprintf("fd00::%x", 1+random.IntN(0xfff))
			}
			if len(backends) > 500 {
				backends = slices.Delete(backends, i, i+1)
			}
			if at, found := slices.BinarySearch(backends, fresh); !found && random.IntN(6) > 0 {
				backends = slices.Insert(backends, at, fresh)
			}
		}
		said := slices.Clone(backends)
		switch random.IntN(40) {
		case 0:
			ports = fmt.Sprintf(`:{"http":{"Protocol":"TCP","Port":%d}}`, 8080+random.IntN(3))
		case 1:
			behind = fmt.Sprintf(`,"labels":{"app":"%d"}`, random.IntN(3))
		case 2:
			said[random.IntN(len(said))] = said[0] // twice, perhaps out of order
		case 3:
			said[random.IntN(len(said))] = "10.0.0"
		case 4:
			said = said[:random.IntN(3)]
		case 5:
			said = slices.Insert(said, 0, "::ffff:10.0.4.1") // perhaps one that is there by its other name
		}
		value := valueOf(said, ports, behind)
		switch random.IntN(40) {
		case 0: // one of other ports
			at := random.IntN(strings.Count(string(value), "8080") + 1)
			value = replaceNth(value, "8080", "9090", at)
		case 1:
			value[random.IntN(len(value))] ^= byte(1 + random.IntN(127))
		case 2:
			value = slices.Delete(value, len(value)/2, min(len(value), len(value)/2+1+random.IntN(80)))
		}
		p.put(value)
	}
	if p.revised < steps/4 {
		t.Errorf("%d of %d values were read where they differ, want a quarter at least", p.revised, steps)
	}
}

// replaceNth replaces the n-th occurrence.
func replaceNth(value []byte, old, by string, n int) []byte {
	parts := strings.Split(string(value), old)
	if n+1 >= len(parts) {
		return value
	}
	return []byte(strings.Join(parts[:n+1], old) + by + strings.Join(parts[n+1:], old))
}

// What is small, or has ports that differ, or is long for other reasons than its backends, is not kept.
func TestPreviousIsWorthWhile(t *testing.T) {
	var backends []string
	for i := range 600 {
		backends = append(backends, podAddr(1000+i).String())
	}
	slices.Sort(backends)
	for _, tc := range []struct {
		name  string
		value []byte
		kept  bool
	}{
		{"large", valueOf(backends, httpPort, ""), true},
		{"small", valueOf(backends[:100], httpPort, ""), false},
		{"ports that differ", []byte(strings.Replace(string(valueOf(backends, httpPort, "")), "8080", "9090", 1)), false},
		{"long for its labels", valueOf(backends, httpPort, `,"labels":{"a":"`+strings.Repeat("a", 100_000)+`"}`), false},
		{"none", valueOf(append(backends, "10"), httpPort, ""), false},
	} {
		_, p, _ := DecodeOffer(tc.value)
		if (p != nil) != tc.kept {
			t.Errorf("%s: kept %v, want %v", tc.name, p != nil, tc.kept)
		}
		if size := p.Size(); tc.kept && size > 2*len(tc.value) || !tc.kept && size != 0 {
			t.Errorf("%s: %d bytes are kept of %d", tc.name, size, len(tc.value))
		}
	}
}

// FuzzPrevious: whatever follows a large value, reading it where it differs comes to what decoding it does.
func FuzzPrevious(f *testing.F) {
	var backends []string
	for i := range 400 {
		backends = append(backends, podAddr(1000+i).String())
	}
	slices.Sort(backends)
	base := valueOf(backends, httpPort, `,"labels":{"app":"web"}`)
	f.Add(uint16(100), uint16(0), []byte(`"10.0.3.232"`+httpPort+`,`))
	f.Add(uint16(len(base)/2), uint16(50), []byte{})
	f.Add(uint16(85), uint16(52), []byte(`"::ffff:10.0.3.232"`+httpPort+`,`))
	f.Fuzz(func(t *testing.T, at, gone uint16, come []byte) {
		from := min(int(at), len(base))
		value := slices.Concat(base[:from], come, base[min(from+int(gone), len(base)):])
		o, previous, err := DecodeOffer(base)
		if err != nil || previous == nil {
			t.Fatal(err)
		}
		removed, added, ok := previous.Next(value)
		if !ok {
			return
		}
		addrs, ok := revised(o.Backends[0].Addrs, removed, added)
		if !ok || len(addrs) == 0 {
			return
		}
		o.Backends = []Subset{{Ports: o.Backends[0].Ports, Addrs: addrs}}
		want, err := ParseOffer(value)
		if err != nil || !same(&o, &want) {
			t.Fatalf("read where it differs: %+v\nwhole: %+v, %v", o, want, err)
		}
	})
}

func TestRevised(t *testing.T) {
	list := func(text string) []netip.Addr { return addrs(strings.Fields(text)...) }
	for _, tc := range []struct {
		all, removed, added, want string
		ok                        bool
	}{
		{"::1 ::3 ::5", "::3", "::4", "::1 ::4 ::5", true},
		{"::1 ::3 ::5", "::5 ::1", "::9 ::0", "::0 ::3 ::9", true},
		{"::1", "::1", "", "", true},
		{"::1 ::3", "::2", "", "", false},
		{"::1 ::3", "", "::3", "", false},
		{"::1 ::3", "::3 ::3", "", "", false},
		{"::1 ::3", "", "::2 ::2", "", false},
		{"::1 ::3", "::3", "::3", "", false},
		{"", "", "::3", "::3", true},
	} {
		got, ok := revised(list(tc.all), list(tc.removed), list(tc.added))
		if ok != tc.ok || !slices.Equal(got, list(tc.want)) {
			t.Errorf("%s without %s, with %s: %v, %v", tc.all, tc.removed, tc.added, got, ok)
		}
	}
}
