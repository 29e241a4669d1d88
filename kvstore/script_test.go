// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// What happens in several steps is told by the scripts of testdata: real etcds,
// a fault proxy in front of the one called west, a reader behind the proxy and
// a writer at west itself. The commands are those of stage.commands.
//
// mechanism: D5
// lesson: E2, E3, E4, E9, E10, X1, X2, X3
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			env.Values[stageKey{}] = &stage{
				t: env.T().(testing.TB), etcds: make(map[string]*testutil.Etcd), readers: make(map[string]*reader),
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"etcd": command(1, (*stage).etcd), "put": command(3, (*stage).put), "del": command(2, (*stage).del),
			"on": command(2, (*stage).on), "proxy": command(1, (*stage).through),
			"watch": command(1, (*stage).watch), "again": command(1, (*stage).again), "expect": command(1, (*stage).expect),
			"known": command(2, (*stage).known), "ended": command(1, (*stage).ended), "live": command(1, (*stage).live),
			"state": command(2, (*stage).state), "status": command(2, (*stage).status), "lists": command(2, (*stage).lists),
			"set": command(2, (*stage).set), "canary": command(2, (*stage).canary), "ready": command(0, (*stage).ready),
			"lose-lease": command(1, (*stage).loseLease), "holds": command(2, (*stage).holds),
		},
	})
}

type stageKey struct{}

// command is one with at least so many arguments.
func command(least int, do func(*stage, []string)) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) < least {
			ts.Fatalf("want at least %d arguments, and no !", least)
		}
		do(ts.Value(stageKey{}).(*stage), args)
	}
}

// stage is what one script acts on.
type stage struct {
	t       testing.TB
	etcds   map[string]*testutil.Etcd
	proxy   *testutil.Proxy
	readers map[string]*reader // by prefix
	writer  *Writer
}

// reader follows a prefix.
type reader struct {
	*recorder
	w    *Watcher
	c    *Client
	run  *task
	edit func(*Config)
}

func (s *stage) named(name string) *testutil.Etcd {
	s.t.Helper()
	e, ok := s.etcds[name]
	if !ok {
		s.t.Fatalf("there is no etcd %s", name)
	}
	return e
}

func (s *stage) reader(prefix string) *reader {
	s.t.Helper()
	r, ok := s.readers[prefix]
	if !ok {
		s.t.Fatalf("nobody watches %s", prefix)
	}
	return r
}

// etcd NAME: starts one; the first one is in place behind the proxy.
func (s *stage) etcd(args []string) {
	e := testutil.StartEtcd(s.t)
	s.etcds[args[0]] = e
	if s.proxy == nil {
		s.proxy = testutil.StartProxy(s.t, e.Addr())
	}
}

// put NAME KEY VALUE [KEY VALUE]...
func (s *stage) put(args []string) {
	for kv := range slices.Chunk(args[1:], 2) {
		s.named(args[0]).Put(s.t, kv[0], kv[1])
	}
}

// del NAME KEY...
func (s *stage) del(args []string) {
	for _, key := range args[1:] {
		s.named(args[0]).Delete(s.t, key)
	}
}

// on NAME compact | stop | restart | wipe | auth | no-auth | full | not-full
func (s *stage) on(args []string) {
	e := s.named(args[0])
	do := map[string]func(){
		"compact": func() { e.Compact(s.t) }, "stop": func() { e.Stop(s.t) }, "restart": func() { e.Restart(s.t) },
		"wipe": func() { e.Wipe(s.t) }, "auth": func() { e.EnableAuth(s.t, args[0]) },
		"no-auth": func() {
			if _, err := e.Client().AuthDisable(s.t.Context()); err != nil {
				s.t.Fatal(err)
			}
		},
		"full": func() { e.Raise(s.t) }, "not-full": func() { e.Disarm(s.t) },
	}[args[1]]
	if do == nil {
		s.t.Fatalf("nothing is known of %s", args[1])
	}
	do()
}

// proxy cut | refuse | pause | forward | to NAME
func (s *stage) through(args []string) {
	p := s.proxy
	do := map[string]func(){
		"cut": p.Cut, "refuse": p.Refuse, "pause": p.Pause, "forward": p.Forward,
		"to": func() { p.SwapTarget(s.named(args[1]).Addr()); p.Cut() },
	}[args[0]]
	if do == nil {
		s.t.Fatalf("nothing is known of %s", args[0])
	}
	do()
}

// watch PREFIX [USER]: a reader begins, with the password of the tests.
func (s *stage) watch(args []string) {
	r := &reader{recorder: newRecorder(), edit: func(c *Config) {
		c.LivenessTimeout = 3 * time.Second
		if len(args) > 1 {
			c.Username, c.Password = args[1], testutil.Password
		}
	}}
	r.w = NewWatcher(args[0], r.deliver)
	s.readers[args[0]] = r
	s.begin(r)
}

func (s *stage) begin(r *reader) {
	r.c = dialThrough(s.t, s.proxy, r.edit)
	r.run = start(s.t, func(ctx context.Context) error { return r.w.Run(ctx, r.c) })
}

// again PREFIX: the reader goes on, by a new connection and with what etcd it
// finds.
func (s *stage) again(args []string) {
	r := s.reader(args[0])
	r.otherHistory()
	s.begin(r)
}

// ended PREFIX: the reader has met another etcd and stopped, with all it knows.
func (s *stage) ended(args []string) {
	if err := s.reader(args[0]).run.wait(s.t); !errors.Is(err, ErrHistoryChanged) {
		s.t.Fatalf("following %s ended with %v", args[0], err)
	}
}

// expect PREFIX [EVENT]...: these events have come since the last expect, in
// this order, or will, and no others.
func (s *stage) expect(args []string) {
	r := s.reader(args[0])
	var got []string
	testutil.Eventually(s.t, testTimeout, func() error {
		if got = append(got, r.take()...); !slices.Equal(got, args[1:]) {
			return fmt.Errorf("events of %s are %q, want %q", args[0], got, args[1:])
		}
		return nil
	})
	r.check(s.t)
}

// known PREFIX N: so many keys are known now.
func (s *stage) known(args []string) {
	if n := s.reader(args[0]).w.Len(); fmt.Sprint(n) != args[1] {
		s.t.Fatalf("%d keys of %s are known, want %s", n, args[0], args[1])
	}
}

// live PREFIX: the watch is open, or will be.
func (s *stage) live(args []string) { awaitLive(s.t, s.reader(args[0]).w) }

// lists PREFIX N: so many complete lists there were.
func (s *stage) lists(args []string) {
	if n := s.reader(args[0]).w.Status().Lists; fmt.Sprint(n) != args[1] {
		s.t.Fatalf("%d lists of %s, want %s", n, args[0], args[1])
	}
}

// state PREFIX STATE: the state of the reader's connection is, or will be, this.
func (s *stage) state(args []string) {
	testutil.Eventually(s.t, testTimeout, func() error {
		if now := s.reader(args[0]).c.Status(); string(now.State) != args[1] {
			return fmt.Errorf("the connection is %s, want %s: %v", now.State, args[1], now.LastError)
		}
		return nil
	})
}

// status PREFIX|writer TEXT: the status tells of an error with this text, or
// will.
func (s *stage) status(args []string) {
	testutil.Eventually(s.t, testTimeout, func() error {
		var err error
		if args[0] == "writer" {
			err = s.writer.Status().LastError
		} else {
			r := s.reader(args[0])
			err = errors.Join(r.w.LastError(), r.c.Status().LastError)
		}
		if err == nil || !strings.Contains(err.Error(), args[1]) {
			return fmt.Errorf("the status of %s tells %v, want %q", args[0], err, args[1])
		}
		return nil
	})
}

// writing returns the writer, which begins with its first use.
func (s *stage) writing() *Writer {
	if s.writer == nil {
		s.writer, _ = mustWrite(s.t, dialAt(s.t, []string{s.named("west").Endpoint()}, unlimited), WriterConfig{VerifyInterval: time.Second})
	}
	return s.writer
}

// set KEY VALUE: the writer is to hold the key.
func (s *stage) set(args []string) { s.writing().Set(args[0], []byte(args[1])) }

// canary KEY VALUE: the writer is to write the key after all others.
func (s *stage) canary(args []string) {
	s.writing().Canary(args[0], func() []byte { return []byte(args[1]) })
}

// ready: the writer has written all.
func (s *stage) ready([]string) { awaitReady(s.t, s.writer) }

// lose-lease KEY: etcd ends the lease of the key.
func (s *stage) loseLease(args []string) {
	admin := s.named("west").Client()
	resp, err := admin.Get(s.t.Context(), args[0])
	if err != nil || len(resp.Kvs) == 0 || resp.Kvs[0].Lease == 0 {
		s.t.Fatalf("%s has no lease: %v", args[0], err)
	}
	if _, err := admin.Revoke(s.t.Context(), clientv3.LeaseID(resp.Kvs[0].Lease)); err != nil {
		s.t.Fatal(err)
	}
}

// holds PREFIX KEY=VALUE...: west holds just these keys, or will.
func (s *stage) holds(args []string) {
	want := make(map[string]string)
	for _, kv := range args[1:] {
		key, value, _ := strings.Cut(kv, "=")
		want[key] = value
	}
	testutil.Eventually(s.t, testTimeout, func() error {
		resp, err := s.named("west").Client().Get(s.t.Context(), args[0], clientv3.WithPrefix())
		if err != nil {
			return err
		}
		got := make(map[string]string)
		for _, kv := range resp.Kvs {
			got[strings.TrimPrefix(string(kv.Key), args[0])] = string(kv.Value)
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("etcd holds %v, want %v", got, want)
		}
		return nil
	})
}
