// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"

	"github.com/weftmesh/weft/identity"
)

// etcdServer is what `weft-lab etcd` runs: one etcd, alone in its cluster.
type etcdServer struct {
	name   string
	dir    string
	listen string
	puts   []string // key=value, written at every start
}

func newEtcdCommand() *cobra.Command {
	var s etcdServer
	cmd := &cobra.Command{
		Use:    "etcd",
		Short:  "Run one cluster's etcd (started by `up`)",
		Args:   cobra.NoArgs,
		Hidden: true,
		RunE:   func(cmd *cobra.Command, _ []string) error { return s.run(cmd.Context()) },
	}
	cmd.Flags().StringVar(&s.name, "name", "", "the cluster's name")
	cmd.Flags().StringVar(&s.dir, "dir", "", "data directory")
	cmd.Flags().StringVar(&s.listen, "listen", "", "client URL")
	cmd.Flags().StringArrayVar(&s.puts, "put", nil, "key=value to write when the server is ready")
	for _, name := range []string{"name", "dir", "listen"} {
		cobra.CheckErr(cmd.MarkFlagRequired(name))
	}
	return cmd
}

// config returns the server's configuration: small files without fsync, since a lab may lose its data with its machine,
// and a token of its own, without which all etcds made alike would have one cluster id. Where there is data already, its
// cluster id stays.
func (s etcdServer) config() (*embed.Config, error) {
	client, err := url.Parse(s.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:2380"}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = s.name, s.dir
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*client}, []url.URL{*client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(s.name)
	cfg.InitialClusterToken = rand.Text()
	cfg.UnsafeNoFsync = true
	cfg.LogLevel = "warn"
	return cfg, nil
}

func (s etcdServer) run(ctx context.Context) error {
	wal.SegmentSizeBytes = 2 << 20 // preallocated twice; the default fills a small /run
	cfg, err := s.config()
	if err != nil {
		return err
	}
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	defer server.Close()
	select {
	case <-server.Server.ReadyNotify():
	case err := <-server.Err():
		return fmt.Errorf("start etcd: %w", err)
	case <-ctx.Done():
		return nil
	}
	for _, put := range s.puts {
		key, value, ok := strings.Cut(put, "=")
		if !ok {
			return fmt.Errorf("--put %q: give key=value", put)
		}
		if _, err := server.Server.Put(ctx, &etcdserverpb.PutRequest{Key: []byte(key), Value: []byte(value)}); err != nil {
			return fmt.Errorf("put %s: %w", key, err)
		}
	}
	select {
	case err := <-server.Err():
		return fmt.Errorf("serve etcd: %w", err)
	case <-ctx.Done():
		return nil
	}
}

// clusterConfigKey is where a cluster tells others its id.
func clusterConfigKey(cluster string) string { return identity.ClusterConfigPrefix + "/" + cluster }

// etcdDaemon describes the etcd of a cluster. It writes the cluster's configuration at every start; nobody writes sync
// canaries, so it promises none.
func (l *lab) etcdDaemon(c clusterPlan) daemon {
	data := l.etcdFile(c.Name, "data")
	return daemon{
		name: "the etcd of " + c.Name,
		path: l.self,
		args: []string{
			"etcd", "--name", c.Name, "--dir", data, "--listen", c.Etcd.endpoint(),
			"--put", clusterConfigKey(c.Name) + "=" + fmt.Sprintf(`{"id":%d,"capabilities":{"maxConnectedClusters":255}}`, c.ID),
		},
		marker:  data,
		netNS:   c.Etcd.NetNS,
		logFile: l.etcdFile(c.Name, "etcd.log"),
		pidFile: l.etcdFile(c.Name, "etcd.pid"),
	}
}

// startEtcd starts a cluster's etcd where it is not running, and reports whether it did.
func (l *lab) startEtcd(c clusterPlan) (started bool, err error) {
	d := l.etcdDaemon(c)
	if _, ok := d.running(); ok {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(d.logFile), 0o755); err != nil {
		return false, err
	}
	_, err = d.start()
	return err == nil, err
}

// waitEtcd waits until a cluster's etcd answers with the cluster's configuration.
func (l *lab) waitEtcd(ctx context.Context, c clusterPlan) error {
	d := l.etcdDaemon(c)
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := poll(ctx, 20*time.Millisecond, func() error {
		if _, ok := d.running(); !ok {
			cancel()
			return errors.New("its process has ended")
		}
		return askEtcd(ctx, c.Etcd, clusterConfigKey(c.Name))
	}); err != nil {
		return fmt.Errorf("%s is not ready: %w; %s", d.name, err, d.tail())
	}
	return nil
}

// askEtcd asks an etcd for one key, by its HTTP gateway and from inside its own network namespace. It returns nil when
// the key is there.
func askEtcd(ctx context.Context, e etcdPlan, key string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	body, err := json.Marshal(map[string]string{"key": base64.StdEncoding.EncodeToString([]byte(key))})
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, e.endpoint()+"/v3/kv/range", bytes.NewReader(body))
	if err != nil {
		return err
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return dialIn(ctx, e.NetNS, network, address)
		},
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return err
	}
	var found struct {
		Count string `json:"count"`
	}
	if err := json.Unmarshal(answer, &found); err != nil || response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s: %.200s", e.endpoint(), response.Status, answer)
	}
	if found.Count == "" || found.Count == "0" {
		return fmt.Errorf("%s has no key %s yet", e.endpoint(), key)
	}
	return nil
}
