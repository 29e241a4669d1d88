// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"net"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// StartGRPCProxy starts etcd's own gRPC proxy in front of a server and returns its host:port. It answers watches
// without the cluster id, and knows neither requests for progress nor streamed ranges. It ends with the test.
func StartGRPCProxy(t testing.TB, target string) string {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{target}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", anyPort)
	if err != nil {
		t.Fatal(err)
	}
	kv, _ := grpcproxy.NewKvProxy(client)
	watch, watchEnd := grpcproxy.NewWatchProxy(client.Ctx(), zap.NewNop(), client)
	lease, leaseEnd := grpcproxy.NewLeaseProxy(client.Ctx(), client)
	server := grpc.NewServer()
	pb.RegisterKVServer(server, kv)
	pb.RegisterWatchServer(server, watch)
	pb.RegisterLeaseServer(server, lease)
	pb.RegisterMaintenanceServer(server, grpcproxy.NewMaintenanceProxy(client))
	pb.RegisterAuthServer(server, grpcproxy.NewAuthProxy(client))
	served := make(chan error)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		client.Close()
		<-watchEnd
		<-leaseEnd
		if err := <-served; err != nil {
			t.Errorf("gRPC proxy: %v", err)
		}
	})
	return listener.Addr().String()
}
