// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// leftOn is what a terminal shows in the end.
func leftOn(screen string) string {
	var left strings.Builder
	for line := range strings.Lines(strings.ReplaceAll(screen, "\r\n", "\n")) {
		left.WriteString(line[strings.LastIndex(line, wipeLine)+1:])
	}
	return strings.ReplaceAll(left.String(), strings.TrimPrefix(wipeLine, "\r"), "")
}

// Work that takes long tells on the terminal how far it is, and leaves nothing of that there: what it prints is what it prints
// without a terminal.
func TestProgress(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	held := func() *testutil.Proxy { // which lets nothing through for now
		proxy := testutil.StartProxy(t, etcd.Endpoint())
		proxy.Pause()
		return proxy
	}
	config := func(proxy *testutil.Proxy) string {
		file := filepath.Join(t.TempDir(), "kvstore.yaml")
		if err := os.WriteFile(file, []byte("endpoints: ["+proxy.Endpoint()+"]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	tries := held()
	lines, dump := io.Pipe()
	go func() {
		_, _ = io.WriteString(dump, `{"key":"b/1","value":"x"}`+"\n"+`{"key":"b/2","value":"x"}`+"\n")
	}()
	well, compared := atomic.Bool{}, make(chan struct{})
	agent, good, bad := lab(true), lab(true).Status, lab(false).Status
	agent.Status = func() api.Status {
		if well.Load() {
			return good()
		}
		return bad()
	}
	agent.Verify = func(_ context.Context, _ bool, tell func(done, total int)) (api.Verification, error) {
		tell(1000, 4000)
		<-compared
		return api.Verification{Meta: api.MetaOf(api.KindVerification), Compared: 7, Differences: []api.Difference{}}, nil
	}
	socket, plain := serveAgent(t, agent), filepath.Join(t.TempDir(), "plain.yaml")
	etcd.WriteConfig(t, plain)
	for _, tc := range []struct {
		args, progress string // progress: a pattern
		release        func()
		want           string // of what is printed
	}{
		{"kvstore set --from - --kvstore-config " + plain, `2 keys, \d+ a second, \d+s`, func() { _ = dump.Close() }, "2 keys written\n"},
		{"status --wait --brief", `waiting: 5 problems, such as .*, \d+s`, func() { well.Store(true) }, "Health:        ok\n"},
		{"verify", `comparing the clusters, the tables and the kernel: 1000 of 4000 entries \(25%\), \d+ a second, \d+s`, func() { close(compared) }, "7 objects compared, 0 differences\n"},
		{"troubleshoot kvstore --timeout 1m " + config(tries), `kvstore.yaml, 1 of 1 config: \d steps? tried, \d+s`, tries.Forward, "1 config, "},
	} {
		name, _, _ := strings.Cut(tc.args, " -")
		t.Run(name, func(t *testing.T) {
			p, done := testutil.OpenTerminal(t), make(chan int, 1)
			go func() {
				done <- run(environment{
					ctx: t.Context(), stdin: lines, stdout: p.Slave, stderr: p.Slave, now: func() time.Time { return testNow },
					lookup: lookupIn(map[string]string{"WEFT_API_SOCKET": socket, "NO_COLOR": "1"}),
				}, strings.Fields(tc.args))
			}()
			told := regexp.MustCompile(regexp.QuoteMeta(wipeLine) + tc.progress)
			testutil.Eventually(t, 30*time.Second, func() error {
				if !told.MatchString(p.Screen()) {
					return contains(p.Screen(), tc.progress)
				}
				return nil
			})
			tc.release()
			select {
			case code := <-done:
				if code == exitUsage || code == exitUnreachable {
					t.Errorf("exit code %d", code)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("it does not end")
			}
			testutil.Eventually(t, 30*time.Second, func() error { return contains(leftOn(p.Screen()), tc.want) })
			if left := leftOn(p.Screen()); regexp.MustCompile(tc.progress).MatchString(left) || strings.Contains(left, "\x1b") {
				t.Errorf("progress is left on the terminal: %q", left)
			}
		})
	}
}

// Keys are counted as they are read.
func TestProgressOfKeys(t *testing.T) {
	etcd, p := testutil.StartEtcd(t), testutil.OpenTerminal(t)
	etcd.Put(t, "a/1", "one")
	etcd.Put(t, "a/2", "two")
	o := &etcdOptions{config: filepath.Join(t.TempDir(), "kvstore.yaml"), timeout: time.Minute}
	etcd.WriteConfig(t, o.config)
	told := startProgress(environment{stderr: p.Slave, lookup: lookupIn(nil)})
	defer told.end()
	err := o.do(t.Context(), func(ctx context.Context, client *kvstore.Client) error {
		return eachKey(ctx, client, "a/", told, func(kv kvstore.KV) error {
			if kv.Key == "a/2" {
				testutil.Eventually(t, 30*time.Second, func() error { return contains(p.Screen(), wipeLine+"1 key, ", " a second, ") })
			}
			return nil
		})
	})
	if err != nil {
		t.Error(err)
	}
}

// Where no terminal is, or a simple one, nothing is told.
func TestProgressNeedsTerminal(t *testing.T) {
	p := testutil.OpenTerminal(t)
	for name, env := range map[string]environment{
		"a pipe": {stderr: io.Discard, lookup: lookupIn(nil)},
		"dumb":   {stderr: p.Slave, lookup: lookupIn(map[string]string{"TERM": "dumb"})},
	} {
		if told := startProgress(env); told != nil {
			told.end()
			t.Errorf("%s: progress", name)
		}
	}
	var none *progress
	none.say("%d", 1)
	none.did(1, "key")
	none.end()
	if w := none.above(p.Slave); w != io.Writer(p.Slave) {
		t.Errorf("above is %T", w)
	}
}

// The line never breaks, never drives the terminal, and is not painted into a line of somebody else's.
func TestProgressLine(t *testing.T) {
	p := testutil.OpenTerminal(t)
	told := startProgress(environment{stderr: p.Slave, lookup: lookupIn(nil)})
	w := told.above(p.Slave)
	io.WriteString(w, "half a line")
	told.say("\x1b[2J%s", strings.Repeat("x", 200))
	told.paint()
	io.WriteString(w, ", and the rest\n")
	told.paint()
	testutil.Eventually(t, 30*time.Second, func() error {
		return contains(p.Screen(), "half a line, and the rest\r\n"+wipeLine+`\x1b[2J`+strings.Repeat("x", 100))
	})
	told.end()
	for _, d := range []time.Duration{20 * time.Second, time.Second, 70 * time.Second} {
		at := told.begun.Add(d)
		if line := told.line(at, 120); len(line) != 119 || !strings.HasSuffix(line, "x, "+age(at, told.begun)) {
			t.Errorf("in 120 columns: %d of %q", len(line), line)
		}
	}
	testutil.Eventually(t, 30*time.Second, func() error {
		if left := leftOn(p.Screen()); left != "half a line, and the rest\n" {
			return contains(left, "nothing but what was printed")
		}
		return nil
	})
}
