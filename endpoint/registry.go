// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// How often the directory is looked at: by file attributes, and by content for what attributes do not show. A change is
// taken at the second look that sees it, so it is in force after at most twice scanInterval.
const (
	scanInterval     = 200 * time.Millisecond
	thoroughInterval = 30 * time.Second
)

// Publisher makes the cluster's etcd hold a set of keys, in its own time. Implementations are safe for concurrent use
// with themselves; the calls do not block on the network.
type Publisher interface {
	// Set puts a key that is to vanish with this node.
	Set(key string, value []byte)
	// Create puts a key that stays, unless it exists already.
	Create(key string, value []byte)
	// Delete takes back what Set put.
	Delete(key string)
}

// Config is what a [Registry] works with.
type Config struct {
	// Dir holds the files. Empty: there are no endpoints.
	Dir         string
	ClusterName string
	ClusterID   identity.ClusterID
	NodeName    string
	Layout      identity.Layout
	// HostIP is the address of this node, by which others reach its endpoints. It must be valid if Publisher is set.
	HostIP netip.Addr

	IPs        *ipcache.Table
	Identities *identity.Table
	// Publisher takes what other nodes and clusters are to know. Nil: nothing is published.
	Publisher Publisher
	Log       *slog.Logger
}

// Registry keeps this node's endpoints equal to what the files of a directory declare.
type Registry struct {
	cfg     Config
	cluster cluster
	ready   chan struct{}

	// Only Run touches these.
	dir      *directory
	accepted []declaration // what is in force, as declared
	inForce  desired       // and as applied

	mu     sync.Mutex
	status Status // guarded by mu; its slices are replaced, never changed
}

// Status is what there is to know of the endpoints of this node.
type Status struct {
	Endpoints []Endpoint    `json:"endpoints"`
	Errors    []SourceError `json:"errors"`
}

// Endpoint is a workload of this node that is in force.
type Endpoint struct {
	Namespace      string          `json:"namespace"`
	Name           string          `json:"name"`
	ServiceAccount string          `json:"serviceAccount"`
	ID             uint32          `json:"id"`
	IPs            []netip.Addr    `json:"ips"`
	Identity       identity.ID     `json:"identity"`
	Labels         identity.Labels `json:"-"`
	File           string          `json:"file"`
	Line           int             `json:"line"`
}

// SourceError says what is wrong with a file, an entry of it, or the directory (File is empty then).
type SourceError struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"` // where the entry begins; 0: the file as a whole
	Message string `json:"message"`
}

func (e SourceError) Error() string {
	switch {
	case e.File == "":
		return e.Message
	case e.Line == 0:
		return e.File + ": " + e.Message
	}
	return e.File + ":" + strconv.Itoa(e.Line) + ": " + e.Message
}

// New assembles a registry; nothing is read before Run.
func New(cfg Config) (*Registry, error) {
	switch {
	case cfg.IPs == nil || cfg.Identities == nil || cfg.Log == nil:
		return nil, errors.New("endpoint: IPs, Identities and Log are required")
	case cfg.Publisher != nil && !cfg.HostIP.IsValid():
		return nil, errors.New("endpoint: publishing endpoints needs the node's address")
	}
	return &Registry{
		cfg:     cfg,
		cluster: cluster{name: cfg.ClusterName, id: cfg.ClusterID, layout: cfg.Layout},
		dir:     newDirectory(cfg.Dir),
		ready:   make(chan struct{}),
	}, nil
}

func (r *Registry) String() string { return "endpoints" }

// Ready is closed once the directory has been read for the first time and its endpoints are in force.
func (r *Registry) Ready() <-chan struct{} { return r.ready }

// Status returns the endpoints in force, by namespace and name, and what is wrong with the files. Safe for concurrent use.
func (r *Registry) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// Run follows the directory until ctx ends. What is in force then stays: the claims in the tables and the keys in etcd.
func (r *Registry) Run(ctx context.Context) error {
	if r.cfg.Dir == "" {
		close(r.ready)
		<-ctx.Done()
		return nil
	}
	r.scan(true)
	close(r.ready)
	often, seldom := time.NewTicker(scanInterval), time.NewTicker(thoroughInterval)
	defer often.Stop()
	defer seldom.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-often.C:
			r.scan(false)
		case <-seldom.C:
			r.scan(true)
		}
	}
}

// scan brings what is in force in line with the directory.
func (r *Registry) scan(thorough bool) {
	if !r.dir.scan(thorough, r.cluster.parse) {
		return
	}
	declarations, problems := r.dir.all()
	accepted, conflicts := r.resolve(declarations)
	problems = append(problems, conflicts...)
	slices.SortStableFunc(problems, func(a, b SourceError) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	next, err := r.desire(accepted)
	if err != nil {
		// What is in force is better than a part of what is declared.
		problems = append(problems, SourceError{Message: err.Error()})
	} else {
		r.apply(next)
		r.accepted = accepted
	}
	r.report(problems)
}

// resolve decides between declarations that exclude one another: the first, by file name and place in the file, stays.
func (r *Registry) resolve(declarations []declaration) (accepted []declaration, conflicts []SourceError) {
	t := taken{make(map[string]*declaration), make(map[netip.Addr]*declaration), make(map[identity.ID]*declaration)}
	for i := range declarations {
		d := &declarations[i]
		if err := r.conflict(d, t); err != nil {
			conflicts = append(conflicts, SourceError{File: d.file, Line: d.line, Message: err.Error()})
			continue
		}
		t.names[d.String()] = d
		for _, ip := range d.ips {
			t.addrs[ip] = d
		}
		if t.identities[d.identity] == nil {
			t.identities[d.identity] = d
		}
		accepted = append(accepted, *d)
	}
	return accepted, conflicts
}

// taken says which declaration has which name, address and identity.
type taken struct {
	names      map[string]*declaration
	addrs      map[netip.Addr]*declaration
	identities map[identity.ID]*declaration
}

// conflict says what speaks against d beside what is taken.
func (r *Registry) conflict(d *declaration, taken taken) error {
	if other := taken.names[d.String()]; other != nil {
		return fmt.Errorf("endpoint %s is declared already in %s:%d", d, other.file, other.line)
	}
	for _, ip := range d.ips {
		if other := taken.addrs[ip]; other != nil {
			return fmt.Errorf("endpoint %s: ip %s belongs already to %s, declared in %s:%d", d, ip, other, other.file, other.line)
		}
		if ip == r.cfg.HostIP {
			return fmt.Errorf("endpoint %s: ip %s is the address of this node", d, ip)
		}
	}
	if other := taken.identities[d.identity]; other != nil && !slices.Equal(other.labels, d.labels) {
		return fmt.Errorf("endpoint %s: identity %s stands already for the labels %s of %s, declared in %s:%d",
			d, d.identity, other.labels, other, other.file, other.line)
	}
	return nil
}

// endpointID is the number of an endpoint within its node: the one given, else one made of its name, above those that
// can be given, so that it is the same after every restart.
func (d *declaration) endpointID() uint32 {
	if d.id != 0 {
		return d.id
	}
	h := fnv.New32a()
	h.Write([]byte(d.String()))
	const lowest = 1 << 16
	return lowest + h.Sum32()%(1<<31-lowest)
}

// report makes the outcome visible.
func (r *Registry) report(problems []SourceError) {
	endpoints := make([]Endpoint, 0, len(r.accepted))
	for i := range r.accepted {
		d := &r.accepted[i]
		endpoints = append(endpoints, Endpoint{
			Namespace: d.namespace, Name: d.name, ServiceAccount: d.serviceAccount, ID: d.endpointID(),
			IPs: d.ips, Identity: d.identity, Labels: d.labels, File: d.file, Line: d.line,
		})
	}
	slices.SortFunc(endpoints, func(a, b Endpoint) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	r.mu.Lock()
	before := r.status
	r.status = Status{Endpoints: endpoints, Errors: problems}
	r.mu.Unlock()
	for _, p := range problems {
		if !slices.Contains(before.Errors, p) {
			r.cfg.Log.Warn("endpoint file refused", "dir", r.cfg.Dir, "err", p)
		}
	}
	if len(endpoints) != len(before.Endpoints) {
		r.cfg.Log.Info("endpoints of this node", "dir", r.cfg.Dir, "count", len(endpoints), "errors", len(problems))
	}
}
