// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// goal is a figure and the bound that it should keep.
type goal struct {
	what, unit string
	// atLeast or atMost is the bound; both 0: there is none.
	atLeast, atMost float64
}

func (g goal) target() string {
	switch {
	case g.atLeast > 0:
		return fmt.Sprintf("≥ %s", figure(g.atLeast, g.unit))
	case g.atMost > 0:
		return fmt.Sprintf("≤ %s", figure(g.atMost, g.unit))
	}
	return ""
}

func (g goal) verdict(value float64) string {
	switch {
	case g.atLeast == 0 && g.atMost == 0:
		return ""
	case g.atLeast > 0 && value < g.atLeast, g.atMost > 0 && value > g.atMost:
		return "missed"
	}
	return "met"
}

// figure prints three significant digits.
func figure(value float64, unit string) string {
	text := fmt.Sprintf("%.3g", value)
	if value >= 100 || value <= -100 {
		text = fmt.Sprintf("%.0f", value)
	}
	return strings.TrimSpace(text + " " + unit)
}

// summary gathers what all benchmarks of a run have measured, in order of first appearance.
var summary struct {
	sync.Mutex
	order   []string
	figures map[string]*measurement
}

// measurement is what a run has measured of one thing.
type measurement struct {
	goal      goal
	benchmark string // as in make bench BENCH=
	values    []float64
}

// measured takes a figure into the summary, and reports it as the benchmark's own.
func measured(b *testing.B, metric string, value float64, g goal) {
	b.Helper()
	b.ReportMetric(value, metric)
	summary.Lock()
	defer summary.Unlock()
	if summary.figures == nil {
		summary.figures = make(map[string]*measurement)
	}
	m := summary.figures[g.what]
	if m == nil {
		name, _, _ := strings.Cut(strings.TrimPrefix(b.Name(), "Benchmark"), "/")
		m = &measurement{benchmark: name}
		summary.figures[g.what] = m
		summary.order = append(summary.order, g.what)
	}
	m.goal, m.values = g, append(m.values, value)
}

// row is the measurement's in a table; on is the machine.
func (m *measurement) row(on string) string {
	values := slices.Sorted(slices.Values(m.values))
	median := (values[(len(values)-1)/2] + values[len(values)/2]) / 2
	spread := fmt.Sprintf("%s – %s", figure(values[0], ""), figure(values[len(values)-1], ""))
	if len(values) == 1 {
		spread = ""
	}
	return fmt.Sprintf("| %s | %s | %s | %d | %s | %s | `make bench BENCH=%s` | %s |", m.goal.what, figure(median, m.goal.unit), spread,
		len(values), m.goal.target(), m.goal.verdict(median), m.benchmark, on)
}

// tableHead begins every table of rows.
var tableHead = []string{
	"| what | median | lowest – highest | runs | target | | command | machine |",
	"|---|---|---|---|---|---|---|---|",
}

// tableEnv names the file whose table gets the rows of the run.
const tableEnv = "WEFT_BENCH_TABLE"

// summarised is a test binary that ends with the table of what it has measured.
type summarised struct{ m *testing.M }

func (s summarised) Run() int {
	on := machine()
	code := s.m.Run()
	if len(summary.order) == 0 {
		return code
	}
	rows := make([]string, 0, len(summary.order))
	for _, what := range summary.order {
		rows = append(rows, summary.figures[what].row(on))
	}
	fmt.Printf("\n%s\n%s\n", strings.Join(tableHead, "\n"), strings.Join(rows, "\n"))
	if path := os.Getenv(tableEnv); path != "" && code == 0 {
		if err := record(path, rows); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

// The generated table of a file stands between these lines.
const (
	tableBegin = "<!-- what make bench has measured, written by it: begin -->"
	tableEnd   = "<!-- end -->"
)

// record puts rows into the generated table of a file: each in the place of the one of the same name, or else at the end. All
// other rows, and the rest of the file, stay as they are.
func record(path string, rows []string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, begun := strings.Cut(string(content), tableBegin+"\n")
	old, after, ended := strings.Cut(rest, tableEnd)
	if !begun || !ended {
		return fmt.Errorf("%s: there is no %q, followed by %q, between which the table would stand", path, tableBegin, tableEnd)
	}
	var table []string
	for line := range strings.Lines(old) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "| ") && line != tableHead[0] {
			table = append(table, line)
		}
	}
	for _, row := range rows {
		if i := slices.IndexFunc(table, func(other string) bool { return nameOf(other) == nameOf(row) }); i >= 0 {
			table[i] = row
		} else {
			table = append(table, row)
		}
	}
	text := strings.Join(slices.Concat(tableHead, table), "\n")
	return os.WriteFile(path, []byte(before+tableBegin+"\n"+text+"\n"+tableEnd+after), 0o644)
}

// nameOf is what a row is about.
func nameOf(row string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
	return name
}

// machine describes where the run takes place, and what else there is to do.
func machine() string {
	return fmt.Sprintf("%d cores, %s, Linux %s, load %s", runtime.NumCPU(), runtime.Version(), kernelRelease(), loadAverage())
}

// kernelRelease leaves out what its builder has added to the version.
func kernelRelease() string {
	release, _, _ := strings.Cut(firstWord("/proc/sys/kernel/osrelease"), "-")
	return release
}

func loadAverage() string { return firstWord("/proc/loadavg") }

func firstWord(path string) string {
	content, _ := os.ReadFile(path)
	word, _, _ := strings.Cut(string(content), " ")
	return strings.TrimSpace(word)
}

func TestSummary(t *testing.T) {
	for _, v := range []struct {
		goal    goal
		value   float64
		target  string
		verdict string
	}{
		{goal{unit: "µs", atMost: 100}, 99.6, "≤ 100 µs", "met"},
		{goal{unit: "µs", atMost: 100}, 101, "≤ 100 µs", "missed"},
		{goal{atLeast: 0.5}, 0.5, "≥ 0.5", "met"},
		{goal{atLeast: 0.5}, 0.49, "≥ 0.5", "missed"},
		{goal{}, 0.49, "", ""},
	} {
		if got := v.goal.target(); got != v.target {
			t.Errorf("target %q, want %q", got, v.target)
		}
		if got := v.goal.verdict(v.value); got != v.verdict {
			t.Errorf("verdict on %v is %q, want %q", v.value, got, v.verdict)
		}
	}
}

// A run of a few benchmarks changes their rows in the table, and nothing else in the file.
func TestRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "performance.md")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	row := func(what string, values ...float64) string {
		m := measurement{goal{what: what, unit: "ms", atMost: 2}, "Some", values}
		return m.row("here")
	}
	write("# Before\n" + tableBegin + "\n" + tableEnd + "\nafter | all\n")
	for _, rows := range [][]string{{row("b", 1, 3, 2), row("b, p99", 4)}, {row("a", 1)}, {row("b", 5, 1), row("c", 2)}} {
		if err := record(path, rows); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := "# Before\n" + tableBegin + "\n" + strings.Join(tableHead, "\n") + `
| b | 3 ms | 1 – 5 | 2 | ≤ 2 ms | missed | ` + "`make bench BENCH=Some`" + ` | here |
| b, p99 | 4 ms |  | 1 | ≤ 2 ms | missed | ` + "`make bench BENCH=Some`" + ` | here |
| a | 1 ms |  | 1 | ≤ 2 ms | met | ` + "`make bench BENCH=Some`" + ` | here |
| c | 2 ms |  | 1 | ≤ 2 ms | met | ` + "`make bench BENCH=Some`" + ` | here |
` + tableEnd + "\nafter | all\n"
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	for _, text := range []string{"", tableBegin + "\n", tableEnd, tableEnd + tableBegin + "\n"} {
		write(text)
		if err := record(path, nil); err == nil {
			t.Errorf("no error about %q", text)
		}
	}
}

// The table of the documentation can be written to.
func TestTableOfTheDocs(t *testing.T) {
	content, err := os.ReadFile("../../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "performance.md")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := record(path, nil); err != nil {
		t.Fatal(err)
	}
	if again, err := os.ReadFile(path); err != nil || string(again) != string(content) {
		t.Errorf("%v; what a run without figures makes of it (-want +got)\n%s", err, cmp.Diff(string(content), string(again)))
	}
}
