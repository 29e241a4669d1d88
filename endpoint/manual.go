// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/yamldir"
)

// manualSource is the Source of workloads that were added through the API.
const manualSource = "api"

// Errors of a [Manual].
var (
	// ErrRefused indicates an endpoint that cannot be, whatever the state of the node.
	ErrRefused = errors.New("endpoint refused")
	// ErrUnknown indicates an endpoint that was never added, or is gone.
	ErrUnknown = errors.New("was not added through the API")
	// errNotRead indicates a state file that is not known yet, so that it must not be written over.
	errNotRead = errors.New("nothing can be changed before it has been read")
)

// How a [Manual] tries again to read its file, and how many endpoints it takes: more than any node has, and few enough to
// be written at once for each of them.
const (
	manualRetry = 2 * time.Second
	maxManual   = 10000
)

// ManualConfig is what a [Manual] works with.
type ManualConfig struct {
	// Dir is where endpoints are kept across restarts. It is made when there is something to keep.
	Dir         string
	ClusterName string
	ClusterID   identity.ClusterID
	Layout      identity.Layout
	Log         *slog.Logger
}

// Manual is the source of workloads that somebody adds and removes by name. What it has acknowledged is on disk.
type Manual struct {
	log   *slog.Logger
	parse func(file string, content []byte) ([]declaration, []SourceError, error)
	file  stateFile
	ready chan struct{}

	mu      sync.Mutex
	kept    map[string]manual // by namespace/name; nil until the file has been read
	changed chan struct{}     // closed and replaced at the next change
	problem string            // why the file could not be read
	aside   []string          // files that were not understood, and are kept for somebody to look at
}

// manual is one endpoint as it is kept: what was given, and what it means, or why it means nothing any more.
type manual struct {
	given    json.RawMessage
	workload Workload
	problem  string
}

var _ Source = (*Manual)(nil)

// NewManual assembles a source; nothing is read before Run.
func NewManual(cfg ManualConfig) (*Manual, error) {
	if cfg.Dir == "" || cfg.Log == nil {
		return nil, errors.New("endpoint: a source of added endpoints needs Dir and Log")
	}
	return &Manual{
		log: cfg.Log, parse: cluster{name: cfg.ClusterName, id: cfg.ClusterID, layout: cfg.Layout}.parse,
		file:  stateFile{path: filepath.Join(cfg.Dir, "endpoints.json")},
		ready: make(chan struct{}), changed: make(chan struct{}),
	}, nil
}

func (m *Manual) String() string { return manualSource }

// Ready is closed once what an earlier agent kept is known.
func (m *Manual) Ready() <-chan struct{} { return m.ready }

// Changed returns a channel that closes at the next change of what Workloads or Problems return.
func (m *Manual) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// Workloads returns the endpoints that were added, by namespace and name.
func (m *Manual) Workloads() []Workload {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Workload
	for _, key := range slices.Sorted(maps.Keys(m.kept)) {
		if e := m.kept[key]; e.problem == "" {
			all = append(all, e.workload)
		}
	}
	return all
}

// Problems returns what is wrong with the file and with what stands in it.
func (m *Manual) Problems() []SourceError {
	m.mu.Lock()
	defer m.mu.Unlock()
	var problems []SourceError
	if m.problem != "" {
		problems = append(problems, SourceError{File: m.file.path, Message: m.problem})
	}
	for _, file := range m.aside {
		problems = append(problems, SourceError{
			File: file, Message: "it was kept here because it could not be understood: add its endpoints again, then delete it",
		})
	}
	for _, key := range slices.Sorted(maps.Keys(m.kept)) {
		if e := m.kept[key]; e.problem != "" {
			problems = append(problems, SourceError{File: m.file.path, Message: e.problem})
		}
	}
	return problems
}

// Run reads what was kept, again and again while it cannot be read, and then waits for ctx to end.
func (m *Manual) Run(ctx context.Context) error {
	for !m.load() {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(manualRetry):
		}
	}
	close(m.ready)
	for {
		var again <-chan time.Time
		if m.lookAside() {
			again = time.After(manualRetry)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again:
		}
	}
}

// lookAside brings up to date which files were set aside, and reports whether there are any.
func (m *Manual) lookAside() bool {
	files := m.file.aside()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.Equal(files, m.aside) {
		m.aside = files
		m.tell()
	}
	return len(files) > 0
}

// load reads the file. A file that can be read but not understood is set aside, so that nothing of it is lost.
func (m *Manual) load() bool {
	content, err := m.file.read()
	var entries []json.RawMessage
	if err == nil && content != nil {
		if cause := json.Unmarshal(content, &entries); cause != nil {
			if err = m.file.setAside(); err == nil {
				m.log.Error("state of added endpoints is corrupt, kept aside", "file", m.file.path, "err", cause)
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.tell()
	if err != nil {
		m.problem = fmt.Sprintf("endpoints that were added are not known: %v", err)
		return false
	}
	m.problem, m.kept = "", make(map[string]manual, len(entries))
	for _, given := range entries {
		key, e := m.understand(given)
		m.kept[key] = e
	}
	return true
}

// understand reads one endpoint, which may be of another agent's time and settings: one that is refused now stays, to
// be seen, and to be in force again when it may.
func (m *Manual) understand(given json.RawMessage) (key string, e manual) {
	w, err := m.declared(given)
	if err == nil {
		return w.Namespace + "/" + w.Name, manual{given: given, workload: w}
	}
	var name struct{ Namespace, Name string }
	_ = json.Unmarshal(given, &name) // err says already what is wrong
	if name.Namespace == "" {
		name.Namespace = defaultName
	}
	return name.Namespace + "/" + name.Name, manual{given: given, problem: err.Error()}
}

// declared makes a workload of an endpoint, given as an entry of an endpoints file is, in JSON.
func (m *Manual) declared(given []byte) (Workload, error) {
	if !json.Valid(given) {
		return Workload{}, errors.New("it is not JSON")
	}
	good, rejected, err := m.parse("", given)
	switch {
	case err != nil:
		return Workload{}, errors.New(yamldir.Sentence(err))
	case len(rejected) > 0:
		return Workload{}, errors.New(rejected[0].Message)
	case len(good) != 1:
		return Workload{}, fmt.Errorf("it holds %d endpoints, want one", len(good))
	}
	d := &good[0]
	return Workload{
		Source: manualSource, Origin: m.file.path, Namespace: d.namespace, Name: d.name, ServiceAccount: d.serviceAccount,
		IPs: d.ips, Labels: d.given, Ports: d.ports, ID: d.id, Identity: d.identity,
	}, nil
}

// Put adds an endpoint, given as an entry of an endpoints file is, in JSON, or puts it in the place of the one of that
// namespace and name, and reports whether there was none. The error is [ErrRefused] if the endpoint is wrong; else it is
// not on disk, and nothing has changed.
func (m *Manual) Put(given []byte) (added bool, err error) {
	var compact bytes.Buffer
	if err := json.Compact(&compact, given); err != nil {
		return false, fmt.Errorf("%w: it is not JSON: %w", ErrRefused, err)
	}
	w, err := m.declared(compact.Bytes())
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	key := w.Namespace + "/" + w.Name
	_, known := m.kept[key]
	if !known && len(m.kept) >= maxManual {
		return false, fmt.Errorf("%w: there are %d already", ErrRefused, maxManual)
	}
	next := maps.Clone(m.kept)
	if next != nil {
		next[key] = manual{given: compact.Bytes(), workload: w}
	}
	return !known, m.keep(next)
}

// Remove takes back what Put added. The error is [ErrUnknown] if it did not.
func (m *Manual) Remove(namespace, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := namespace + "/" + name
	if _, known := m.kept[key]; !known && m.kept != nil {
		return fmt.Errorf("endpoint %s %w", key, ErrUnknown)
	}
	next := maps.Clone(m.kept)
	delete(next, key)
	return m.keep(next)
}

// keep writes the endpoints to disk, and puts them in force once they are there. mu is held.
func (m *Manual) keep(next map[string]manual) error {
	if next == nil {
		return fmt.Errorf("%s: %w", m.file.path, errNotRead)
	}
	var content bytes.Buffer
	content.WriteByte('[')
	for i, key := range slices.Sorted(maps.Keys(next)) {
		if i > 0 {
			content.WriteByte(',')
		}
		content.WriteByte('\n')
		content.Write(next[key].given)
	}
	content.WriteString("\n]\n")
	if err := m.file.write(content.Bytes()); err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	m.kept = next
	m.tell()
	return nil
}

// tell wakes who waits for a change. mu is held.
func (m *Manual) tell() {
	close(m.changed)
	m.changed = make(chan struct{})
}
