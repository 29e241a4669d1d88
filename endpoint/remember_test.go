// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
)

// mustRemember waits until the file in dir says what an allocator knows.
func mustRemember(t *testing.T, dir string, a *allocating) {
	t.Helper()
	testutil.Eventually(t, patience, func() error {
		var r remembered
		content, err := os.ReadFile(filepath.Join(dir, "identities.json"))
		if err == nil {
			err = json.Unmarshal(content, &r)
		}
		if err != nil {
			return err
		}
		for text := range a.sets {
			id, _ := a.Identity(text)
			if r.Identities[fmt.Sprint(uint32(id))] != text {
				return fmt.Errorf("%s is %s, the file says %v", text, id, r.Identities)
			}
		}
		if len(r.Identities) != len(a.sets) {
			return fmt.Errorf("the file says %v", r.Identities)
		}
		return nil
	})
}

// An agent that starts while etcd is away has the identities that the one before it had, and no other; when etcd is back it
// makes sure of them.
//
// mechanism: J2, J3
func TestIdentitiesOfBeforeTheRestart(t *testing.T) {
	etcd, dir := testutil.StartEtcd(t), t.TempDir()
	a := startAllocatorIn(t, dir, etcd, "172.18.1.1")
	a.want("web", "db", "gone")
	a.settle(t)
	web, db := a.id("web"), a.id("db")
	delete(a.sets, labelsOf("gone").String())
	a.Want(a.sets, true)
	mustRemember(t, dir, a)
	a.stop()
	etcd.Stop(t)

	b := startAllocatorIn(t, dir, etcd, "172.18.1.1")
	<-b.Recalled()
	b.sets[labelsOf("web").String()] = labelsOf("web")
	b.Want(b.sets, false) // a source has not been heard yet
	for _, app := range []string{"db", "new"} {
		b.sets[labelsOf(app).String()] = labelsOf(app)
	}
	b.Want(b.sets, true)
	for app, want := range map[string]identity.ID{"web": web, "db": db, "new": identity.Invalid} {
		if got := b.id(app); got != want {
			t.Errorf("%s is %s, want %s", app, got, want)
		}
	}
	if _, err := b.Identity(labelsOf("web").String()); !errors.Is(err, errUnconfirmed) {
		t.Errorf("the identity is taken for certain: %v", err)
	}
	if s := b.Status(); s.Restored != 2 || s.Waiting != 1 {
		t.Errorf("status %+v", s)
	}
	etcd.Restart(t)
	testutil.Eventually(t, patience, func() error {
		if s := b.Status(); s.Restored != 0 || s.Waiting != 0 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if b.id("web") != web || b.id("db") != db || b.id("new") == identity.Invalid {
		t.Errorf("web is %s, was %s; db is %s, was %s; new is %s", b.id("web"), web, b.id("db"), db, b.id("new"))
	}
	b.keep()
	mustRemember(t, dir, b)
}

// What etcd says when it is back counts: an identity that stands for other labels now is given up, and was never announced;
// labels that others use by another identity get that; one that nobody knows any more is bound again.
//
// mechanism: J5
func TestEtcdHasTheLastWord(t *testing.T) {
	etcd, dir := testutil.StartEtcd(t), t.TempDir()
	a := startAllocatorIn(t, dir, etcd, "172.18.1.1")
	a.want("taken", "moved", "lost")
	a.settle(t)
	taken, moved, lost := a.id("taken"), a.id("moved"), a.id("lost")
	mustRemember(t, dir, a)
	a.stop()
	for app, id := range map[string]identity.ID{"taken": taken, "moved": moved, "lost": lost} {
		etcd.Delete(t, identity.MasterKey(id))
		etcd.Delete(t, identity.SlaveKey(labelsOf(app), a.host))
	}
	etcd.Put(t, identity.MasterKey(taken), labelsOf("other").String())
	elsewhere := lost ^ 1
	etcd.Put(t, identity.MasterKey(elsewhere), labelsOf("moved").String())
	etcd.Stop(t)

	b := startAllocatorIn(t, dir, etcd, "172.18.1.1")
	<-b.Recalled()
	b.want("taken", "moved", "lost")
	if b.id("taken") != taken || b.id("moved") != moved || b.id("lost") != lost {
		t.Error("the identities of before are not known")
	}
	etcd.Restart(t)
	testutil.Eventually(t, patience, func() error {
		if s := b.Status(); s.Restored != 0 || s.Waiting != 0 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if got := b.id("taken"); got == taken || got == identity.Invalid {
		t.Errorf("labels whose identity stands for others have %s", got)
	}
	if b.id("moved") != elsewhere || b.id("lost") != lost {
		t.Errorf("moved is %s, want %s; lost is %s, want %s", b.id("moved"), elsewhere, b.id("lost"), lost)
	}
	if got, _ := etcd.Get(t, identity.MasterKey(taken)); got != labelsOf("other").String() {
		t.Errorf("the identity that others have is bound to %q", got)
	}
}

// A restored identity is in force on the node and told to nobody before etcd has confirmed it; what was told before stays.
//
// mechanism: J3
// lesson: A2
func TestRestoredIsInForceAndNotAnnounced(t *testing.T) {
	etcd, dir := testutil.StartEtcd(t), t.TempDir()
	a := startAllocatorIn(t, dir, etcd, "172.18.1.1")
	declared := t.TempDir()
	before := newBenchOver(t, declared, func(c *Config) { c.Publisher, c.Allocator = a.writer, a.Allocator })
	before.write("a.yaml", "name: web\nnamespace: shop\nip: 10.1.1.10\nlabels: {app: web}\n")
	var id identity.ID
	testutil.Eventually(t, patience, func() error {
		before.scan(true)
		e := before.Status().Endpoints[0]
		if id = e.Identity; e.State != Identified {
			return fmt.Errorf("the endpoint is %+v", e)
		}
		return nil
	})
	if err := a.writer.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	announcedBefore, _ := etcd.Get(t, announced+"10.1.1.10")
	testutil.Eventually(t, patience, func() error {
		_, err := os.Stat(filepath.Join(dir, "identities.json"))
		return err
	})
	a.stop()
	etcd.Stop(t)

	b := startAllocatorIn(t, dir, etcd, "172.18.1.1")
	<-b.Recalled()
	after := newBenchOver(t, declared, func(c *Config) {
		c.Publisher, c.Allocator, c.Leftovers = b.writer, b.Allocator, b.client
	})
	after.scan(true)
	after.wantIPs(fmt.Sprintf("10.1.1.10 %s shop/web", id))
	if e := after.Status().Endpoints[0]; e.State != Restored || e.Identity != id || !strings.Contains(e.Reason, "restart") {
		t.Errorf("the endpoint is %+v", e)
	}
	if s := b.writer.Status(); s.Keys != 0 {
		t.Errorf("%d keys are published", s.Keys)
	}
	if labels, ok := after.cfg.Identities.Labels(id); !ok || !strings.Contains(labels.String(), "k8s:app=web;") {
		t.Errorf("labels %s", labels)
	}
	etcd.Restart(t)
	testutil.Eventually(t, patience, func() error { return after.withdraw(t.Context(), directly) }) // what is not certain is not withdrawn
	if got, _ := etcd.Get(t, announced+"10.1.1.10"); got != announcedBefore {
		t.Errorf("announced is %q, was %q", got, announcedBefore)
	}
	testutil.Eventually(t, patience, func() error {
		after.update(true)
		if e := after.Status().Endpoints[0]; e.State != Identified || e.Identity != id {
			return fmt.Errorf("the endpoint is %+v", e)
		}
		return nil
	})
}

// A file that cannot be understood, whatever its damage, is set aside and told of; identities are found again in etcd.
func TestCorruptMemory(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	cfg := &AllocatorConfig{StateDir: t.TempDir(), ClusterName: "east", Log: log}
	id, _ := mustLayout(t).Range(1)
	good := newMemory(cfg, func() {})
	if err := good.write(map[string]identity.ID{labelsOf("web").String(): id, labelsOf("db").String(): id + 1}); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(good.file.path)
	if err != nil {
		t.Fatal(err)
	}
	if got := good.recall(mustLayout(t), 1); len(got) != 2 || got[labelsOf("web").String()] != id {
		t.Fatalf("the file says %v", got)
	}
	if got := good.recall(mustLayout(t), 2); len(got) != 0 || len(good.problems()) != 0 {
		t.Errorf("an agent of another cluster has %v, %v", got, good.problems())
	}
	damaged := [][]byte{[]byte(strings.Replace(string(content), `"version":1`, `"version":2`, 1))}
	for i := range len(content) - 1 { // without the end of the line it is whole
		damaged = append(damaged, content[:i])
	}
	for i, b := range content {
		if flipped := append([]byte(nil), content...); b != '\n' {
			flipped[i] ^= 1
			damaged = append(damaged, flipped)
		}
	}
	for _, content := range damaged {
		dir := t.TempDir()
		cfg := &AllocatorConfig{StateDir: dir, ClusterName: "east", Log: log}
		told := 0
		m := newMemory(cfg, func() { told++ })
		testutil.MustWriteFile(t, m.file.path, content)
		known := m.recall(mustLayout(t), 1)
		m.lookAside()
		for text, got := range known {
			// A spoilt name of a field, or of the cluster, may take all away, but nothing may be wrong.
			if text != labelsOf("web").String() && text != labelsOf("db").String() || got != id && got != id+1 {
				t.Fatalf("%q gives %v", content, known)
			}
		}
		if len(known) == 0 && (len(m.problems()) != 1 || told == 0) {
			t.Fatalf("%q gives nothing, and problems %v", content, m.problems())
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

// What keeps the file from being written is shown, until it can be.
func TestMemoryThatCannotBeWritten(t *testing.T) {
	etcd, dir := testutil.StartEtcd(t), t.TempDir()
	state := filepath.Join(dir, "state")
	testutil.MustWriteFile(t, state, nil) // where a directory should be
	a := startAllocatorIn(t, state, etcd, "172.18.1.1")
	a.want("web")
	a.settle(t)
	testutil.Eventually(t, patience, func() error {
		if p := a.Problems(); len(p) != 1 || !strings.Contains(p[0].Message, "not kept for a restart") {
			return fmt.Errorf("problems %v", p)
		}
		return nil
	})
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, patience, func() error {
		if p := a.Problems(); len(p) != 0 {
			return fmt.Errorf("problems %v", p)
		}
		return nil
	})
	mustRemember(t, state, a)
}

// Nothing is in force before what an earlier agent had is known: the kernel has that still.
func TestRegistryWaitsForTheMemory(t *testing.T) {
	never := &forgetful{recalled: make(chan struct{})}
	b := newBench(t, func(c *Config) { c.Allocator = never })
	b.write("a.yaml", "name: web\nnamespace: shop\nip: 10.1.1.10\nlabels: {app: web}\n")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	testutil.Eventually(t, patience, func() error {
		if len(b.files.Workloads()) == 0 {
			return errors.New("the file has not been read")
		}
		return nil
	})
	b.wantIPs()
	close(never.recalled)
	<-b.Ready()
	b.wantIPs("10.1.1.10 65800 shop/web")
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// forgetful knows one identity, late.
type forgetful struct{ recalled chan struct{} }

func (f *forgetful) Recalled() <-chan struct{}             { return f.recalled }
func (f *forgetful) Want(map[string]identity.Labels, bool) {}
func (f *forgetful) Changed() <-chan struct{}              { return nil }
func (f *forgetful) Problems() []SourceError               { return nil }
func (f *forgetful) Identity(string) (identity.ID, error) {
	select {
	case <-f.recalled:
		return 65800, nil
	default:
		return identity.Invalid, nil
	}
}

var _ Identities = (*forgetful)(nil)
