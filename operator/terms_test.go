// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// replicaEnv makes this test binary a replica of the operator: an etcd's endpoint and a name.
const replicaEnv = "WEFT_TEST_OPERATOR_REPLICA"

const (
	loadPrefix = "load/"
	// leaseOfTests is short, as each change of leader takes as long.
	leaseOfTests = time.Second
)

// load is a duty that writes as much as it can, and goes on for a while when its term is over, as one does that does not know
// it yet. Each value names the term.
type load struct {
	Record
	refused func() // is told when a write is refused because there is another term
}

func (l *load) String() string { return "load" }

func (l *load) Run(ctx context.Context, t *Term) error {
	defer l.Running()()
	w := t.Writer("load")
	var writing sync.WaitGroup
	defer writing.Wait()
	writing.Go(func() { _ = w.Run(ctx) }) // it ends with the term, one way or the other
	const more = 20
	for after, n := 0, 0; after < more; n++ {
		if ctx.Err() != nil {
			after++
		}
		value := fmt.Appendf(nil, "%d %d", t.Fence().Revision, n)
		w.Set(fmt.Sprintf("%swriter-%d", loadPrefix, n%10), value)
		attempt, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		key := fmt.Sprintf("%stxn-%d", loadPrefix, n%10)
		err := t.Txn(attempt, kvstore.Op{Kind: kvstore.OpPut, Key: key, Value: value})
		if err == nil && n%10 == 9 {
			_, err = t.Delete(attempt, kvstore.KV{Key: key, Revision: 1}) // of which there is nothing
		}
		cancel()
		if errors.Is(err, kvstore.ErrFenced) {
			l.refused()
			return err
		}
	}
	return nil
}

// runReplica is what a replica process does until it is killed. It prints a line for each write that was refused.
func runReplica(endpoint, name string) error {
	o, err := New(Config{
		ClusterName: "east", ClusterID: 1, Name: name, Etcd: etcdConfig(endpoint), LeaseTTL: time.Minute, Log: silent,
		Election: Election{By: ElectEtcd, LeaseDuration: leaseOfTests},
		Duties:   []Duty{&load{refused: func() { fmt.Println("refused") }}, NewHeartbeat()},
	})
	if err != nil {
		return err
	}
	return o.Run(context.Background())
}

// process is a replica in a process of its own.
type process struct {
	name    string
	cmd     *exec.Cmd
	refused chan struct{} // has something for each write that was refused
	read    chan struct{} // closed when all it printed was read
}

func startProcess(t *testing.T, endpoint, name string) *process {
	t.Helper()
	p := &process{name: name, cmd: exec.Command(os.Args[0]), refused: make(chan struct{}, 1000), read: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), replicaEnv+"="+endpoint+" "+name)
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
// wakes, etcd's history has at every moment writes of one term alone, the last that began.
//
// mechanism: K5
// lesson: O1 O2
func TestOneTermWrites(t *testing.T) {
	kills, suspensions := 3, 2
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		kills, suspensions = 100, 20
	}
	etcd := testutil.StartEtcd(t)
	all := make(map[string]*process)
	for i := range 3 {
		name := fmt.Sprintf("replica-%d", i)
		all[name] = startProcess(t, etcd.Endpoint(), name)
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
			term = nextTerm(t, etcd, term.revision)
			name := fmt.Sprintf("replica-%d", 3+i)
			delete(all, leader.name)
			all[name] = startProcess(t, etcd.Endpoint(), name)
			continue
		}
		leader.signal(t, syscall.SIGSTOP)
		term = nextTerm(t, etcd, term.revision)
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
			var of, n int64
			if _, err := fmt.Sscan(value, &of, &n); err != nil || of != revision || n < writesOfTerm {
				return fmt.Errorf("%s is %q, not write %d of term %d", kind, value, writesOfTerm, revision)
			}
		}
		return nil
	})
}

// checkHistory reads everything that ever happened to the keys of the load.
func checkHistory(t *testing.T, etcd *testutil.Etcd, leastTerms int) {
	t.Helper()
	var (
		terms, writes, beats int
		term                 int64
		all                  bool
	)
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	const end = "end" // so that the watch comes to one
	etcd.Put(t, end, "")
	for part := range etcd.Client().Watch(ctx, "", clientv3.WithFromKey(), clientv3.WithRev(1)) {
		if err := part.Err(); err != nil && !all {
			t.Fatal(err)
		}
		for _, e := range part.Events {
			key := string(e.Kv.Key)
			switch {
			case key == FenceKey:
				term = e.Kv.ModRevision
				terms++
			case strings.HasPrefix(key, loadPrefix) && e.Type == clientv3.EventTypePut:
				writes++
				if of, _, _ := strings.Cut(string(e.Kv.Value), " "); of != fmt.Sprint(term) {
					t.Fatalf("at revision %d the term is %d, and %s is written of term %s", e.Kv.ModRevision, term, key, of)
				}
			case key == identity.HeartbeatKey:
				beats++
			case key == end:
				all = true
				cancel()
			}
		}
	}
	if !all {
		t.Fatal("the history could not be read to its end")
	}
	if terms < leastTerms || writes < writesOfTerm*leastTerms || beats < leastTerms {
		t.Errorf("%d terms with %d writes and %d heartbeats, want at least %d terms", terms, writes, beats, leastTerms)
	}
	t.Logf("%d terms, %d writes, %d heartbeats", terms, writes, beats)
}
