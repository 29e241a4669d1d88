// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/weftmesh/weft/kvstore"
)

// Election says how the replicas agree on a leader. It decides who should lead, and how soon another one does; that never
// two of them write is the fence's affair.
type Election struct {
	By ElectionKind
	// LeaseDuration is how long the others wait for a leader that is not heard of. In Kubernetes, a leader that could not
	// renew its lease for RenewDeadline gives up by itself, and each replica looks every RetryPeriod.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// Kubeconfig and Namespace say where the Lease is, for [ElectKubernetes].
	Kubeconfig, Namespace string
}

// ElectionKind is who counts the votes.
type ElectionKind string

// Kinds of elections.
const (
	ElectEtcd       ElectionKind = "etcd"       // the own cluster's etcd
	ElectKubernetes ElectionKind = "kubernetes" // a Lease of the Kubernetes API
	ElectNone       ElectionKind = "none"       // there is one replica; one that starts takes over from one that runs
)

func (e Election) String() string { return string(e.By) }

// Validate refuses what cannot work: a leader must give up before the others stop waiting for it.
func (e Election) Validate() error {
	switch {
	case e.By == ElectNone:
		return nil
	case e.By != ElectEtcd && e.By != ElectKubernetes:
		return fmt.Errorf("election by %q: want kubernetes, etcd or none", string(e.By))
	case e.LeaseDuration < time.Second:
		return fmt.Errorf("lease duration %s: want at least 1s", e.LeaseDuration)
	case e.By == ElectEtcd:
		return nil
	case e.RenewDeadline <= 0 || e.RenewDeadline >= e.LeaseDuration:
		return fmt.Errorf("renew deadline %s: want more than 0 and less than the lease duration, %s", e.RenewDeadline, e.LeaseDuration)
	case e.RetryPeriod <= 0 || e.RetryPeriod*6/5 >= e.RenewDeadline:
		return fmt.Errorf("retry period %s: want more than 0 and less than five sixths of the renew deadline, %s", e.RetryPeriod, e.RenewDeadline)
	}
	return nil
}

// office is an election that was won.
type office struct {
	lost <-chan struct{} // closed when another one may have won
	// confirm returns an error unless the election, asked now, still says so.
	confirm func(context.Context) error
	// resign ends it. It is called once, also when it is lost.
	resign func(context.Context) error
}

// elector is one way to elect.
type elector interface {
	// campaign waits until this replica should lead.
	campaign(ctx context.Context, client *kvstore.Client) (office, error)
}

func newElector(cfg Config) (elector, error) {
	if err := cfg.Election.Validate(); err != nil {
		return nil, fmt.Errorf("operator: %w", err)
	}
	switch cfg.Election.By {
	case ElectEtcd:
		return etcdElector{cfg.Name}, nil
	case ElectKubernetes:
		return newLeaseElector(cfg)
	}
	return &soleElector{name: cfg.Name}, nil
}

// electionPath is where replicas queue in etcd.
const electionPath = "weft/operator/election"

// etcdElector elects by a lock of the own cluster's etcd. How long a leader that is not heard of keeps it is LockTTL of the
// client's configuration.
type etcdElector struct{ name string }

func (e etcdElector) campaign(ctx context.Context, client *kvstore.Client) (office, error) {
	l, err := client.Campaign(ctx, electionPath, []byte(e.name))
	if err != nil {
		return office{}, err
	}
	confirm := func(ctx context.Context) error {
		leader, ok, err := client.Leader(ctx, electionPath)
		if err == nil && (!ok || leader.Key != l.Key()) {
			err = errLost
		}
		return err
	}
	return office{lost: l.Lost(), confirm: confirm, resign: l.Resign}, nil
}

// errSucceeded indicates that another replica took over where there should be one.
var errSucceeded = errors.New("another operator has taken over although there is no election: run one, or choose --election kubernetes or etcd")

// soleElector is for one replica. It leads at once, but never again after another one took over.
type soleElector struct {
	name string
	won  bool
}

func (s *soleElector) campaign(ctx context.Context, client *kvstore.Client) (office, error) {
	kv, ok, err := client.Get(ctx, FenceKey)
	if err != nil {
		return office{}, err
	}
	if by := parseLeader(kv.Value).Name; s.won && ok && by != s.name {
		return office{}, fmt.Errorf("%w: %s", errSucceeded, by)
	}
	s.won = true
	nothing := func(context.Context) error { return nil }
	return office{confirm: nothing, resign: nothing}, nil
}

// Leader is what the fence's key tells of who took it last.
type Leader struct {
	Name     string    `json:"leader"`
	Election string    `json:"election"`
	Since    time.Time `json:"since"`
}

func (l Leader) marshal() []byte {
	value, err := json.Marshal(l)
	if err != nil {
		panic(err) // two strings and a time
	}
	return value
}

// parseLeader takes what it can of a value that anybody may have written.
func parseLeader(value []byte) Leader {
	var l Leader
	if json.Unmarshal(value, &l) != nil {
		return Leader{}
	}
	return l
}
