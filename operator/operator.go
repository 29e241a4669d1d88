// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// FenceKey is the key of the own cluster's etcd that every leader writes when its term begins, and that every write of
// the term compares. Whatever election is used, there is one.
const FenceKey = "weft/operator/term"

// Config is what an [Operator] works with.
type Config struct {
	ClusterName string
	ClusterID   identity.ClusterID // 0: in no mesh
	// Name tells this replica from the others: see [NewName].
	Name string
	// Etcd is the own cluster's.
	Etcd kvstore.Config
	// LeaseTTL is how long what is published outlives the last leader.
	LeaseTTL time.Duration
	Election Election
	// Duties are run by the leader, all at once.
	Duties []Duty
	Log    *slog.Logger
}

// Operator is one replica.
type Operator struct {
	cfg      Config
	election elector
	ready    chan struct{}

	mu     sync.Mutex
	client *kvstore.Client // nil between two connections; guarded by mu
	term   *Term           // nil while another one leads; guarded by mu
	terms  int             // that this replica has had; guarded by mu
	leader Leader          // as last seen; guarded by mu
	err    error           // why the last term ended or did not begin; guarded by mu
	errAt  time.Time       // guarded by mu
}

// New assembles a replica. Neither etcd nor Kubernetes need be there.
func New(cfg Config) (*Operator, error) {
	if cfg.ClusterName == "" || cfg.Name == "" || cfg.Log == nil {
		return nil, errors.New("operator: a replica needs ClusterName, Name and Log")
	}
	cfg.Etcd.LockTTL = cfg.Election.LeaseDuration
	o := &Operator{cfg: cfg, ready: make(chan struct{})}
	var err error
	if o.election, err = newElector(cfg); err != nil {
		return nil, err
	}
	return o, nil
}

// nameLetters are those that Kubernetes makes names of: no two of them look alike, and they make no words.
const nameLetters = "bcdfghjklmnpqrstvwxz2456789"

// NewName returns a name that no other replica has, on the same host neither: the host's name with ten random characters.
func NewName(host string) string {
	suffix := make([]byte, 10)
	for i := range suffix {
		suffix[i] = nameLetters[rand.IntN(len(nameLetters))]
	}
	return host + "-" + string(suffix)
}

func (o *Operator) String() string { return "operator" }

// Ready is closed once it is known who leads.
func (o *Operator) Ready() <-chan struct{} { return o.ready }

// Bounds of the pause after a term that ended, or did not begin.
const retryLeast, retryMost = 200 * time.Millisecond, 15 * time.Second

// Run takes part in the election until ctx ends, and then gives up what was won, so that nobody has to wait for it. Its
// error is that there is no election, and another replica all the same.
func (o *Operator) Run(ctx context.Context) error {
	pause := retryLeast
	for ctx.Err() == nil {
		begun := time.Now()
		err := o.attempt(ctx)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errSucceeded) {
			return err
		}
		if time.Since(begun) > time.Minute {
			pause = retryLeast
		}
		o.failed(err)
		o.cfg.Log.Warn("the term is over, or did not begin; trying again", "err", err, "pause", pause)
		if !sleep(ctx, jitter(pause)) {
			break
		}
		pause = min(2*pause, retryMost)
	}
	return nil
}

// attempt is one connection to etcd and at most one term: so nothing of an earlier one's leads a later one astray, also
// where another etcd has taken the place of the one before.
func (o *Operator) attempt(ctx context.Context) error {
	client, err := kvstore.Dial(o.cfg.Etcd, o.cfg.Log)
	if err != nil {
		return err
	}
	defer client.Close()
	o.setClient(client)
	defer o.setClient(nil)

	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer stop()
	watch.Go(func() { o.watchLeader(watching, client) })

	office, err := o.election.campaign(ctx, client)
	if err != nil {
		return fmt.Errorf("election: %w", err)
	}
	err = o.govern(ctx, client, office)
	// Only now, when nothing of the term is under way any more, may the next one begin sooner than it would by itself.
	resign, cancel := context.WithTimeout(context.WithoutCancel(ctx), resignTimeout)
	defer cancel()
	if err := office.resign(resign); err != nil {
		o.cfg.Log.Info("the leadership could not be given up and ends by itself", "err", err)
	}
	return err
}

// resignTimeout bounds how long a replica that ends, or has lost its term, waits for who counts the votes.
const resignTimeout = 2 * time.Second

// watchLeader tells who leads until ctx ends or the connection is of no more use.
func (o *Operator) watchLeader(ctx context.Context, client *kvstore.Client) {
	watcher := kvstore.NewKeyWatcher(FenceKey, func(events []kvstore.Event) {
		for _, e := range events {
			switch e.Kind {
			case kvstore.Deleted:
				o.leads(Leader{})
			case kvstore.Synced:
				o.once()
			default:
				o.leads(parseLeader(e.Value))
			}
		}
	})
	if err := watcher.Run(ctx, client); err != nil {
		o.failed(fmt.Errorf("watch %s: %w", FenceKey, err))
	}
}

func (o *Operator) leads(l Leader) {
	o.mu.Lock()
	before := o.leader
	o.leader = l
	o.mu.Unlock()
	if l.Name != "" && l != before && l.Name != o.cfg.Name {
		o.cfg.Log.Info("Leader re-election complete", "newLeader", l.Name, "operatorID", o.cfg.Name)
	}
}

func (o *Operator) once() {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.ready:
	default:
		close(o.ready)
	}
}

func (o *Operator) setClient(client *kvstore.Client) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.client = client
}

func (o *Operator) failed(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err, o.errAt = err, time.Now()
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// jitter returns a time from d to half as long again, so that replicas which lost the same server do not come back as one.
func jitter(d time.Duration) time.Duration { return d + rand.N(d/2+1) }
