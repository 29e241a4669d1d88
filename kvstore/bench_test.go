// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

const benchKeys = 100_000

// load puts benchKeys keys of the size of an endpoint's announcement below p/.
func load(b *testing.B) *testutil.Etcd {
	e := testutil.StartEtcd(b)
	var ops []clientv3.Op
	for i := range benchKeys {
		key := fmt.Sprintf("p/10.%d.%d.%d", i>>16, i>>8&0xff, i&0xff)
		value := fmt.Sprintf(`{"IP":"%s","Mask":null,"HostIP":"172.18.1.1","ID":%d,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"web-%d"}`, key[2:], 65536+i%1000, i)
		ops = append(ops, clientv3.OpPut(key, value))
		if len(ops) == 128 || i == benchKeys-1 {
			if _, err := e.Client().Txn(b.Context()).Then(ops...).Commit(); err != nil {
				b.Fatal(err)
			}
			ops = ops[:0]
		}
	}
	return e
}

// BenchmarkList lists 100k keys through a Watcher, and barely with etcd's own
// client, and reports the rate of the one over that of the other.
func BenchmarkList(b *testing.B) {
	e := load(b)
	bare, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint()}})
	if err != nil {
		b.Fatal(err)
	}
	defer bare.Close()
	for _, mode := range []struct {
		name string
		cfg  func(*Config)
		bare func(*testing.B, *clientv3.Client)
	}{
		{"streamed", func(*Config) {}, bareStream},
		{"paged", func(c *Config) { c.Paged = true }, barePages},
	} {
		b.Run(mode.name, func(b *testing.B) {
			c := mustDial(b, e, mode.cfg)
			var ours, theirs time.Duration
			b.ReportAllocs()
			for b.Loop() {
				begin := time.Now()
				listOnce(b, c)
				ours += time.Since(begin)
				b.StopTimer()
				begin = time.Now()
				mode.bare(b, bare)
				theirs += time.Since(begin)
				b.StartTimer()
			}
			b.ReportMetric(float64(benchKeys*b.N)/ours.Seconds(), "keys/s")
			b.ReportMetric(theirs.Seconds()/ours.Seconds(), "of-bare")
		})
	}
}

// listOnce runs a new Watcher until its first Synced.
func listOnce(b *testing.B, c *Client) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	w := NewWatcher("p/", func(events []Event) {
		if events[len(events)-1].Kind == Synced {
			cancel()
		}
	})
	if err := w.Run(ctx, c); err != nil || w.Len() != benchKeys {
		b.Fatalf("%d keys: %v", w.Len(), err)
	}
}

func bareStream(b *testing.B, c *clientv3.Client) {
	stream, err := c.GetStream(b.Context(), "p/", clientv3.WithPrefix())
	if err != nil {
		b.Fatal(err)
	}
	n := 0
	for part := range stream {
		if err := part.Err(); err != nil {
			b.Fatal(err)
		}
		n += len(part.Kvs)
	}
	if n != benchKeys {
		b.Fatalf("%d keys", n)
	}
}

func barePages(b *testing.B, c *clientv3.Client) {
	n, start, more := 0, "p/", true
	for more {
		resp, err := c.Get(b.Context(), start, clientv3.WithRange("p0"), clientv3.WithLimit(defaultPageSize))
		if err != nil {
			b.Fatal(err)
		}
		n, more = n+len(resp.Kvs), resp.More
		start = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
	if n != benchKeys {
		b.Fatalf("%d keys", n)
	}
}

// BenchmarkIndex reports the heap that a key takes beside its lookup.
func BenchmarkIndex(b *testing.B) {
	for _, n := range []int{10_000, 500_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			x := &index{}
			keys := make([][]byte, n)
			for i := range keys {
				keys[i] = fmt.Appendf(nil, "10.%d.%d.%d", i>>16, i>>8&0xff, i&0xff)
				if _, err := x.insert(keys[i], int64(i), 0); err != nil {
					b.Fatal(err)
				}
			}
			i := 0
			for b.Loop() {
				x.find(keys[i%n])
				i += 7919
			}
			b.ReportMetric(indexBytes(n)/float64(n), "B/key")
		})
	}
}
