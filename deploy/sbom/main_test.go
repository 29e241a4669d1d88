// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// The bill of this very test has the standard library, and is the same each time.
func TestOfThisBinary(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var first, second bytes.Buffer
	if err := run([]string{self}, &first); err != nil {
		t.Fatal(err)
	}
	if err := run([]string{self}, &second); err != nil || first.String() != second.String() {
		t.Errorf("two bills of one binary differ, %v", err)
	}
	var d document
	if err := json.Unmarshal(first.Bytes(), &d); err != nil {
		t.Fatal(err)
	}
	if d.Format != "CycloneDX" || len(d.Metadata.Component.Hashes) != 1 || d.Components[0].Name != "std" {
		t.Errorf("%s", &first)
	}
}

// Every module that is linked is a component that the application depends on, under the version that is linked.
func TestList(t *testing.T) {
	d := list(&debug.BuildInfo{
		GoVersion: "go1.26.1", Main: debug.Module{Path: "example.org/app", Version: "v1.0.0+dirty"},
		Deps: []*debug.Module{
			{Path: "example.org/a", Version: "v1.2.3", Sum: "h1:abc="},
			{Path: "example.org/b", Version: "v1.0.0", Replace: &debug.Module{Path: "example.org/fork", Version: "v2.0.0"}},
		},
		Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}, {Key: "-ldflags", Value: "-X main.secret=x"}},
	}, "00ff")
	want := []string{"pkg:golang/std@1.26.1", "pkg:golang/example.org/a@v1.2.3", "pkg:golang/example.org/fork@v2.0.0"}
	if got := d.Dependencies[0].DependsOn; !slices.Equal(got, want) {
		t.Errorf("depends on %v, want %v", got, want)
	}
	for i, c := range d.Components {
		if c.Ref != want[i] || c.PURL != want[i] {
			t.Errorf("component %+v", c)
		}
	}
	text, err := json.Marshal(d)
	if err != nil || strings.Contains(string(text), "secret") || !strings.Contains(string(text), "go:vcs.revision") {
		t.Errorf("%s, %v", text, err)
	}
}

func TestRefusals(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no binary"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{nil, {"a", "b"}, {"/nonexistent"}, {text}} {
		if err := run(args, new(bytes.Buffer)); err == nil {
			t.Errorf("%q: no error", args)
		}
	}
}
