// SPDX-License-Identifier: Apache-2.0

// Package golden reads what was recorded from real clusters, in test/testdata: keys and values of their etcds, bytes of
// their kernel maps, and the verdicts of their own code on made-up input. It stands apart from testutil so that the tests
// of small packages need not link an etcd.
package golden

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Path finds a recording from the directory of whichever package is being tested.
func Path(t testing.TB, name string) string {
	t.Helper()
	for dir := "."; len(dir) < 32; dir = filepath.Join("..", dir) {
		path := filepath.Join(dir, "test", "testdata", name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	t.Fatalf("no test/testdata/%s above the working directory", name)
	return ""
}

// Lines decodes a recording of JSON lines, which must not be empty.
func Lines[T any](t testing.TB, name string) []T {
	t.Helper()
	f, err := os.Open(Path(t, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var all []T
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		var v T
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, v)
	}
	if err := s.Err(); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if len(all) == 0 {
		t.Fatalf("%s is empty", name)
	}
	return all
}

// Values returns what the recorded clusters keep in their etcds under keys that contain part, by key; their canaries are
// left out.
func Values(t testing.TB, part string) map[string]string {
	t.Helper()
	values := make(map[string]string)
	for _, file := range []string{
		"kvstore-state-east.jsonl", "kvstore-state-west.jsonl", "kvstore-cache-mock.jsonl", "kvstore-cache-mock-ipv6-wireguard.jsonl",
	} {
		for _, kv := range Lines[struct{ Key, Value string }](t, file) {
			if strings.Contains(kv.Key, part) && !strings.Contains(kv.Key, "/synced/") {
				values[kv.Key] = kv.Value
			}
		}
	}
	if len(values) == 0 {
		t.Fatalf("nothing is recorded under %s", part)
	}
	return values
}

// Verdict is what Cilium's own code made of one object of a remote cluster.
type Verdict struct {
	Kind      string
	Key       string `json:"key_suffix"`
	Name      string
	Value     string
	Cluster   string `json:"remote_cluster"`
	ClusterID uint32 `json:"remote_cluster_id"`
	LocalMax  int    `json:"local_max_connected_clusters"`
	Accepted  bool
	Error     string `json:"cilium_error"`
}

// Verdicts returns those on one kind of object.
func Verdicts(t testing.TB, kind string) []Verdict {
	t.Helper()
	verdicts := slices.DeleteFunc(Lines[Verdict](t, "validation.jsonl"), func(v Verdict) bool { return v.Kind != kind })
	if len(verdicts) == 0 {
		t.Fatalf("no verdict on a %s is recorded", kind)
	}
	return verdicts
}
