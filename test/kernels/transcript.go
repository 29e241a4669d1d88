// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/weftmesh/weft/test/kernels/job"
)

// result is what one package's tests did on one kernel. Passed, failed and skipped count top-level tests.
type result struct {
	pkg                     string
	passed, failed, skipped int
	failures                []string // names of failed tests, those below the top level too
	ended                   bool     // the binary came to its own end
	exit                    int
	took                    time.Duration
}

func (r result) ok() bool { return r.ended && r.exit == 0 && r.failed == 0 }

// testMark is the byte with which a test binary run with -test.v=test2json begins what the testing package itself says
// (cmd/internal/test2json): what a test prints cannot be taken for a result.
const testMark = "\x16"

var (
	testResult  = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(.*\)$`)
	testCurrent = regexp.MustCompile(`^=== (?:RUN|NAME|CONT|PAUSE) +(\S*)$`)
)

// outputKept bounds what is kept of one test's output, in lines.
const outputKept = 500

// transcript makes results of the lines of a machine's result port, and says of each line what a reader should see: of
// tests that pass, one line each; of those that fail, their output; with verbose, everything.
type transcript struct {
	id      string
	verbose bool

	release string
	results []result
	failure string // why the machine could not do its job
	done    bool

	current string              // the test whose output it is, its first part; "" outside of tests
	output  map[string][]string // of tests that have no result yet
}

// add takes the next line and returns the lines to show for it.
func (t *transcript) add(line string) []string {
	if m, ok := job.ParseMark(t.id, line); ok {
		return t.mark(m)
	}
	if t.running() == nil {
		return nil // between the marks there is only their line ends
	}
	text, said, ok := cutLast(line, testMark)
	shown := t.print(text)
	if ok {
		shown = append(shown, t.say(said)...)
	}
	return shown
}

// cutLast cuts at the last separator. A test's last line may lack its end: what the testing package says follows on the
// same line.
func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return strings.ReplaceAll(s[:i], sep, ""), s[i+len(sep):], true
}

// running is the result of the package whose tests run, or nil.
func (t *transcript) running() *result {
	if n := len(t.results); n > 0 && !t.results[n-1].ended {
		return &t.results[n-1]
	}
	return nil
}

func (t *transcript) mark(m job.Mark) []string {
	switch m.Event {
	case job.Booted:
		t.release = m.Text
		return []string{"booted " + m.Text}
	case job.Started:
		t.results = append(t.results, result{pkg: m.Package})
		t.current, t.output = "", make(map[string][]string)
		return []string{m.Package + ": started"}
	case job.Ended:
		r := t.running()
		if r == nil {
			return []string{m.Package + ": ended without a start"}
		}
		r.ended, r.exit, r.took = true, m.Exit, m.Took
		shown := []string(nil)
		if !r.ok() {
			shown = t.unfinished()
		}
		if m.Text != "" {
			shown = append(shown, m.Package+": "+m.Text)
		}
		return append(shown, fmt.Sprintf("%s: ended after %v with exit code %d", m.Package, m.Took.Round(time.Millisecond), m.Exit))
	case job.Failed:
		t.failure = m.Text
		return []string{m.Text}
	case job.Done:
		t.done = true
	}
	return nil
}

// print takes a line of a test's own output.
func (t *transcript) print(line string) []string {
	if line == "" {
		return nil
	}
	if t.verbose {
		return []string{line}
	}
	kept := append(t.output[t.current], line)
	if len(kept) > outputKept {
		kept = slices.Delete(kept, 0, len(kept)-outputKept)
	}
	t.output[t.current] = kept
	return nil
}

// say takes a line of the testing package.
func (t *transcript) say(line string) []string {
	if m := testCurrent.FindStringSubmatch(line); m != nil {
		t.current, _, _ = strings.Cut(m[1], "/")
		if t.verbose {
			return []string{line}
		}
		return nil
	}
	m := testResult.FindStringSubmatch(line)
	if m == nil {
		return t.print(line)
	}
	return t.count(m[1], m[2], line)
}

// count takes the result of a test. Those of its subtests follow it.
func (t *transcript) count(verdict, test, line string) []string {
	r := t.running()
	top := !strings.Contains(test, "/")
	if verdict == "FAIL" {
		r.failures = append(r.failures, test)
	}
	if !top {
		if t.verbose || verdict == "FAIL" {
			return []string{line}
		}
		return nil
	}
	output := t.output[test]
	delete(t.output, test)
	t.current = ""
	switch verdict {
	case "PASS":
		r.passed++
		return []string{line}
	case "SKIP":
		r.skipped++
	case "FAIL":
		r.failed++
	}
	return append(output, line)
}

// unfinished returns the output that no result came for: of tests that a panic, a timeout or the machine's death ended,
// and what the binary itself said.
func (t *transcript) unfinished() []string {
	names := make([]string, 0, len(t.output))
	for name := range t.output {
		names = append(names, name)
	}
	slices.Sort(names)
	var lines []string
	for _, name := range names {
		lines = append(lines, t.output[name]...)
	}
	t.output = nil
	return lines
}

// verdict says why the run is not a success, or nothing.
func (t *transcript) verdict() string {
	switch {
	case t.failure != "":
		return t.failure
	case !t.done && t.running() != nil:
		return "the machine died in the tests of " + t.running().pkg
	case !t.done && t.release == "":
		return "the machine died while it booted"
	case !t.done:
		return "the machine died between tests"
	}
	for _, r := range t.results {
		if !r.ok() {
			return r.pkg + " failed"
		}
	}
	return ""
}
