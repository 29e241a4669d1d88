// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

const root = "../.."

var (
	// onMachine is the first line of a block that is for one machine.
	onMachine = regexp.MustCompile(`^# on ([\w-]+)$`)
	// fileName is the first line of a block that is a file.
	fileName = regexp.MustCompile(`^# (/[\w./-]+)$`)
	// goesOn are commands that end when somebody ends them.
	goesOn = regexp.MustCompile(`^((bin/)?weft agent |weft operator --|weft (flows|monitor)( .*)? (-f|--follow)|weft( .*)? (watch|--watch|-w)( |$)|etcd |while |` +
		`weft-lab exec (--outside-cgroup )?\S+ weft-lab (serve|request .* --every))`)
	// reads are commands that change nothing: they are asked again while what the page shows is still on its way.
	reads = regexp.MustCompile(`^(weft-lab (--state-dir \S+ )?exec \S+ )?(` +
		`(bin/)?weft (status|explain|ip|node|identity|service|endpoint (list|get)|clusters (list|get|rejected)|bpf|flows|top|verify( -|$)|metrics|page|` +
		`kvstore (get|list|leases)|operator (status|gc --dry-run|export --dry-run)|troubleshoot|diagnose|config|version|bench|cleanup --dry-run)\b|` +
		`weft-lab request|ip route show|curl|ls|bpftool (map|link) (dump|show)|ping)|^weft-lab (status|kubernetes \S+ get)`)
)

// page is a document that is done on a machine of a story: on the one that a block names, else on this one, in this shell.
type page struct {
	file, on, shell string
	before          string // what must be there before it begins, as a script
	after           func(t *testing.T, w *world)
	goingOn         []*goingOn
	written         map[int][]string // what was printed instead of what the page shows, by the line of the command
}

// story does pages one after the other.
func (w *world) story(t *testing.T) {
	for _, p := range stories[t.Name()] {
		if !t.Run(p.file, func(t *testing.T) { w.tell(t, p) }) {
			t.Fatalf("%s did not go to its end, and what comes after it needs that", p.file)
		}
	}
}

func (w *world) tell(t *testing.T, p *page) {
	p.written = make(map[int][]string)
	defer p.write(t)
	for _, m := range w.machines {
		m.must(t, "a new shell", "rm -f /tmp/.shell")
	}
	w.machines[p.on].must(t, "before "+p.file, p.before)
	defer func() {
		for _, g := range p.goingOn {
			g.end(t)
		}
	}()
	for _, b := range testutil.Blocks(t, filepath.Join(root, p.file)) {
		m := w.machines[p.on]
		if len(b.Lines) > 0 {
			if on := onMachine.FindStringSubmatch(b.Lines[0]); on != nil {
				m = w.machines[on[1]]
			}
		}
		if m == nil {
			t.Fatalf("%s: there is no such machine", b)
		}
		switch b.Language {
		case "sh":
			p.script(t, m, b)
		case "console":
			for _, c := range b.Commands() {
				p.command(t, m, b, c)
			}
		case "yaml":
			p.yaml(t, m, b)
		}
	}
	if p.after != nil {
		p.after(t, w)
	}
}

// A page has one shell on each machine: the directory, and what is exported, are those of the command before.
const (
	enter = "if [ -e /tmp/.shell ]; then . /tmp/.shell; fi\n"
	leave = "trap '{ export -p; echo \"cd $PWD\"; } >/tmp/.shell' EXIT\n"
)

// inShell is a script in the page's shell.
func (p *page) inShell(script string) string {
	if p.shell == "" {
		return script
	}
	return p.shell + " bash -euo pipefail -c " + quote(script)
}

// script runs a block: one that is nothing but commands line by line, else as a whole.
func (p *page) script(t *testing.T, m *machine, b testutil.Block) {
	t.Helper()
	text := strings.Join(b.Lines, "\n")
	if strings.Contains(text, "<<") || strings.Contains(text, "() {") {
		m.must(t, b.String(), text)
		return
	}
	for _, c := range b.Commands() {
		p.command(t, m, b, c)
	}
}

// command runs one command, and compares what it prints with what the page shows.
func (p *page) command(t *testing.T, m *machine, b testutil.Block, c testutil.Command) {
	t.Helper()
	if runElsewhere(p.file, c) {
		return
	}
	where := fmt.Sprintf("%s:%d, on %s: %s", p.file, c.Line, m.name, c.Text)
	if goesOn.MatchString(c.Text) {
		p.goingOn = append(p.goingOn, start(t, m, where, p.inShell(enter+c.Text), c.Output))
		return
	}
	script := p.inShell(enter + leave + c.Text)
	defer func(begun time.Time) {
		if took := time.Since(begun); took > 3*time.Second {
			t.Logf("%s: %.1f s", where, took.Seconds())
		}
	}(time.Now())
	shows := b.Language == "console" && len(c.Output) > 0
	for until := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		printed, code := m.run(t, script)
		err := wellDone(code, shows)
		if shows && err == nil {
			err = testutil.SameShape(c.Output, printed)
		}
		again := reads.MatchString(c.Text) && time.Now().Before(until)
		switch {
		case err == nil:
			return
		case again && os.Getenv(updateEnv) == "", again && time.Until(until) > patience-5*time.Second:
			continue
		case os.Getenv(updateEnv) != "" && shows:
			t.Logf("%s: %v", where, err)
			p.written[c.Line] = strings.Split(strings.TrimRight(printed, "\n"), "\n")
			return
		}
		t.Fatalf("%s\n%v; exit code %d, and printed was\n%s", where, err, code, printed)
	}
}

// wellDone: what a page shows may be that something is not well, but never that a command is not one.
func wellDone(code int, shows bool) error {
	if code == 0 || shows && (code == 1 || code == 3) {
		return nil
	}
	return fmt.Errorf("exit code %d", code)
}

// yaml puts a block that is a file where its first line says.
func (p *page) yaml(t *testing.T, m *machine, b testutil.Block) {
	t.Helper()
	text := strings.Join(b.Lines, "\n") + "\n"
	if file := fileName.FindStringSubmatch(b.Lines[0]); file != nil {
		m.must(t, b.String(), "mkdir -p $(dirname "+file[1]+") && cat >"+file[1]+" <<'END'\n"+text+"END")
	}
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// write puts what was printed into the page, if that was asked for.
func (p *page) write(t *testing.T) {
	if len(p.written) == 0 {
		return
	}
	file := filepath.Join(root, p.file)
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(content), "\n")
	for _, b := range slices.Backward(testutil.Blocks(t, file)) {
		for _, c := range slices.Backward(b.Commands()) {
			if now, ok := p.written[c.Line]; ok {
				first := c.Line + strings.Count(c.Text, "\n")
				lines = slices.Replace(lines, first, first+len(c.Output), now...)
			}
		}
	}
	testutil.MustWriteFile(t, file, []byte(strings.Join(lines, "\n")))
}

// goingOn is a command that goes on until the page ends.
type goingOn struct {
	where   string
	shown   []string
	cmd     *exec.Cmd
	printed *output
	done    chan error
}

// output is what a command has printed so far.
type output struct {
	mu    sync.Mutex
	bytes bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.bytes.String()
}

// start begins a command, and returns when it has printed the first line that the page shows, or anything where that shows nothing.
func start(t *testing.T, m *machine, where, script string, shown []string) *goingOn {
	t.Helper()
	g := &goingOn{where: where, shown: shown, cmd: m.script(context.Background(), script), printed: &output{}, done: make(chan error, 1)}
	g.cmd.Stdout, g.cmd.Stderr = g.printed, g.printed
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { g.done <- g.cmd.Wait() }()
	testutil.Eventually(t, patience, func() error {
		select {
		case err := <-g.done:
			g.done <- err
			t.Fatalf("%s\nit has ended: %v\n%s", where, err, g.printed)
		default:
		}
		if first := slices.IndexFunc(shown, func(line string) bool { return line != "…" }); first >= 0 {
			return testutil.SameShape(append(slices.Clone(shown[:first+1]), "…"), g.printed.String())
		}
		if g.printed.String() == "" {
			return fmt.Errorf("%s: nothing was printed", where)
		}
		return nil
	})
	return g
}

// end interrupts the command, as a user would, when it has printed all that the page shows, and waits for its end.
func (g *goingOn) end(t *testing.T) {
	t.Helper()
	if len(g.shown) > 0 && !t.Failed() {
		testutil.Eventually(t, patience, func() error {
			if err := testutil.SameShape(append(slices.Clone(g.shown), "…"), g.printed.String()); err != nil {
				return fmt.Errorf("%s: %w", g.where, err)
			}
			return nil
		})
	}
	_ = syscall.Kill(-g.cmd.Process.Pid, syscall.SIGINT)
	kill := time.AfterFunc(patience, func() { _ = syscall.Kill(-g.cmd.Process.Pid, syscall.SIGKILL) })
	defer kill.Stop()
	err := <-g.done
	var exit *exec.ExitError
	if errors.As(err, &exit) && (exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGINT || exit.ExitCode() == 128+int(syscall.SIGINT)) {
		err = nil
	}
	if err != nil {
		t.Errorf("%s\ninterrupted, it ended with %v\n%s", g.where, err, g.printed)
	}
}
