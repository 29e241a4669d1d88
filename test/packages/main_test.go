// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A machine that died early, or that checked nothing, is no success.
func TestReport(t *testing.T) {
	for _, tt := range []struct {
		lines string
		want  bool
	}{
		{"ok installs\nsome output\nok starts\ndone", true},
		{"ok installs\nok starts", false},
		{"ok installs\nnot ok starts\ndone", false},
		{"done", false},
		{"", false},
	} {
		r := new(report)
		for line := range strings.SplitSeq(tt.lines, "\n") {
			r.add(line)
		}
		if r.ok() != tt.want {
			t.Errorf("%q: ok %t, want %t", tt.lines, r.ok(), tt.want)
		}
	}
}

func TestPayload(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "payload")
	if err := writePayload(file, map[string][]byte{"guest": guest, "weft.deb": []byte("package")}); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || info.Size()%512 != 0 {
		t.Errorf("size %d, %v: want whole sectors", info.Size(), err)
	}
	if out, err := exec.Command("tar", "-C", dir, "-xf", file).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	if content, err := os.ReadFile(filepath.Join(dir, "weft.deb")); err != nil || string(content) != "package" {
		t.Errorf("package %q, %v", content, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "guest")); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("script: %v, %v", info, err)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"v0.1.0", "v0.2.0"}, {"--from"}} {
		var stderr bytes.Buffer
		if code := run(t.Context(), args, &stderr, &stderr); code != 2 {
			t.Errorf("%q: exit code %d, want 2: %s", args, code, &stderr)
		}
	}
}
