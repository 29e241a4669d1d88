// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

func TestDemo(t *testing.T) {
	l := newTestLab(t)
	out := l.must("demo")
	for _, want := range []string{
		"1. The clusters are connected",
		"west-1/web: hello fd00:10:1:1::10",
		"from identity 65793: k8s:app=web",
		`"sec_identity": 131329`,
		"10.2.1.0/24 via 172.18.2.1 dev eth0",
		"the kernel of east-2 has followed",
		"all from east: with affinity local",
		"the kernel of east-1 leads to west",
		"none refused, none lost",
		"none lost, none unknown",
		"are the same kernel objects",
		"are gone",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the demo did not print %q", want)
		}
	}
	shown := false
	for _, b := range testutil.Blocks(t, "../../docs/lab.md") {
		for _, c := range b.Commands() {
			if c.Text == "weft-lab demo" {
				shown = true
				if err := testutil.SameShape(c.Output, out); err != nil {
					t.Errorf("%s: %v", b, err)
				}
			}
		}
	}
	if !shown {
		t.Error("docs/lab.md does not show the demo")
	}
	if t.Failed() {
		t.Logf("the demo printed:\n%s", out)
	}
	if traces := l.traces(); len(traces) > 0 {
		t.Errorf("after the demo there is still: %q", traces)
	}
}

// Ctrl-C in the middle of the story still cleans up.
func TestDemoInterrupted(t *testing.T) {
	l := newTestLab(t)
	cmd := l.command("demo")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var printed strings.Builder
	lines := bufio.NewScanner(io.TeeReader(stdout, &printed))
	for lines.Scan() {
		if strings.Contains(lines.Text(), "has got SIGKILL") {
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the interrupted demo ended 0")
	}
	if !strings.Contains(printed.String(), "✗ interrupt") {
		t.Errorf("the interrupted demo printed:\n%s", printed.String())
	}
	if traces := l.traces(); len(traces) > 0 {
		t.Errorf("after the interrupted demo there is still: %q", traces)
	}
}

func TestDemoKeep(t *testing.T) {
	l := newTestLab(t)
	l.must("up")
	out := l.must("demo", "--keep")
	if !strings.Contains(out, "the demo takes it down") || !strings.Contains(out, "stays up") {
		t.Errorf("demo --keep on a running lab printed:\n%s", out)
	}
	if s, well := l.status(); !well {
		t.Errorf("the lab that the demo kept is not well: %+v", s)
	}
}
