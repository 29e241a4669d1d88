// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/source"
)

// replicaEnv makes this test binary a replica of the operator: an etcd's endpoint, a name and a directory of services.
const replicaEnv = "WEFT_TEST_OPERATOR_REPLICA"

const (
	loadPrefix = "load/"
	// leaseOfTests is short, as each change of leader takes as long.
	leaseOfTests = time.Second
)

// load is a duty that writes as much as it can, and goes on for a while when its term is over, as one does that does not know
// it yet.
type load struct {
	Record
	refused func() // is told when a write is refused because there is another term
}

// stamp is the value of a write of the load. All writes of transactions of one term are there, one after the other: each is
// tried until it is confirmed.
type stamp struct {
	Term int64     `json:"term"`
	N    int       `json:"n"`
	At   time.Time `json:"at"` // when it was first tried
}

func (l *load) String() string { return "load" }

func (l *load) Run(ctx context.Context, t *Term) error {
	defer l.Running()()
	w := t.Writer("load")
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() { _ = w.Run(ctx) }) // it ends with the term, one way or the other
	const more = 20
	for after, n := 0, 0; after < more; {
		if ctx.Err() != nil {
			after++
		}
		value, err := json.Marshal(stamp{t.Fence().Revision, n, time.Now()})
		if err != nil {
			return err
		}
		w.Set(fmt.Sprintf("%swriter-%d", loadPrefix, n%10), value)
		attempt, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		key := fmt.Sprintf("%stxn-%d", loadPrefix, n%10)
		err = t.Txn(attempt, kvstore.Op{Kind: kvstore.OpPut, Key: key, Value: value})
		if err == nil {
			if n++; n%10 == 0 {
				_, err = t.Delete(attempt, kvstore.KV{Key: key, Revision: 1}) // of which there is nothing
			}
		}
		cancel()
		if errors.Is(err, kvstore.ErrFenced) {
			l.refused()
			return err
		}
	}
	return nil
}

// runReplica is what a replica process does until it is killed. It publishes the services of a directory, and prints a line
// for each write that was refused.
func runReplica(endpoint, name, services string) error {
	from := source.NewFiles(services)
	published, err := NewServices(ServicesConfig{ClusterName: "east", ClusterID: 1, Source: from, Form: WholeServices{}})
	if err != nil {
		return err
	}
	o, err := New(Config{
		ClusterName: "east", ClusterID: 1, Name: name, Etcd: etcdConfig(endpoint), LeaseTTL: time.Minute, Log: silent,
		Election: Election{By: ElectEtcd, LeaseDuration: leaseOfTests},
		Duties:   []Duty{&load{refused: func() { fmt.Println("refused") }}, NewHeartbeat(time.Minute), published},
	})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(context.Background())
	group.Go(func() error { return from.Run(ctx) })
	group.Go(func() error { return o.Run(ctx) })
	return group.Wait()
}

// process is a replica in a process of its own.
type process struct {
	name    string
	cmd     *exec.Cmd
	refused chan struct{} // has something for each write that was refused
	read    chan struct{} // closed when all it printed was read
}

func startProcess(t *testing.T, endpoint, name, services string) *process {
	t.Helper()
	p := &process{name: name, cmd: exec.Command(os.Args[0]), refused: make(chan struct{}, 1000), read: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), replicaEnv+"="+endpoint+" "+name+" "+services)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.read)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			select {
			case p.refused <- struct{}{}:
			default:
			}
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	t.Cleanup(func() { p.kill(t) })
	return p
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatalf("%s: %v", p.name, err)
	}
}

// kill ends the process, if it has not been.
func (p *process) kill(t *testing.T) {
	t.Helper()
	if p.cmd.ProcessState != nil {
		return
	}
	p.signal(t, syscall.SIGKILL)
	<-p.read
	_ = p.cmd.Wait() // it was killed
}

// Of three replicas under a load of writes the leader is killed and suspended, again and again. Whatever it believes when it
// wakes, etcd's history has at every moment writes of one term alone, the last that began; what is to be published meanwhile
// the next leader publishes, and nothing of what was confirmed is lost.
//
// mechanism: K5
// lesson: O1 O2
func TestOneTermWrites(t *testing.T) {
	kills, suspensions := 3, 2
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		kills, suspensions = 100, 20
	}
	etcd, services := testutil.StartEtcd(t), t.TempDir()
	all := make(map[string]*process)
	for i := range 3 {
		name := fmt.Sprintf("replica-%d", i)
		all[name] = startProcess(t, etcd.Endpoint(), name, services)
	}
	steps := make([]bool, kills+suspensions) // true: a suspension
	for i := range suspensions {
		steps[i] = true
	}
	rand.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	term := nextTerm(t, etcd, 0)
	for i, suspend := range steps {
		leader := all[parseLeader(term.value).Name]
		awaitWrites(t, etcd, term.revision)
		if !suspend {
			leader.kill(t)
		} else {
			leader.signal(t, syscall.SIGSTOP)
		}
		publishNumber(t, services, i) // while nobody leads
		term = nextTerm(t, etcd, term.revision)
		awaitNumber(t, etcd, i)
		if !suspend {
			name := fmt.Sprintf("replica-%d", 3+i)
			delete(all, leader.name)
			all[name] = startProcess(t, etcd.Endpoint(), name, services)
			continue
		}
		awaitWrites(t, etcd, term.revision)
		leader.signal(t, syscall.SIGCONT)
		select {
		case <-leader.refused:
		case <-time.After(testTimeout):
			t.Fatalf("%s, which was suspended, has tried nothing", leader.name)
		}
	}
	awaitWrites(t, etcd, term.revision)
	for _, p := range all {
		p.kill(t)
	}
	checkHistory(t, etcd, kills+suspensions+1)
}

// publishNumber has a service published whose backend is a number.
func publishNumber(t *testing.T, dir string, n int) {
	t.Helper()
	testutil.MustWriteFile(t, filepath.Join(dir, "web.yaml"), fmt.Appendf(nil,
		"{name: web, namespace: shop, global: true, ports: [{name: http, port: 80}], backends: [{ip: 10.1.0.%d}]}\n", n+1))
}

func awaitNumber(t *testing.T, etcd *testutil.Etcd, n int) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		value, _ := etcd.Get(t, servicesOfEast+"shop/web")
		if want := fmt.Sprintf(`"backends":{"10.1.0.%d":`, n+1); !strings.Contains(value, want) {
			return fmt.Errorf("%s has not %s", value, want)
		}
		return nil
	})
}

// written is a key as it was written.
type written struct {
	revision int64
	value    []byte
}

// nextTerm waits for a term that began after a revision.
func nextTerm(t *testing.T, etcd *testutil.Etcd, after int64) (term written) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		resp, err := etcd.Client().Get(t.Context(), FenceKey)
		if err != nil {
			return err
		}
		if len(resp.Kvs) == 0 || resp.Kvs[0].ModRevision <= after {
			return fmt.Errorf("no term after revision %d", after)
		}
		term = written{resp.Kvs[0].ModRevision, resp.Kvs[0].Value}
		return nil
	})
	return term
}

// writesOfTerm is how many of each kind there are at least before the leader loses its life.
const writesOfTerm = 100

// awaitWrites waits until many writes of both kinds of a term, and its heartbeat, are in etcd.
func awaitWrites(t *testing.T, etcd *testutil.Etcd, revision int64) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		beat, err := etcd.Client().Get(t.Context(), identity.HeartbeatKey)
		if err != nil {
			return err
		}
		if len(beat.Kvs) == 0 || beat.Kvs[0].ModRevision <= revision {
			return fmt.Errorf("no heartbeat of term %d", revision)
		}
		for _, kind := range []string{"txn-0", "writer-0"} {
			value, _ := etcd.Get(t, loadPrefix+kind)
			var s stamp
			if err := json.Unmarshal([]byte(value), &s); err != nil || s.Term != revision || s.N < writesOfTerm {
				return fmt.Errorf("%s is %q, not write %d of term %d", kind, value, writesOfTerm, revision)
			}
		}
		return nil
	})
}

// history is what is read of everything that ever happened to etcd.
type history struct {
	term                 int64 // the present one
	terms, writes, beats int
	next                 int       // write of a transaction of the term
	last                 time.Time // write of any term
	stopped              bool      // no heartbeat since the last leader that had one
	died                 time.Time // when the last write of that leader was tried
	beating              bool      // there was one, and how late the next write tells
	longest              time.Duration
}

// take checks one event.
func (h *history) take(e *clientv3.Event) error {
	key := string(e.Kv.Key)
	switch {
	case key == FenceKey:
		if !h.stopped && h.terms > 0 {
			h.stopped, h.died = true, h.last
		}
		h.term, h.next = e.Kv.ModRevision, 0
		h.terms++
	case key == identity.HeartbeatKey && e.Type == clientv3.EventTypePut:
		h.beats++
		h.beating = h.stopped
	case strings.HasPrefix(key, loadPrefix) && e.Type == clientv3.EventTypePut:
		return h.write(key, e.Kv)
	}
	return nil
}

func (h *history) write(key string, kv *mvccpb.KeyValue) error {
	var s stamp
	if err := json.Unmarshal(kv.Value, &s); err != nil {
		return err
	}
	h.writes++
	if s.Term != h.term {
		return fmt.Errorf("at revision %d the term is %d, and %s is written of term %d", kv.ModRevision, h.term, key, s.Term)
	}
	if strings.HasPrefix(key, loadPrefix+"txn-") {
		if s.N != h.next && s.N != h.next-1 { // an answer that was lost has a write tried again
			return fmt.Errorf("at revision %d, after write %d of term %d comes %d", kv.ModRevision, h.next-1, s.Term, s.N)
		}
		h.next = s.N + 1
	}
	h.last = s.At
	if h.beating { // the heartbeat itself tells seconds alone
		h.beating, h.stopped, h.longest = false, false, max(h.longest, s.At.Sub(h.died))
	}
	return nil
}

// checkHistory reads everything that ever happened to the keys of the load.
func checkHistory(t *testing.T, etcd *testutil.Etcd, leastTerms int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	const end = "end" // so that the watch comes to one
	etcd.Put(t, end, "")
	var (
		h   history
		all bool
	)
	for part := range etcd.Client().Watch(ctx, "", clientv3.WithFromKey(), clientv3.WithRev(1)) {
		if err := part.Err(); err != nil && !all {
			t.Fatal(err)
		}
		for _, e := range part.Events {
			if err := h.take(e); err != nil {
				t.Fatal(err)
			}
			if string(e.Kv.Key) == end {
				all = true
				cancel()
			}
		}
	}
	if !all {
		t.Fatal("the history could not be read to its end")
	}
	if h.terms < leastTerms || h.writes < writesOfTerm*leastTerms || h.beats < leastTerms {
		t.Errorf("%d terms with %d writes and %d heartbeats, want at least %d terms", h.terms, h.writes, h.beats, leastTerms)
	}
	t.Logf("%d terms, %d writes, %d heartbeats, the longest without a leader's heartbeat %s", h.terms, h.writes, h.beats, h.longest)
	if os.Getenv("WEFT_TEST_FAULTS") == "" {
		return
	}
	grant, err := etcd.Client().Grant(t.Context(), int64(leaseOfTests/time.Second))
	if err != nil {
		t.Fatal(err)
	}
	lease := time.Duration(grant.TTL) * time.Second // etcd has a least one
	if most := lease + 2*time.Second; h.longest > most {
		t.Errorf("after the last write of a leader it took up to %s until the heartbeat of the next one, want at most the lease, %s, and 2s", h.longest, lease)
	}
}
