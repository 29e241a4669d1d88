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
