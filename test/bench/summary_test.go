// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
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
	order  []string
	goals  map[string]goal
	values map[string][]float64
}

// measured takes a figure into the summary, and reports it as the benchmark's own.
func measured(b *testing.B, metric string, value float64, g goal) {
	b.Helper()
	b.ReportMetric(value, metric)
	summary.Lock()
	defer summary.Unlock()
	if summary.goals == nil {
		summary.goals, summary.values = make(map[string]goal), make(map[string][]float64)
	}
	if _, ok := summary.goals[g.what]; !ok {
		summary.order = append(summary.order, g.what)
	}
	summary.goals[g.what] = g
	summary.values[g.what] = append(summary.values[g.what], value)
}

// summarised is a test binary that ends with the table of what it has measured.
type summarised struct{ m *testing.M }

func (s summarised) Run() int {
	load := loadAverage() // what else the machine has to do
	code := s.m.Run()
	if len(summary.order) == 0 {
		return code
	}
	fmt.Printf("\n%d cores, %s, Linux %s, load average before %s\n\n", runtime.NumCPU(), runtime.Version(), kernelRelease(), load)
	fmt.Println("| what | median | lowest – highest | runs | target | |")
	fmt.Println("|---|---|---|---|---|---|")
	for _, what := range summary.order {
		g, values := summary.goals[what], summary.values[what]
		slices.Sort(values)
		median := (values[(len(values)-1)/2] + values[len(values)/2]) / 2
		fmt.Printf("| %s | %s | %s – %s | %d | %s | %s |\n", what, figure(median, g.unit),
			figure(values[0], ""), figure(values[len(values)-1], ""), len(values), g.target(), g.verdict(median))
	}
	return code
}

func kernelRelease() string { return firstWord("/proc/sys/kernel/osrelease") }

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
