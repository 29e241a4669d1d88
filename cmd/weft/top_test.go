// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// Rates are differences: of both directions together, and from 0 where a counter began anew.
func TestTopRates(t *testing.T) {
	n := func(source, destination uint32, direction string, packets, bytes uint64) counter {
		return counter{Source: source, Destination: destination, Direction: direction, Verdict: "identified", Mode: "native", Packets: packets, Bytes: bytes}
	}
	before := &look{at: testNow, status: labStatus(true), counters: []counter{n(1, 2, "ingress", 100, 1000), n(3, 4, "egress", 500, 500), n(5, 6, "egress", 7, 70)}}
	now := &look{at: testNow.Add(2 * time.Second), status: labStatus(true), counters: []counter{
		n(1, 2, "ingress", 120, 3000), n(1, 2, "egress", 10, 10), n(3, 4, "egress", 4, 40), n(5, 6, "egress", 7, 70),
	}}
	now.status.Clusters[1].Revision += 30
	v := makeTop(before, now)
	want := []topPair{{Source: 1, Destination: 2, Verdict: "identified", Packets: 15, Bytes: 1005}, {Source: 3, Destination: 4, Verdict: "identified", Packets: 2, Bytes: 20}}
	sorted := cmpopts.SortSlices(func(a, b topPair) bool { return byPair.compare(a, b) < 0 })
	if diff := cmp.Diff(want, v.Pairs, sorted, cmpopts.IgnoreUnexported(topPair{})); diff != "" {
		t.Errorf("pairs (-want +got)\n%s", diff)
	}
	if w := v.Clusters[0]; w.Name != "west" || w.Changes != 15 || w.Rejected != 4 {
		t.Errorf("west: %+v", w)
	}
}

func TestRateText(t *testing.T) {
	for rate, want := range map[float64]string{0: "0", 0.25: "0.2", 9.96: "10.0", 15: "15", 999: "999", 1005: "1.0k", 123456: "123k", 5e9: "5.0G", 7e16: "70000T"} {
		if got := rateText(rate); got != want {
			t.Errorf("%v: %q, want %q", rate, got, want)
		}
	}
}

// Where there is no terminal, one view is printed, for people and for programs.
func TestTopOnce(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, lab(true)), "WEFT_BPFFS": "/nonexistent", "WEFT_INTERVAL": "100ms"}
	code, stdout, stderr := weft(t, env, "top")
	if err := contains(stdout, "east/east-n1, agent up 1d2h, ok CLUSTER STATE FOR", "west ready 1m5s 2 25 8 10 0 0 4"); code != 0 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	if err := contains(stderr, "weft: the kernel's counters cannot be read, so no pairs are shown: no usable BPF file system: /nonexistent does not exist"); err != nil {
		t.Error(err)
	}
	if _, stdout, _ = weft(t, env, "top", "-o", "jsonpath={.clusters[?(@.own == false)].state}"); stdout != "ready\n" {
		t.Errorf("as a path: %q", stdout)
	}
	for args, want := range map[string]string{"--sort age": "weft: --sort age: want packets, bytes or identities\n", "--interval 1ms": "weft: --interval 1ms: want at least 100ms\n"} {
		if code, _, stderr := weft(t, nil, append([]string{"top"}, strings.Fields(args)...)...); code != exitUsage || stderr != want {
			t.Errorf("%s: exit code %d, %q", args, code, stderr)
		}
	}
}

// On a terminal it is painted again and again, keys work, and however it ends, by a key, a signal, or as the agent goes, the
// terminal is what it was.
func TestTopOnTerminal(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(p *testutil.Terminal, signals chan os.Signal, gone *atomic.Bool)
		code int
	}{
		{"q", func(p *testutil.Terminal, _ chan os.Signal, _ *atomic.Bool) { p.Type(t, "q") }, exitOK},
		{"Ctrl-C", func(p *testutil.Terminal, _ chan os.Signal, _ *atomic.Bool) { p.Type(t, "\x03") }, exitOK},
		{"signal", func(_ *testutil.Terminal, signals chan os.Signal, _ *atomic.Bool) { signals <- syscall.SIGTERM }, 143},
		{"agent gone", func(_ *testutil.Terminal, _ chan os.Signal, gone *atomic.Bool) { gone.Store(true) }, exitUnreachable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var gone atomic.Bool
			agent := lab(true)
			status := agent.Status
			agent.Status = func() api.Status {
				if gone.Load() {
					panic("the agent ends in the middle of an answer") // which cuts the connection
				}
				return status()
			}
			p, signals, done := testutil.OpenTerminal(t), make(chan os.Signal, 1), make(chan int, 1)
			before := p.Mode(t)
			socket := serveAgent(t, agent)
			go func() {
				done <- run(environment{
					ctx: t.Context(), stdin: p.Slave, stdout: p.Slave, stderr: p.Slave, now: func() time.Time { return testNow },
					lookup:  lookupIn(map[string]string{"WEFT_API_SOCKET": socket, "WEFT_BPFFS": "/nonexistent"}),
					signals: func() <-chan os.Signal { return signals },
				}, []string{"top", "--interval", "100ms"})
			}()
			shows := func(want string) {
				t.Helper()
				testutil.Eventually(t, 30*time.Second, func() error { return contains(p.Screen(), want) })
			}
			shows("s: sort by bytes (now packets)")
			shows("west ready 1m5s")
			if raw := p.Mode(t); raw == before {
				t.Error("keys need a return")
			}
			p.Type(t, "s")
			shows("s: sort by identities (now bytes)")
			tc.end(p, signals, &gone)
			select {
			case code := <-done:
				if code != tc.code {
					t.Errorf("exit code %d, want %d", code, tc.code)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("it does not end")
			}
			if diff := cmp.Diff(before, p.Mode(t)); diff != "" {
				t.Errorf("the terminal has another mode (-before +after)\n%s", diff)
			}
			testutil.Eventually(t, 30*time.Second, func() error { return contains(p.Screen(), enterScreen, leaveScreen) })
			if s := p.Screen(); strings.LastIndex(s, leaveScreen) < strings.LastIndex(s, goHome) {
				t.Errorf("it paints after it has ended: %q", s)
			}
		})
	}
}
