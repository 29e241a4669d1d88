// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcdKeys is an etcd as its keys: what every kind of server here has in common.
type etcdKeys struct {
	addr   string // host:port of the client listener, fixed after the first start
	scheme string
	client *clientv3.Client
}

// Endpoint is the URL that clients connect to. It stays the same for as long as the test runs.
func (e *etcdKeys) Endpoint() string { return e.scheme + "://" + e.addr }

// Addr is the host:port of Endpoint.
func (e *etcdKeys) Addr() string { return e.addr }

// Client is a client that may do everything. It is another one after each start, and nil while the server is stopped.
func (e *etcdKeys) Client() *clientv3.Client { return e.client }

// Put stores value under key.
func (e *etcdKeys) Put(t testing.TB, key, value string) {
	t.Helper()
	e.do(t, "put "+key, func(ctx context.Context) error {
		_, err := e.client.Put(ctx, key, value)
		return err
	})
}

// Delete removes key; an absent one is fine.
func (e *etcdKeys) Delete(t testing.TB, key string) {
	t.Helper()
	e.do(t, "delete "+key, func(ctx context.Context) error {
		_, err := e.client.Delete(ctx, key)
		return err
	})
}

// DeletePrefix removes every key that begins with prefix.
func (e *etcdKeys) DeletePrefix(t testing.TB, prefix string) {
	t.Helper()
	e.do(t, "delete prefix "+prefix, func(ctx context.Context) error {
		_, err := e.client.Delete(ctx, prefix, clientv3.WithPrefix())
		return err
	})
}

// Get returns the value of key, and whether the key exists.
func (e *etcdKeys) Get(t testing.TB, key string) (value string, ok bool) {
	t.Helper()
	e.do(t, "get "+key, func(ctx context.Context) error {
		resp, err := e.client.Get(ctx, key)
		if err == nil && len(resp.Kvs) == 1 {
			value, ok = string(resp.Kvs[0].Value), true
		}
		return err
	})
	return value, ok
}

// Compact drops all history before the current revision, so that a watch from
// an earlier one is refused.
func (e *etcdKeys) Compact(t testing.TB) {
	t.Helper()
	e.do(t, "compact", func(ctx context.Context) error {
		resp, err := e.client.Get(ctx, "\x00", clientv3.WithCountOnly())
		if err != nil {
			return err
		}
		_, err = e.client.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
		if errors.Is(err, rpctypes.ErrCompacted) {
			return nil // nothing has happened since the last time
		}
		return err
	})
}

// Load stores the keys of a file of JSON lines {"key","value"} or
// {"key","value_base64"}; other members are ignored.
func (e *etcdKeys) Load(t testing.TB, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(content))
	lines.Buffer(nil, maxEtcdRequest)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var kv struct {
			Key         string
			Value       string
			ValueBase64 string `json:"value_base64"`
		}
		if err := json.Unmarshal(lines.Bytes(), &kv); err != nil {
			t.Fatalf("%s:%d: %v", file, n, err)
		}
		if kv.ValueBase64 != "" {
			raw, err := base64.StdEncoding.DecodeString(kv.ValueBase64)
			if err != nil {
				t.Fatalf("%s:%d: value_base64: %v", file, n, err)
			}
			kv.Value = string(raw)
		}
		e.Put(t, kv.Key, kv.Value)
	}
	if err := lines.Err(); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func (e *etcdKeys) do(t testing.TB, what string, op func(context.Context) error) {
	t.Helper()
	if e.client == nil {
		t.Fatalf("%s: etcd at %s is stopped", what, e.addr)
	}
	ctx, cancel := context.WithTimeout(context.Background(), etcdOpTimeout)
	defer cancel()
	if err := op(ctx); err != nil {
		t.Fatalf("%s: etcd at %s: %v", what, e.addr, err)
	}
}
