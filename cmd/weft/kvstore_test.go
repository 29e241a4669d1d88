// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	recorded "github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/kvstore"
)

// newKVStore starts an etcd and returns it with the environment that names it.
func newKVStore(t *testing.T) (*testutil.Etcd, map[string]string) {
	t.Helper()
	etcd, file := testutil.StartEtcd(t), filepath.Join(t.TempDir(), "kvstore.yaml")
	etcd.WriteConfig(t, file)
	return etcd, map[string]string{"WEFT_KVSTORE_CONFIG": file}
}

// must runs a command line that succeeds, and returns what it prints.
func must(t *testing.T, env map[string]string, args ...string) string {
	t.Helper()
	code, stdout, stderr := weft(t, env, args...)
	if code != 0 || stderr != "" {
		t.Fatalf("weft %s: exit code %d, stderr %q", strings.Join(args, " "), code, stderr)
	}
	return stdout
}

func TestKVStoreReads(t *testing.T) {
	etcd, env := newKVStore(t)
	etcd.Put(t, "cilium/state/nodes/v1/west/n1", `{"Name":"n1"}`)
	etcd.Put(t, "cilium/state/nodes/v1/west/n1", `{"Name":"n1","ClusterID":2}`)
	etcd.Put(t, "cilium/state/nodes/v1/west/\x1b[2J\xff", "\u202e\u009bgreen\n\x00")
	etcd.Put(t, "cilium/state/slices/v1/west/web", "(\xb5/\xfd\x04")
	etcd.Put(t, "cilium/state/zero", "")
	for _, tc := range []struct{ golden, args string }{
		{"kvstore-get.txt", "get cilium/state/nodes/v1/west/n1"},
		{"kvstore-get.json", "get cilium/state/nodes/v1/west/n1 -o json"},
		{"kvstore-get-recursive.txt", "get --recursive cilium/"},
		{"kvstore-get-recursive.json", "get --recursive cilium/ -o json"},
		{"kvstore-list.txt", "list cilium/state/"},
		{"kvstore-list.json", "ls cilium/state/ -o json"},
		{"kvstore-list.tsv", "list cilium/state/ -o tsv --no-headers"},
		{"kvstore-list.jsonpath", "list cilium/state/ -o jsonpath={.key}"},
		{"kvstore-get-wide.txt", "get --recursive cilium/ -o wide"},
		{"kvstore-get.yaml", "get --recursive cilium/ -o yaml"},
	} {
		t.Run(tc.golden, func(t *testing.T) {
			stdout := must(t, env, strings.Fields("kvstore "+tc.args)...)
			golden(t, tc.golden, stdout)
			if i := strings.IndexFunc(stdout, func(r rune) bool { return r != '\n' && r != '\t' && (r < ' ' || r == 0x7f || r == 0x9b || r == 0x202e) }); i >= 0 {
				t.Errorf("the output would drive a terminal: %q", stdout[i:min(i+20, len(stdout))])
			}
		})
	}
}

// A dump, loaded into an etcd that has lost everything, makes the etcd that was dumped.
func TestKVStoreDumpAndLoad(t *testing.T) {
	etcd, env := newKVStore(t)
	etcd.Load(t, recorded.Path(t, "kvstore-state-west.jsonl"))
	etcd.Put(t, "cilium/bad\xff", "x")
	dump := must(t, env, "kvstore", "get", "--recursive", "cilium/", "-o", "json")
	keys := strings.Count(dump, "\n")
	if want := len(recorded.Lines[json.RawMessage](t, "kvstore-state-west.jsonl")) + 1; keys != want {
		t.Errorf("the dump has %d keys, want %d", keys, want)
	}
	file := filepath.Join(t.TempDir(), "dump")
	if err := os.WriteFile(file, []byte(dump), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, want := must(t, env, "kvstore", "delete", "--recursive", "cilium/"), fmt.Sprintf("%d keys deleted\n", keys); got != want {
		t.Errorf("delete printed %q, want %q", got, want)
	}
	if got, want := must(t, env, "kvstore", "set", "--from", file), fmt.Sprintf("%d keys written\n", keys); got != want {
		t.Errorf("set printed %q, want %q", got, want)
	}
	if diff := cmp.Diff(values(t, dump), values(t, must(t, env, "kvstore", "get", "--recursive", "cilium/", "-o", "json"))); diff != "" {
		t.Errorf("after dump and load (-want +got)\n%s", diff)
	}
}

// values are the keys and values of a dump.
func values(t *testing.T, dump string) map[string]string {
	t.Helper()
	of := make(map[string]string)
	for line := range strings.Lines(dump) {
		key, value, err := parseKeyLine([]byte(line))
		if err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		of[key] = string(value)
	}
	return of
}

func TestKVStoreWrites(t *testing.T) {
	etcd, env := newKVStore(t)
	if out := must(t, env, "kvstore", "set", "a/1", "one"); out != "" {
		t.Errorf("set printed %q", out)
	}
	for format, want := range map[string]string{
		"wide": "", "tsv": "1\n", "jsonpath={.written}": "1\n", "yaml": "apiVersion: " + api.Version + "\nkind: KVStoreWriting\nwritten: 1\n",
	} {
		if out := must(t, env, "kvstore", "set", "a/1", "one", "-o", format); out != want {
			t.Errorf("set -o %s printed %q, want %q", format, out, want)
		}
	}
	if got, ok := etcd.Get(t, "a/1"); !ok || got != "one" {
		t.Errorf("a/1 is %q, %v", got, ok)
	}
	if got := must(t, env, "kvstore", "delete", "a/1"); got != "1 key deleted\n" {
		t.Errorf("delete printed %q", got)
	}

	const many = 2345 // several transactions
	var ops []clientv3.Op
	for i := range many {
		if ops = append(ops, clientv3.OpPut(fmt.Sprintf("many/%d", i), "")); len(ops) == 100 || i == many-1 {
			if _, err := etcd.Client().Txn(t.Context()).Then(ops...).Commit(); err != nil {
				t.Fatal(err)
			}
			ops = nil
		}
	}
	etcd.Put(t, "many0", "beside")
	var result struct{ Deleted int }
	if err := json.Unmarshal([]byte(must(t, env, "kvstore", "delete", "--recursive", "many/", "-o", "json")), &result); err != nil || result.Deleted != many {
		t.Errorf("deleted %d, want %d: %v", result.Deleted, many, err)
	}
	if got := must(t, env, "kvstore", "get", "--recursive", "many"); got != "many0 => beside\n" {
		t.Errorf("left is %q", got)
	}
}

func TestKVStoreLeases(t *testing.T) {
	etcd, env := newKVStore(t)
	lease, err := etcd.Client().Grant(t.Context(), 900)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"b", "a"} {
		if _, err := etcd.Client().Put(t.Context(), key, "", clientv3.WithLease(lease.ID)); err != nil {
			t.Fatal(err)
		}
	}
	if out := must(t, env, "kvstore", "leases"); !strings.Contains(out, fmt.Sprintf("%x   ", lease.ID)) || !strings.Contains(out, "900s      2      a\n") {
		t.Errorf("leases printed\n%s", out)
	}
	var list struct{ Items []leaseJSON }
	if err := json.Unmarshal([]byte(must(t, env, "kvstore", "leases", "-o", "json")), &list); err != nil || len(list.Items) != 1 {
		t.Fatalf("leases: %v, %v", list, err)
	}
	got := list.Items[0]
	if got.TTL < 800 || got.TTL > 900 {
		t.Errorf("ttl %d", got.TTL)
	}
	got.TTL = 0
	if diff := cmp.Diff(leaseJSON{ID: fmt.Sprintf("%x", lease.ID), Granted: 900, Keys: []string{"a", "b"}}, got); diff != "" {
		t.Errorf("lease (-want +got)\n%s", diff)
	}
}

// watching is `weft kvstore watch` in this process.
type watching struct {
	stdout, stderr *buffer
	stop           func() int
}

func startWatch(t *testing.T, env map[string]string, args ...string) watching {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w, code := watching{stdout: new(buffer), stderr: new(buffer)}, make(chan int, 1)
	e := environment{ctx: ctx, stdout: w.stdout, stderr: w.stderr, lookup: lookupIn(env), now: time.Now}
	go func() { code <- run(e, append([]string{"kvstore", "watch"}, args...)) }()
	w.stop = func() int {
		cancel()
		return <-code
	}
	return w
}

func (w watching) await(t *testing.T, want string) {
	t.Helper()
	testutil.Eventually(t, 10*time.Second, func() error {
		if diff := cmp.Diff(want, w.stdout.String()); diff != "" {
			return fmt.Errorf("printed (-want +got)\n%s%s", diff, w.stderr.String())
		}
		return nil
	})
}

func TestKVStoreWatch(t *testing.T) {
	etcd, env := newKVStore(t)
	etcd.Put(t, "a/1", "one")
	etcd.Put(t, "ab", "beside")
	w := startWatch(t, env, "a")
	w.await(t, "created  a/1 => one\nsynced   a/ at revision 3\n")
	changes := startWatch(t, env, "a/", "--changes-only", "-o", "json")
	testutil.Eventually(t, 10*time.Second, func() error {
		if !strings.Contains(changes.stdout.String(), "synced") {
			return fmt.Errorf("stdout %q, stderr %q", changes.stdout.String(), changes.stderr.String())
		}
		return nil
	})
	etcd.Put(t, "a/1", "two\x1b[2J")
	etcd.Put(t, "a/2", "\xff")
	etcd.Delete(t, "a/1")
	w.await(t, "created  a/1 => one\nsynced   a/ at revision 3\nmodified a/1 => two\\x1b[2J\ncreated  a/2 => \\xff\ndeleted  a/1\n")
	const meta = `{"apiVersion":"weft/v1","kind":"KVStoreEvent",`
	changes.await(t, meta+`"event":"synced","revision":3}`+"\n"+
		meta+`"event":"modified","key":"a/1","value":"two\u001b[2J","revision":4}`+"\n"+
		meta+`"event":"created","key":"a/2","value_base64":"/w==","revision":5}`+"\n"+
		meta+`"event":"deleted","key":"a/1","revision":6}`+"\n")
	etcd.Stop(t)
	testutil.Eventually(t, 10*time.Second, func() error {
		if !strings.HasPrefix(w.stderr.String(), "weft: watch a/: ") {
			return fmt.Errorf("stderr %q", w.stderr.String())
		}
		return nil
	})
	for _, w := range []watching{w, changes} {
		if code := w.stop(); code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

func TestKVStoreErrors(t *testing.T) {
	_, env := newKVStore(t)
	dir := t.TempDir()
	write := func(name, content string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	nobody, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := write("closed", "endpoints:\n- http://"+nobody.Addr().String()+"\n")
	_ = nobody.Close()
	for _, tc := range []struct {
		args   string
		code   int
		stderr string
	}{
		{"get none", 1, "weft: key none: not found (--recursive reads the keys that begin with it)\n"},
		{"delete none", 1, "weft: key none: not found (--recursive deletes the keys that begin with it)\n"},
		{"get --recursive none", 0, ""},
		{"get", 2, "weft: KEY is missing"},
		{"set a", 2, "weft: accepts 2 arg(s), received 1"},
		{"set a b --from x", 2, ""},
		{"set --from " + filepath.Join(dir, "none"), 2, "weft: --from: open "},
		{"set --from " + write("bad", `{"key":"a"}`), 1, "weft: 0 keys written, then: " + filepath.Join(dir, "bad") + ":1: key a has neither value nor value_base64\n"},
		{"watch a --timeout 0s", 2, "weft: --timeout 0s: want a duration above 0"},
		{"get a --kvstore-config /nonexistent", 2, "weft: read etcd configuration: open /nonexistent: no such file"},
		{"get a --kvstore-config " + write("yaml", "endpoints: {"), 2, "weft: etcd configuration "},
		{"get a --cluster west", 2, "weft: --cluster west: no agent answers that has its config: say with --clustermesh-config where"},
		{"get a --cluster ../west --clustermesh-config " + dir, 2, "weft: --cluster: "},
		{"get a --cluster west --clustermesh-config " + dir, 2, "weft: read etcd configuration: open " + filepath.Join(dir, "west")},
		{"get a --timeout 300ms --cluster closed --clustermesh-config " + filepath.Dir(closed), 1, "weft: not done within 300ms (--timeout), `weft troubleshoot kvstore` may tell why: get a: "},
	} {
		code, _, stderr := weft(t, env, strings.Fields("kvstore "+tc.args)...)
		if code != tc.code || !strings.HasPrefix(stderr, tc.stderr) || (code == 0 && stderr != "") || strings.Count(stderr, "\n") > 1 {
			t.Errorf("weft kvstore %s: exit code %d, stderr %q\nwant %d, %q", tc.args, code, stderr, tc.code, tc.stderr)
		}
	}
	if code, _, stderr := weft(t, env, "kvstore", "get", ""); code != 2 || !strings.HasPrefix(stderr, "weft: the empty key") {
		t.Errorf("empty key: exit code %d, stderr %q", code, stderr)
	}
	if code, _, stderr := weft(t, nil, "kvstore", "get", "a"); code != 2 || !strings.HasPrefix(stderr, "weft: no etcd is named, ") {
		t.Errorf("no config: exit code %d, stderr %q", code, stderr)
	}
}

// What a dump holds is loaded, or refused; what is loaded prints as it was.
func FuzzParseKeyLine(f *testing.F) {
	f.Add([]byte(`{"key":"a","value":"one"}`))
	f.Add([]byte(`{"key_base64":"/w==","value_base64":"KLUv/Q=="}`))
	f.Add([]byte(`{"key":"a"}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		key, value, err := parseKeyLine(line)
		if err != nil {
			return
		}
		again, err := json.Marshal(makeKey(kvstore.KV{Key: key, Value: value}))
		if err != nil {
			t.Fatal(err)
		}
		if k, v, err := parseKeyLine(again); err != nil || k != key || !bytes.Equal(v, value) {
			t.Errorf("%q, %q became %q, %q: %v", key, value, k, v, err)
		}
	})
}

// What names no etcd is read from those of the running agent; who writes names one.
func TestKVStoreOfAgent(t *testing.T) {
	own, west := testutil.StartEtcd(t), testutil.StartEtcd(t)
	own.Put(t, "a/own", "1")
	west.Put(t, "a/west", "1")
	dir := t.TempDir()
	file, mesh := filepath.Join(dir, "kvstore.yaml"), filepath.Join(dir, "mesh")
	if err := os.Mkdir(mesh, 0o755); err != nil {
		t.Fatal(err)
	}
	own.WriteConfig(t, file)
	west.WriteConfig(t, filepath.Join(mesh, "west"))
	agent := lab(true)
	agent.Config = func() api.Config {
		return api.Config{Meta: api.MetaOf(api.KindConfig), Items: []api.ConfigOption{{Name: "kvstore-config", Value: file}, {Name: "clustermesh-config", Value: mesh}}}
	}
	with, without := map[string]string{"WEFT_API_SOCKET": serveAgent(t, agent)}, map[string]string{"WEFT_API_SOCKET": "/nonexistent"}
	for _, tc := range []struct {
		args string
		env  map[string]string
		code int
		want string
	}{
		{"kvstore get --recursive a/", with, exitOK, "a/own => 1\n"},
		{"kvstore get a/west --cluster west", with, exitOK, "a/west => 1\n"},
		{"kvstore get a/west --cluster west --kvstore-config " + file, with, exitOK, "a/west => 1\n"},
		{"kvstore list a/", without, exitUsage, "weft: no etcd is named, and no agent answers that has one: give --kvstore-config FILE, or --clustermesh-config DIRECTORY with --cluster NAME\n"},
		{"kvstore list a/ --cluster west", without, exitUsage, "weft: --cluster west: no agent answers that has its config: say with --clustermesh-config where it is\n"},
		{"kvstore delete a/own", with, exitUsage, "weft: no etcd is named: give --kvstore-config FILE, or --clustermesh-config DIRECTORY with --cluster NAME\n"},
		{"clusters remove north", with, exitNot, "weft: cluster north has no config in " + mesh + ": `weft clusters list` shows which are followed, --clustermesh-config names another directory\n"},
		{"clusters remove west", with, exitOK, "cluster west is removed from " + mesh + "/west: a running agent withdraws what it claimed\n"},
	} {
		if code, stdout, stderr := weft(t, tc.env, strings.Fields(tc.args)...); code != tc.code || stdout+stderr != tc.want {
			t.Errorf("weft %s: exit code %d, %q, want %d, %q", tc.args, code, stdout+stderr, tc.code, tc.want)
		}
	}
	if code, _, stderr := weft(t, with, "clusters", "add", "west", "--endpoint", west.Endpoint(), "--force"); code != exitOK {
		t.Errorf("weft clusters add: exit code %d, %s", code, stderr)
	}
	if _, err := os.Stat(filepath.Join(mesh, "west")); err != nil {
		t.Errorf("it is not where the agent looks: %v", err)
	}
}
