// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestShape(t *testing.T) {
	for line, want := range map[string]string{
		"Agent:         v0.1.0, up 37s":                             "Agent: v0.1.0, up TIME",
		"10.2.1.0/24   identity=9 via 172.18.2.1:2379 fd00:18:1::1": "10.2.1.0/24 identity=9 via 172.18.2.1:N fd00:18:1::1",
		"leases: 50fba1fc7dbfd224, revision=4, 0.0% of 30/512000":   "leases: HEX, revision=N, N% of N/N",
		"east-1 (local) at 05:05:03.015, 2026-11-21 05:04:35 UTC":   "east-1 (local) at TIME, TIME",
		`{"ID":131329,"Key":0}`:                                     `{"ID":N,"Key":N}`,
		"✓ east: ready (0.3 s) after 1m30.5s, 5.859375e-05":         "✓ east: ready after TIME, N",
	} {
		if got := Shape(line); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}

func TestSameShape(t *testing.T) {
	const printed = "NAME   AGE\nweb    3s\ndb     17s\n"
	for shown, same := range map[string]bool{
		"NAME  AGE\nweb  1s\ndb   2m5s":         true,
		"NAME  AGE\nweb  1s\ndb   2m5s\n":       true,
		"NAME  AGE\n…":                          true,
		"…\ndb   9s":                            true,
		"NAME  AGE\nweb  1s":                    false,
		"NAME  AGE\nweb  1s\ndb  2s\ncache  2s": false,
		"NAME  AGE\ndb  1s":                     false,
		"NAME …\nw…b 1s\n…":                     true,
		"NAME  AGE\nweb  …\nd… 3m":              true,
		"AGE\n…":                                false,
		"…\nNAME …\n…\nd…":                      true,
	} {
		if err := SameShape(strings.Split(shown, "\n"), printed); (err == nil) != same {
			t.Errorf("%q: %v", shown, err)
		}
	}
}

func TestBlocks(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	MustWriteFile(t, page, []byte("# Page\n\n   ```console\n   $ a \\\n     b   # remark\n   one\n   $ c\n   ```\n\n```sh\n# on x\nd  # remark\n\ne\n```\n"))
	blocks := Blocks(t, page)
	var got [][]Command
	for _, b := range blocks {
		got = append(got, b.Commands())
	}
	want := [][]Command{{{Line: 4, Text: "a \\\n  b   # remark", Output: []string{"one"}}, {Line: 7, Text: "c"}}, {{Line: 12, Text: "d  # remark"}, {Line: 14, Text: "e"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if bare := got[1][0].Bare(); bare != "d" {
		t.Errorf("bare: %q", bare)
	}
}
