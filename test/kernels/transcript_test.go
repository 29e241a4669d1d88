// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/test/kernels/job"
)

const runID = "weft-ABC"

// say writes what a machine says: lines of tests as they are with "^" for what the testing package itself says, and
// marks as a machine writes them, each on a line of its own.
func say(marksAndLines ...any) []string {
	var lines []string
	for _, what := range marksAndLines {
		switch what := what.(type) {
		case job.Mark:
			lines = append(lines, "", what.Line(runID))
		case string:
			for line := range strings.Lines(what) {
				lines = append(lines, strings.ReplaceAll(strings.TrimSuffix(line, "\n"), "^", testMark))
			}
		}
	}
	return lines
}

var (
	booted  = job.Mark{Event: job.Booted, Text: "6.1.0-56-cloud-amd64"}
	started = job.Mark{Event: job.Started, Package: "bpf"}
	ended   = job.Mark{Event: job.Ended, Package: "bpf", Took: 1500 * time.Millisecond}
	failed  = job.Mark{Event: job.Ended, Package: "bpf", Took: time.Second, Exit: 1}
	done    = job.Mark{Event: job.Done}
)

const passes = `^=== RUN   TestA
    a_test.go:1: of no interest
^--- PASS: TestA (0.10s)
^=== RUN   TestB
^=== RUN   TestB/x_(y)
prints without an end^    --- PASS: TestB/x_(y) (0.00s)
^--- PASS: TestB (1.20s)
^PASS
`

const fails = `^=== RUN   TestBad
^=== RUN   TestBad/one
    a_test.go:2: got 1, want 2
--- PASS: TestBad (0.00s)
^=== NAME  TestBad
^--- FAIL: TestBad (0.20s)
^    --- FAIL: TestBad/one (0.00s)
^    --- PASS: TestBad/two (0.00s)
^=== RUN   TestSkipped
    a_test.go:3: not here
^--- SKIP: TestSkipped (0.00s)
FAIL
`

const panics = `^=== RUN   TestGood
^--- PASS: TestGood (0.00s)
^=== RUN   TestPanic
    a_test.go:9: before it
panic: boom

goroutine 7 [running]:
`

func TestTranscript(t *testing.T) {
	for name, tc := range map[string]struct {
		said    []string
		verbose bool
		want    []result
		shown   string
		verdict string
	}{
		"pass": {
			said:  say(booted, started, passes, ended, done),
			want:  []result{{pkg: "bpf", passed: 2, ended: true, took: 1500 * time.Millisecond}},
			shown: "booted 6.1.0-56-cloud-amd64|bpf: started|--- PASS: TestA (0.10s)|--- PASS: TestB (1.20s)|bpf: ended after 1.5s with exit code 0",
		},
		"pass, verbose": {
			said:    say(booted, started, passes, ended, done),
			verbose: true,
			want:    []result{{pkg: "bpf", passed: 2, ended: true, took: 1500 * time.Millisecond}},
			shown: "booted 6.1.0-56-cloud-amd64|bpf: started|=== RUN   TestA|    a_test.go:1: of no interest|--- PASS: TestA (0.10s)|" +
				"=== RUN   TestB|=== RUN   TestB/x_(y)|prints without an end|    --- PASS: TestB/x_(y) (0.00s)|--- PASS: TestB (1.20s)|PASS|" +
				"bpf: ended after 1.5s with exit code 0",
		},
		"fail": {
			said: say(booted, started, fails, failed, done),
			want: []result{{pkg: "bpf", failed: 1, skipped: 1, failures: []string{"TestBad", "TestBad/one"}, ended: true, exit: 1, took: time.Second}},
			shown: "booted 6.1.0-56-cloud-amd64|bpf: started|    a_test.go:2: got 1, want 2|--- PASS: TestBad (0.00s)|--- FAIL: TestBad (0.20s)|" +
				"    --- FAIL: TestBad/one (0.00s)|    a_test.go:3: not here|--- SKIP: TestSkipped (0.00s)|FAIL|bpf: ended after 1s with exit code 1",
			verdict: "bpf failed",
		},
		"panic": {
			said: say(booted, started, panics, failed, done),
			want: []result{{pkg: "bpf", passed: 1, ended: true, exit: 1, took: time.Second}},
			shown: "booted 6.1.0-56-cloud-amd64|bpf: started|--- PASS: TestGood (0.00s)|    a_test.go:9: before it|panic: boom|" +
				"goroutine 7 [running]:|bpf: ended after 1s with exit code 1",
			verdict: "bpf failed",
		},
		"exit code without a failed test": {
			said:    say(booted, started, "^PASS\n", failed, done),
			want:    []result{{pkg: "bpf", ended: true, exit: 1, took: time.Second}},
			shown:   "booted 6.1.0-56-cloud-amd64|bpf: started|PASS|bpf: ended after 1s with exit code 1",
			verdict: "bpf failed",
		},
		"killed": {
			said:    say(booted, started, job.Mark{Event: job.Ended, Package: "bpf", Exit: -1, Text: "signal: killed"}, done),
			want:    []result{{pkg: "bpf", ended: true, exit: -1}},
			shown:   "booted 6.1.0-56-cloud-amd64|bpf: started|bpf: signal: killed|bpf: ended after 0s with exit code -1",
			verdict: "bpf failed",
		},
		"dies in a test": {
			said:    say(booted, started, "^=== RUN   TestOops\nlast words\n"),
			want:    []result{{pkg: "bpf"}},
			shown:   "booted 6.1.0-56-cloud-amd64|bpf: started",
			verdict: "the machine died in the tests of bpf",
		},
		"dies between tests": {
			said:    say(booted, started, ended),
			want:    []result{{pkg: "bpf", ended: true, took: 1500 * time.Millisecond}},
			shown:   "booted 6.1.0-56-cloud-amd64|bpf: started|bpf: ended after 1.5s with exit code 0",
			verdict: "the machine died between tests",
		},
		"dies early": {said: []string{"garbage"}, verdict: "the machine died while it booted"},
		"cannot begin": {
			said:    say(job.Mark{Event: job.Failed, Text: "load /modules/veth.ko: exec format error"}),
			shown:   "load /modules/veth.ko: exec format error",
			verdict: "load /modules/veth.ko: exec format error",
		},
		"end without a start": {
			said:    say(booted, ended),
			shown:   "booted 6.1.0-56-cloud-amd64|bpf: ended without a start",
			verdict: "the machine died between tests",
		},
		"marks of another machine are output": {
			said:    say(booted, started, strings.ReplaceAll(ended.Line("weft-XYZ"), "\n", "")+"\n"),
			want:    []result{{pkg: "bpf"}},
			shown:   "booted 6.1.0-56-cloud-amd64|bpf: started",
			verdict: "the machine died in the tests of bpf",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr := &transcript{id: runID, verbose: tc.verbose}
			var shown []string
			for _, line := range tc.said {
				shown = append(shown, tr.add(line)...)
			}
			if diff := cmp.Diff(tc.want, tr.results, cmp.AllowUnexported(result{})); diff != "" {
				t.Errorf("results (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(strings.Split(tc.shown, "|"), strings.Split(strings.Join(shown, "|"), "|")); diff != "" {
				t.Errorf("shown (-want +got):\n%s", diff)
			}
			if got := tr.verdict(); got != tc.verdict {
				t.Errorf("verdict %q, want %q", got, tc.verdict)
			}
		})
	}
}

// TestTranscriptForgets bounds what a test that prints without end costs, and keeps the end of it.
func TestTranscriptForgets(t *testing.T) {
	tr := &transcript{id: runID}
	for _, line := range say(started, "^=== RUN   TestLoud\n") {
		tr.add(line)
	}
	for range 3 * outputKept {
		tr.add("line")
	}
	tr.add("last")
	kept := tr.unfinished()
	if len(kept) != outputKept || kept[outputKept-1] != "last" {
		t.Errorf("%d lines kept, the last %q, want %d and the last", len(kept), kept[len(kept)-1], outputKept)
	}
}
