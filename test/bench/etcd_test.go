// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"

	"github.com/weftmesh/weft/test/load"
)

// server is an etcd in a process of its own, which also makes up what it holds.
type server struct {
	*process
	endpoint string
}

func startServer(b *testing.B) *server {
	b.Helper()
	return startServerAt(b, ordinary)
}

// startServerAt is startServer with another priority.
func startServerAt(b *testing.B, p priority) *server {
	b.Helper()
	s := &server{process: startAt(b, p, "etcd", b.TempDir())}
	s.answer(b, &s.endpoint)
	return s
}

// put has the server itself put n keys under a prefix, so that it costs this process nothing. It does not wait for it.
func (s *server) put(b *testing.B, prefix string, n int) {
	b.Helper()
	s.order(b, order{Do: "put", Prefix: prefix, N: n})
}

// done waits until the server has done what it was told to, and returns how much that was.
func (s *server) done(b *testing.B) (n int) {
	b.Helper()
	s.answer(b, &n)
	return n
}

func (s *server) fill(b *testing.B, cluster load.Cluster) {
	b.Helper()
	progress(b, "filling etcd: %s of %d workloads", cluster.Name, cluster.Workloads)
	s.order(b, order{Do: "fill", Cluster: &cluster})
	s.done(b)
}

// serveEtcd serves with its data below dir, and writes what it is told to.
func serveEtcd(dir string, orders <-chan order, answer func(any)) error {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "fatal", true
	cfg.InitialClusterToken = dir
	any := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{any}, []url.URL{any}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{any}, []url.URL{any}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.QuotaBackendBytes = 8 << 30
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	defer etcd.Close()
	<-etcd.Server.ReadyNotify()
	answer(fmt.Sprintf("http://%s", etcd.Clients[0].Addr()))
	client := v3client.New(etcd.Server)
	defer client.Close()
	for o := range orders {
		n, err := write(context.Background(), client, o)
		if err != nil {
			return fmt.Errorf("%s: %w", o.Do, err)
		}
		answer(n)
	}
	return nil
}

// write carries out one order.
func write(ctx context.Context, client *clientv3.Client, o order) (n int, err error) {
	f := load.Filler{Client: client, Progress: func(keys int) {
		fmt.Fprintf(os.Stderr, "%s etcd: %s: %d keys\n", time.Now().Format("15:04:05"), o.Do, keys)
	}}
	switch o.Do {
	case "put":
		return o.N, putKeys(ctx, client, o.Prefix, o.N)
	case "fill":
		return 0, f.Fill(ctx, *o.Cluster)
	case "put workloads":
		return o.N, f.Put(ctx, *o.Cluster, o.First, o.N, 0)
	case "delete workloads":
		return o.N, f.Delete(ctx, *o.Cluster, o.First, o.N)
	case "churn":
		return f.Churn(ctx, *o.Cluster, o.Rate, o.Span)
	}
	return 0, fmt.Errorf("unknown order")
}

// putKeys puts n keys of the size of an endpoint's announcement, in transactions of 100.
func putKeys(ctx context.Context, client *clientv3.Client, prefix string, n int, options ...clientv3.OpOption) error {
	const batch = 100
	ops := make([]clientv3.Op, 0, batch)
	for i := range n {
		ops = append(ops, clientv3.OpPut(prefix+strconv.Itoa(i), announcement(i), options...))
		if len(ops) < batch && i < n-1 {
			continue
		}
		if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
			return err
		}
		ops = ops[:0]
	}
	return nil
}

func announcement(i int) string {
	return fmt.Sprintf(`{"IP":"10.%d.%d.%d","Mask":null,"HostIP":"172.18.1.1","ID":%d,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"web-%d"}`,
		i>>16, i>>8&0xff, i&0xff, 65536+i%1000, i)
}
