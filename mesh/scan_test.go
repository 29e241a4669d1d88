// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"crypto/sha256"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/kvstore"
)

const someConfig = "endpoints:\n- http://127.0.0.1:1\n"

// dirState is a scan in short: file name → content. The content "!" stands for a file that cannot be read.
type dirState map[string]string

func (s dirState) scan() scan {
	if s == nil {
		return scan{missing: true}
	}
	result := scan{
		configs: make(map[string]file), others: make(map[string][sha256.Size]byte), unreadable: make(map[string]error),
	}
	for name, content := range s {
		switch hash := sha256.Sum256([]byte(content)); {
		case content == "!":
			result.unreadable[name] = errors.New("permission denied")
		case strings.HasPrefix(content, "endpoints:"):
			result.configs[name] = file{path: name, content: []byte(content), hash: hash}
		default:
			result.others[name] = hash
		}
	}
	return result
}

// What is wanted follows the files, but for moments in which a file or the directory is only being replaced.
//
// mechanism: A3 A4 A6 A7
func TestConfigsOverTime(t *testing.T) {
	const settle = 10 * time.Second
	type step struct {
		at    time.Duration
		dir   dirState
		want  string // clusters, "?" behind those in doubt, in parentheses those that are only that
		again bool
	}
	for name, steps := range map[string][]step{
		"appears, changes, disappears": {
			{0, dirState{}, "", false},
			{1, dirState{"west": "endpoints: 1"}, "west", false},
			{2, dirState{"west": "endpoints: 2"}, "west", false},
			{3, dirState{}, "", false},
		},
		"the file is rewritten in steps": {
			{0, dirState{"west": "endpoints: 1"}, "west", false},
			{1 * time.Second, dirState{"west": ""}, "west?", true},
			{8 * time.Second, dirState{"west": "endp"}, "west?", true},
			{17 * time.Second, dirState{"west": "endp"}, "west?", true},
			{18 * time.Second, dirState{"west": "endpoints: 2"}, "west", false},
		},
		"the file is no config any more": {
			{0, dirState{"west": "endpoints: 1"}, "west", false},
			{1 * time.Second, dirState{"west": "text"}, "west?", true},
			{11 * time.Second, dirState{"west": "text"}, "", false},
			{12 * time.Second, dirState{"west": "text"}, "", false},
		},
		"the file is not readable for long": {
			{0, dirState{"west": "endpoints: 1"}, "west", false},
			{time.Second, dirState{"west": "!"}, "west?", false},
			{time.Hour, dirState{"west": "!"}, "west?", false},
			{2 * time.Hour, dirState{}, "", false},
		},
		"a file is there first and a config later": {
			{0, dirState{"west": ""}, "(west)", true},
			{time.Second, dirState{"west": "endpoints: 1"}, "west", false},
		},
		"the directory is replaced": {
			{0, dirState{"west": "endpoints: 1"}, "west", false},
			{1 * time.Second, nil, "west?", true},
			{5 * time.Second, dirState{"west": "endpoints: 1"}, "west", false},
			{20 * time.Second, nil, "west?", true},
			{29 * time.Second, nil, "west?", true},
			{30 * time.Second, nil, "", false},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, start := newConfigs(settle), time.Now()
			for i, s := range steps {
				again := c.update(s.dir.scan(), start.Add(s.at))
				if got := c.text(); got != s.want || again != s.again {
					t.Errorf("step %d: %q, again %v; want %q, %v", i, got, again, s.want, s.again)
				}
			}
		})
	}
}

func (c *configs) text() string {
	var all []string
	for name := range c.files {
		if c.doubts[name] != nil {
			name += "?"
		}
		all = append(all, name)
	}
	for name := range c.doubts {
		if _, ok := c.files[name]; !ok {
			all = append(all, "("+name+")")
		}
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// A directory that cannot be read says nothing; one that is missing from the start has not been seen.
func TestConfigsUnreadableDirectory(t *testing.T) {
	c := newConfigs(0)
	c.update(dirState(nil).scan(), time.Now())
	if c.seen {
		t.Error("a missing directory counts as seen")
	}
	c.update(dirState{"west": "endpoints: 1"}.scan(), time.Now())
	c.update(scan{err: errors.New("input/output error")}, time.Now())
	if got := c.text(); !c.seen || got != "west?" {
		t.Errorf("configs %q, seen %v; want the one known before", got, c.seen)
	}
}

// What counts as a config, and which names are those of clusters, is as in Cilium.
//
// mechanism: A4 A8
func TestConfigFileVectors(t *testing.T) {
	type vector struct {
		File, Content    string
		IsConfig         bool   `json:"is_config"`
		ClusterNameValid bool   `json:"cluster_name_valid"`
		ParseError       string `json:"parse_error"`
	}
	for _, v := range golden.Lines[vector](t, "config-files.jsonl") {
		dir := t.TempDir()
		write(t, filepath.Join(dir, v.File), v.Content)
		s := scanDir(dir, "here", func(string) {})
		f, config := s.configs[v.File]
		if want := v.IsConfig && v.ClusterNameValid; config != want {
			t.Errorf("%s: config %v, want %v", v.File, config, want)
		}
		if invalid := s.invalid[v.File] != nil; invalid != (v.IsConfig && !v.ClusterNameValid) {
			t.Errorf("%s: invalid name %v: %v", v.File, invalid, s.invalid[v.File])
		}
		if config && v.ParseError != "" {
			if _, err := kvstore.ParseConfig(f.content); err == nil {
				t.Errorf("%s: parsed, want an error like %q", v.File, v.ParseError)
			}
		}
	}
}

// Only files can be configs, wherever a link leads to; our own cluster's name is nobody's.
func TestScanKinds(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "west"), someConfig)
	write(t, filepath.Join(dir, "here"), someConfig)
	write(t, filepath.Join(dir, "Bad_Name"), someConfig)
	write(t, filepath.Join(dir, "ca.crt"), "-----BEGIN CERTIFICATE-----\n")
	write(t, filepath.Join(dir, "huge"), someConfig+strings.Repeat("#", maxConfigFile))
	for _, path := range []string{"directory", "..data"} {
		if err := os.Mkdir(filepath.Join(dir, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(dir, "..data", "south"), someConfig)
	for link, target := range map[string]string{"south": "..data/south", "dangling": "nowhere", "loop": "loop", "linked": "directory"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	var followed []string
	s := scanDir(dir, "here", func(path string) { followed = append(followed, filepath.Base(path)) })
	if diff := cmp.Diff([]string{"south", "west"}, slices.Sorted(maps.Keys(s.configs))); diff != "" {
		t.Errorf("configs (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"huge", "loop"}, slices.Sorted(maps.Keys(s.unreadable))); diff != "" {
		t.Errorf("unreadable (-want +got):\n%s", diff)
	}
	if len(s.others) != 0 || len(s.invalid) != 1 || s.invalid["Bad_Name"] == nil {
		t.Errorf("others %v, invalid %v", s.others, s.invalid)
	}
	if diff := cmp.Diff([]string{"dangling", "linked", "loop", "south"}, followed); diff != "" {
		t.Errorf("followed (-want +got):\n%s", diff)
	}
}

// The walk names every directory entry on which a path's meaning depends.
func TestWalk(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"mesh", "secret/..2026"} {
		if err := os.MkdirAll(filepath.Join(dir, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(dir, "secret/..2026/west"), someConfig)
	for link, target := range map[string]string{
		"secret/..data": "..2026", "secret/west": "..data/west", "mesh/west": filepath.Join(dir, "secret/west"), "mesh/gone": "../x/y",
	} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string][]string{
		"mesh":      {" mesh"},
		"mesh/west": {"mesh west", "secret west", "secret ..data", "secret/..2026 west"},
		"mesh/gone": {"mesh gone", " x"},
		"no/mesh":   {" no"},
	} {
		var got []string
		walk(filepath.Join(dir, path), func(directory, name string) {
			got = append(got, strings.TrimPrefix(strings.TrimPrefix(directory, dir), "/")+" "+name)
		})
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("walk %s (-want +got):\n%s", path, diff)
		}
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}
