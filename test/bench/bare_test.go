// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
)

// bareFigures are what the bare pipeline took.
type bareFigures struct {
	Took, CPU time.Duration
	Heap      float64
}

// runBare runs the bare pipeline once, in a process of its own: the least that any agent must do. It reads a streamed
// range, scans the values by hand without checking them, keeps a compact table keyed by address with the names of
// workloads, and writes a map of the kernel in batches. There is no watch, no claim, no second reader.
func runBare(b *testing.B, etcd *server, prefix string, workloads int) bareFigures {
	b.Helper()
	p := start(b, "bare", "")
	defer p.end()
	var f bareFigures
	p.ask(b, order{Do: "run", Endpoint: etcd.endpoint, Prefix: prefix, N: workloads}, &f)
	return f
}

func serveBare(_ string, orders <-chan order, answer func(any)) error {
	for o := range orders {
		var f any
		var err error
		switch o.Do {
		case "run":
			f, err = bare(o)
		case "propagation":
			f, err = barePropagation(o)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", o.Do, err)
		}
		answer(f)
	}
	return nil
}

func newBareMap() (*ebpf.Map, error) {
	spec, err := bpf.Load()
	if err != nil {
		return nil, err
	}
	spec.Maps[bpf.MapIPCache].MaxEntries = maxEntries
	return ebpf.NewMap(spec.Maps[bpf.MapIPCache])
}

// barePropagation measures a writer that watches, scans and writes, event by event.
func barePropagation(o order) (latencies, error) {
	m, err := newBareMap()
	if err != nil {
		return latencies{}, err
	}
	defer m.Close()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{o.Endpoint}})
	if err != nil {
		return latencies{}, err
	}
	defer client.Close()
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(context.Background()))
	events := client.Watch(ctx, o.Prefix, clientv3.WithPrefix())
	ended := make(chan error, 1)
	go func() { ended <- bareWriter(m, events) }()
	l, err := observe(ctx, o, func(addr netip.Addr) (identity.ID, bool, error) {
		var v bpf.IPCacheValue
		key := bpf.MakeIPCacheKey(netip.PrefixFrom(addr, 32))
		err := m.Lookup(&key, &v)
		return identity.ID(v.Identity), err == nil, nil
	})
	cancel()
	return l, errors.Join(err, <-ended)
}

func bareWriter(m *ebpf.Map, events clientv3.WatchChan) error {
	t := &bareTable{entries: make(map[uint32]bareEntry), interned: make(map[string]uint32)}
	for resp := range events {
		for _, ev := range resp.Events {
			if ev.Type != clientv3.EventTypePut {
				continue
			}
			key, value := t.add(ev.Kv.Value)
			if err := m.Update(&key, &value, ebpf.UpdateAny); err != nil {
				return err
			}
		}
	}
	return nil
}

// bareEntry is one address of the bare table.
type bareEntry struct{ identity, host, namespace, pod uint32 }

type bareTable struct {
	entries  map[uint32]bareEntry
	interned map[string]uint32
	names    []byte // of pods, length first
}

func (t *bareTable) intern(name []byte) uint32 {
	id, ok := t.interned[string(name)]
	if !ok {
		id = uint32(len(t.interned))
		t.interned[string(name)] = id
	}
	return id
}

// field returns what follows name in value, up to end, and what comes after.
func field(value []byte, name string, end byte) (text, rest []byte) {
	i := bytes.Index(value, []byte(name))
	if i < 0 {
		return nil, value
	}
	rest = value[i+len(name):]
	n := bytes.IndexByte(rest, end)
	if n < 0 {
		return nil, value
	}
	return rest[:n], rest[n:]
}

// address reads dotted decimal numbers, without checking.
func address(text []byte) (addr uint32) {
	part := uint32(0)
	for _, c := range text {
		if c == '.' {
			addr, part = addr<<8|part, 0
			continue
		}
		part = part*10 + uint32(c-'0')
	}
	return addr<<8 | part
}

func number(text []byte) (n uint32) {
	for _, c := range text {
		n = n*10 + uint32(c-'0')
	}
	return n
}

// add scans one value and returns the map's entry for it.
func (t *bareTable) add(value []byte) (bpf.IPCacheKey, bpf.IPCacheValue) {
	ip, value := field(value, `"IP":"`, '"')
	host, value := field(value, `"HostIP":"`, '"')
	id, value := field(value, `"ID":`, ',')
	namespace, value := field(value, `"K8sNamespace":"`, '"')
	pod, _ := field(value, `"K8sPodName":"`, '"')
	addr, e := address(ip), bareEntry{identity: number(id), host: address(host), namespace: t.intern(namespace), pod: uint32(len(t.names))}
	t.names = append(append(t.names, byte(len(pod))), pod...)
	t.entries[addr] = e
	key := bpf.IPCacheKey{PrefixLen: 64, Family: bpf.FamilyIPv4}
	binary.BigEndian.PutUint32(key.IP[:], addr)
	v := bpf.IPCacheValue{Identity: e.identity, Flags: bpf.FlagHasTunnelEndpoint}
	binary.BigEndian.PutUint32(v.TunnelEndpoint[:], e.host)
	return key, v
}

func bare(o order) (bareFigures, error) {
	m, err := newBareMap()
	if err != nil {
		return bareFigures{}, err
	}
	defer m.Close()
	heap, cpu, start := heapInUse(), cpuTime(), clock()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{o.Endpoint}, MaxCallRecvMsgSize: 1 << 30})
	if err != nil {
		return bareFigures{}, err
	}
	defer client.Close()
	t := &bareTable{entries: make(map[uint32]bareEntry), interned: make(map[string]uint32)}
	stream, err := client.GetStream(context.Background(), o.Prefix, clientv3.WithPrefix())
	if err != nil {
		return bareFigures{}, err
	}
	const batch = 4096
	keys, values := make([]bpf.IPCacheKey, 0, batch), make([]bpf.IPCacheValue, 0, batch)
	flush := func() error {
		if len(keys) == 0 {
			return nil
		}
		_, err := m.BatchUpdate(keys, values, nil)
		keys, values = keys[:0], values[:0]
		return err
	}
	for part := range stream {
		if err := part.Err(); err != nil {
			return bareFigures{}, err
		}
		for _, kv := range part.Kvs {
			k, v := t.add(kv.Value)
			if keys, values = append(keys, k), append(values, v); len(keys) == batch {
				if err := flush(); err != nil {
					return bareFigures{}, err
				}
			}
		}
	}
	if err := flush(); err != nil {
		return bareFigures{}, err
	}
	f := bareFigures{Took: clock() - start, CPU: cpuTime() - cpu, Heap: heapInUse() - heap}
	if len(t.entries) != o.N {
		return bareFigures{}, fmt.Errorf("the bare table has %d entries, want %d", len(t.entries), o.N)
	}
	return f, nil
}

// TestBareScan: the baseline reads what it is to read.
func TestBareScan(t *testing.T) {
	table := &bareTable{entries: make(map[uint32]bareEntry), interned: make(map[string]uint32)}
	key, value := table.add([]byte(announcement(70_000)))
	wantKey := bpf.MakeIPCacheKey(netip.MustParsePrefix("10.1.17.112/32"))
	wantValue := bpf.MakeIPCacheValue(65536, netip.MustParseAddr("172.18.1.1"), 0, 0)
	if key != wantKey || value != wantValue {
		t.Errorf("got %v %v, want %v %v", key, value, wantKey, wantValue)
	}
	if got := string(table.names); got != "\x09web-70000" {
		t.Errorf("names %q", got)
	}
}
