// SPDX-License-Identifier: Apache-2.0

// Kernels boots Debian's own kernels in virtual machines, emulated in software, runs weft's tests about the kernel under
// each, and hands on one table of what passed where:
//
//	kernels [-v] [-run regexp] [-pkg package] [-timeout duration] [series...]
//
// A series is two numbers, "6.12"; without one it is 5.10, of Debian 11, and those that Debian 12 has. It needs apt, depmod (package kmod) and
// qemu-system-x86_64, but no KVM; root only where apt has no package lists yet. Kernels are kept in .cache/kernels.
//
// Exit code 0 means that every kernel ran every selected test binary to success, 1 that one did not, 2 wrong usage.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/weftmesh/weft/test/vm"
)

// bootTime is what a machine gets for everything but the tests. On two cores it needs about 6 seconds.
const bootTime = 2 * time.Minute

// anyTest is the -test.run that selects every test.
const anyTest = "."

var defaultSeries = []string{"5.10", "6.1", "6.12"}

// options are the arguments, checked.
type options struct {
	series  []string
	suites  []suite
	run     string
	timeout time.Duration // of each test binary
	verbose bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	opts, err := parseArgs(args, stderr)
	if err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(stderr, "kernels:", err)
		}
		return 2
	}
	ok, err := runAll(ctx, opts, stdout)
	if err != nil {
		fmt.Fprintln(stderr, "kernels:", err)
	}
	if err != nil || !ok {
		return 1
	}
	return 0
}

func parseArgs(args []string, stderr io.Writer) (options, error) {
	var opts options
	flags := flag.NewFlagSet("kernels", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&opts.run, "run", anyTest, "run the tests that match this `regexp`")
	flags.DurationVar(&opts.timeout, "timeout", 30*time.Minute, "the most that one test binary may take")
	flags.BoolVar(&opts.verbose, "v", false, "show everything that the tests print")
	pkg := flags.String("pkg", "", "run the tests of this `package` only")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}
	if opts.series = flags.Args(); len(opts.series) == 0 {
		opts.series = defaultSeries
	}
	for _, series := range opts.series {
		if !regexp.MustCompile(`^[0-9]+\.[0-9]+$`).MatchString(series) {
			return options{}, fmt.Errorf("%q is no kernel series: two numbers are wanted, as in 6.12 (flags stand before them)", series)
		}
	}
	if _, err := regexp.Compile(opts.run); err != nil {
		return options{}, fmt.Errorf("-run: %w", err)
	}
	var names []string
	for _, s := range suites {
		names = append(names, s.pkg)
		if *pkg == "" || *pkg == s.pkg {
			opts.suites = append(opts.suites, s)
		}
	}
	if len(opts.suites) == 0 {
		return options{}, fmt.Errorf("-pkg: %q is none of %s", *pkg, strings.Join(names, ", "))
	}
	return opts, nil
}

// runAll runs the tests on every kernel, prints the table and says whether all is well.
func runAll(ctx context.Context, opts options, out io.Writer) (ok bool, err error) {
	// Tools of the system's administrator are on nobody else's path.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return false, err
	}
	for _, tool := range []string{"apt-get", "apt-cache", "dpkg-deb", "depmod", vm.Emulator} {
		if _, err := exec.LookPath(tool); err != nil {
			return false, fmt.Errorf("%w: on Debian, apt-get install kmod qemu-system-x86", err)
		}
	}
	mod, err := runCommand(ctx, ".", "go", "env", "GOMOD")
	if err != nil {
		return false, err
	}
	root := filepath.Dir(strings.TrimSpace(string(mod)))
	cache := filepath.Join(root, ".cache", "kernels")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return false, err
	}
	dir, err := os.MkdirTemp(cache, "run-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)

	archive := &debian{dir: cache, log: out, run: runCommand}
	var kernels []kernel
	for _, series := range opts.series {
		k, err := archive.kernel(ctx, series)
		if err != nil {
			return false, err
		}
		kernels = append(kernels, k)
	}
	p, err := build(ctx, root, dir, opts.suites)
	if err != nil {
		return false, err
	}
	var rows []row
	for _, k := range kernels {
		r, err := runOne(ctx, opts, p, k, filepath.Join(dir, "root-"+k.release), out)
		if err != nil {
			table(out, rows) // of those that are done
			return false, fmt.Errorf("kernel %s: %w", k.series, err)
		}
		rows = append(rows, r)
	}
	return table(out, rows), nil
}

// row is what the table tells of one kernel.
type row struct {
	release string
	results []result
	took    time.Duration // boot and power-off included
	wrong   string        // why it is no success; empty: it is one
}

// runOne runs the tests on one kernel. A failure of the tests or of the machine is in the row; an error is one of this
// program's surroundings, or that ctx ended.
func runOne(ctx context.Context, opts options, p payload, k kernel, file string, out io.Writer) (row, error) {
	t := &transcript{id: "weft-" + rand.Text(), verbose: opts.verbose}
	j, modules, err := p.job(k, t.id, opts.run, opts.timeout)
	if err != nil {
		return row{}, err
	}
	if err := p.writeRoot(file, k, j, modules); err != nil {
		return row{}, err
	}
	show := func(lines ...string) {
		for _, line := range lines {
			fmt.Fprintf(out, "%s: %s\n", k.series, line)
		}
	}
	limit := bootTime + time.Duration(len(j.Runs))*opts.timeout
	limited, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the machine was not done after %v", limit))
	defer cancel()
	started := time.Now()
	console, err := vm.Machine{Image: k.image, Root: file}.Run(limited, func(line string) { show(t.add(line)...) })
	if ctx.Err() != nil {
		return row{}, context.Cause(ctx)
	}
	r := row{release: k.release, results: t.results, took: time.Since(started), wrong: t.verdict()}
	if err != nil {
		r.wrong = err.Error()
	}
	if !t.done {
		show(t.unfinished()...)
		show("the end of the kernel's console:")
		show(strings.Split(strings.TrimSpace(strings.ReplaceAll(console, "\r", "")), "\n")...)
	}
	if r.wrong == "" {
		r.wrong = idle(t.results, opts.run == anyTest)
	}
	show("off after " + r.took.Round(time.Millisecond).String())
	return r, nil
}

// idle says if nothing was tested: a pattern that matches no test any more must not look green. Where all tests were asked
// for, each package has one.
func idle(results []result, all bool) string {
	passed := 0
	for _, r := range results {
		if all && r.passed == 0 {
			return r.pkg + ": no test ran"
		}
		passed += r.passed
	}
	if passed == 0 {
		return "no test ran"
	}
	return ""
}

// table prints what every kernel did and says whether all is well.
func table(out io.Writer, rows []row) bool {
	ok := true
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nKERNEL\tPACKAGE\tPASSED\tFAILED\tSKIPPED\tTIME\tRESULT")
	for _, row := range rows {
		for _, r := range row.results {
			verdict := "ok"
			switch {
			case !r.ended:
				verdict = "no result"
			case r.passed+r.failed+r.skipped == 0:
				verdict = "no tests"
			case !r.ok():
				verdict = strings.Join(append([]string{fmt.Sprintf("exit %d", r.exit)}, r.failures...), " ")
			}
			fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%.1fs\t%s\n", row.release, r.pkg, r.passed, r.failed, r.skipped, r.took.Seconds(), verdict)
		}
		total := row.wrong
		if total == "" {
			total = "ok"
		}
		ok = ok && row.wrong == ""
		fmt.Fprintf(w, "%s\tall\t\t\t\t%.1fs\t%s\n", row.release, row.took.Seconds(), total)
	}
	return w.Flush() == nil && ok
}
