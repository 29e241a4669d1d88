// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// replace gives a file other content, all of it at once.
func replace(t *testing.T, path, content string) {
	t.Helper()
	write(t, path+".new", content)
	must(t, os.Rename(path+".new", path))
}

// A file of limits that is written in place is, for a moment, empty, and then the beginning of what is meant. Neither is put
// into force: it could allow what neither the limits before nor those after do.
func TestLimitsWrittenInPlace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "limits.yaml")
	const before, after = "clusters: {west: {pod-prefixes: [10.2.0.0/16]}}\n", "own-prefixes: [10.9.0.0/16]\nclusters:\n  west:\n    pod-prefixes: [10.3.0.0/16]\n"
	now := time.Now()
	put := func(content string, written time.Time) {
		write(t, path, content)
		must(t, os.Chtimes(path, written, written))
	}
	put(before, now.Add(-time.Hour))
	cfg := testConfig(t)
	cfg.LimitsFile = path
	p, err := newPolicy(&cfg, defaultTiming)
	must(t, err)

	inForce := func(what, prefix string, wantError string) {
		t.Helper()
		if got := p.now.Load().of("west").PodPrefixes; len(got) != 1 || got[0] != netip.MustParsePrefix(prefix) {
			t.Errorf("%s: pod prefixes %v, want %s", what, got, prefix)
		}
		if got := p.report().Error; (got == "") != (wantError == "") || !strings.Contains(got, wantError) {
			t.Errorf("%s: error %q, want %q", what, got, wantError)
		}
	}
	reload := func(what string, at time.Time, wantChanged, wantAgain bool) {
		t.Helper()
		if changed, again := p.reload(at); changed != wantChanged || again != wantAgain {
			t.Errorf("%s: changed %v, again %v, want %v, %v", what, changed, again, wantChanged, wantAgain)
		}
	}
	quiet := defaultTiming.quiet
	for _, part := range []string{"", after[:29], after[:len(after)-len("    pod-prefixes: [10.3.0.0/16]\n")]} {
		put(part, now)
		reload("being written", now, false, true)
		now = now.Add(quiet - 1)
		reload("still being written", now, false, true)
		inForce("being written", "10.2.0.0/16", "")
	}
	put(after, now)
	reload("written", now.Add(quiet-1), false, true)
	inForce("just written", "10.2.0.0/16", "")
	reload("at rest", now.Add(quiet), true, false)
	inForce("at rest", "10.3.0.0/16", "")
	reload("unchanged", now.Add(quiet), false, false)

	put(before, now.Add(-time.Hour))
	reload("put there, of an hour ago", now, true, false)
	inForce("put there, of an hour ago", "10.2.0.0/16", "")
	put(after, now.Add(time.Hour))
	reload("of a clock that is ahead", now, false, true)
	reload("of a clock that is ahead, at rest", now.Add(quiet), true, false)
	inForce("of a clock that is ahead", "10.3.0.0/16", "")

	now = now.Add(2 * time.Hour)
	put("", now.Add(-quiet))
	reload("empty", now, false, false)
	inForce("empty", "10.3.0.0/16", "the file is empty")
	must(t, os.Remove(path))
	reload("gone", now, false, true)
	reload("gone for good", now.Add(quiet), false, false)
	inForce("gone for good", "10.3.0.0/16", "no such file")
	put(after, now)
	reload("back", now.Add(quiet), true, false)
	inForce("back", "10.3.0.0/16", "")
}

// A file of limits that never comes to rest is an error at the start.
func TestLimitsNeverAtRest(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "limits.yaml")
	write(t, path, "{}\n")
	p, changes := &policy{path: path, quiet: time.Hour}, 0
	err := p.awaitRest(50*time.Millisecond, func(time.Duration) {
		changes++
		replace(t, path, fmt.Sprintf("{}\n# %d\n", changes))
	})
	if !errors.Is(err, ErrLimits) || !strings.Contains(err.Error(), path+": is being written") || changes == 0 {
		t.Errorf("after %d changes: %v", changes, err)
	}
}
