// SPDX-License-Identifier: Apache-2.0

package endpoint_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/weftmesh/weft/endpoint"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

var _ endpoint.Publisher = (*kvstore.Writer)(nil)

// newPublishing assembles a registry of node east-n1 over dir that publishes into etcd.
func newPublishing(t *testing.T, etcd *testutil.Etcd, dir string) (*kvstore.Writer, *endpoint.Files, *endpoint.Registry) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	client, err := kvstore.Dial(kvstore.Config{Endpoints: []string{etcd.Endpoint()}}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	writer := kvstore.NewWriter(client, kvstore.WriterConfig{Log: log})
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	files := endpoint.NewFiles(endpoint.FilesConfig{Dir: dir, ClusterName: "east", ClusterID: 1, Layout: layout})
	registry, err := endpoint.New(endpoint.Config{
		Sources: []endpoint.Source{files}, ClusterName: "east", ClusterID: 1, NodeName: "east-n1", HostIP: netip.MustParseAddr("172.18.1.1"),
		IPs: ipcache.New(), Identities: identity.NewTable(), Publisher: writer, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	return writer, files, registry
}

// The keys of endpoints come to a real etcd and go again; the labels of an identity stay, and are not overwritten.
//
// mechanism: J1
func TestPublishesIntoEtcd(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	dir := t.TempDir()
	writer, files, registry := newPublishing(t, etcd, dir)
	const taken = "k8s:app=other;"
	etcd.Put(t, "cilium/state/identities/v1/id/65794", taken)
	write(t, dir, "a.yaml", "- {name: web, namespace: shop, ip: 10.1.1.10, identity: 65793, labels: {app: web}}\n"+
		"- {name: db, namespace: shop, ip: 10.1.1.11, identity: 65794, labels: {app: db}}\n")

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 3)
	go func() { done <- writer.Run(ctx) }()
	go func() { done <- files.Run(ctx) }()
	go func() { done <- registry.Run(ctx) }()
	const labels = "k8s:app=web;k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop;" +
		"k8s:io.cilium.k8s.policy.cluster=east;k8s:io.cilium.k8s.policy.serviceaccount=default;k8s:io.kubernetes.pod.namespace=shop;"
	const slave = "cilium/state/identities/v1/value/" + labels + "/172.18.1.1"
	const announced = "cilium/state/ip/v1/default/10.1.1.10"
	has := func(key, want string, present bool) error {
		if value, ok := etcd.Get(t, key); ok != present || (ok && want != "" && value != want) {
			return fmt.Errorf("%s is %q, present: %v", key, value, ok)
		}
		return nil
	}
	expect := func(present bool) {
		t.Helper()
		testutil.Eventually(t, 10*time.Second, func() error {
			for key, want := range map[string]string{slave: "65793", announced: ""} {
				if err := has(key, want, present); err != nil {
					return err
				}
			}
			return has("cilium/state/identities/v1/id/65793", labels, true)
		})
	}
	expect(true)
	testutil.Eventually(t, 10*time.Second, func() error {
		if errs := writer.Status().Errors; errs["cilium/state/identities/v1/id/65794"] == nil {
			return fmt.Errorf("errors of the writer: %v", errs)
		}
		return has("cilium/state/identities/v1/id/65794", taken, true)
	})
	write(t, dir, "a.yaml", "")
	expect(false)

	write(t, dir, "a.yaml", "{name: web, namespace: shop, ip: 10.1.1.10, identity: 65793, labels: {app: web}}\n")
	expect(true)
	cancel()
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := has(announced, "", true); err != nil {
		t.Errorf("after the stop: %v", err)
	}
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
