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
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/wal"

	"github.com/weftmesh/weft/identity"
)

// etcdServer is what `weft-lab etcd` runs: one etcd, alone in its cluster.
type etcdServer struct {
	name   string
	dir    string
	listen string
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
	select {
	case err := <-server.Err():
		return fmt.Errorf("serve etcd: %w", err)
	case <-ctx.Done():
		return nil
	}
}

// clusterConfigKey is where a cluster tells others its id.
func clusterConfigKey(cluster string) string { return identity.ClusterConfigPrefix + "/" + cluster }

// etcdDaemon describes the etcd of a cluster.
func (l *lab) etcdDaemon(c clusterPlan) daemon {
	data := l.etcdFile(c.Name, "data")
	return daemon{
		name:    "the etcd of " + c.Name,
		path:    l.self,
		args:    []string{"etcd", "--name", c.Name, "--dir", data, "--listen", c.Etcd.endpoint()},
		marker:  data,
		netNS:   c.Etcd.NetNS,
		logFile: l.etcdFile(c.Name, "etcd.log"),
		pidFile: l.etcdFile(c.Name, "etcd.pid"),
	}
}

// waitEtcd waits until a cluster's etcd answers.
func (l *lab) waitEtcd(ctx context.Context, c clusterPlan) error {
	return waitDaemon(ctx, l.etcdDaemon(c), "is not ready", time.Minute, func(ctx context.Context) error {
		if err := askEtcd(ctx, c.Etcd, clusterConfigKey(c.Name)); !errors.Is(err, errNoKey) {
			return err
		}
		return nil
	})
}

// errNoKey indicates that an etcd answers and does not have a key.
var errNoKey = errors.New("it has no key")

// askEtcd asks an etcd for one key, by its HTTP gateway and from inside its own network namespace. It returns nil when
// the key is there, and an error that wraps errNoKey when it is not.
func askEtcd(ctx context.Context, e etcdPlan, key string) error {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
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
		return fmt.Errorf("%s: %w %s", e.endpoint(), errNoKey, key)
	}
	return nil
}
