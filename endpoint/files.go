// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/yamldir"
)

// fileSource is the Source of workloads that files declare.
const fileSource = "file"

// FilesConfig is what a [Files] works with.
type FilesConfig struct {
	Dir         string // which holds the files
	ClusterName string
	ClusterID   identity.ClusterID
	Layout      identity.Layout
}

// Files is the source of the workloads that the files of a directory declare.
type Files struct {
	cluster cluster
	ready   chan struct{}
	dir     *yamldir.Dir[declaration] // only Run touches it

	mu        sync.Mutex
	workloads []Workload    // replaced, never changed
	problems  []SourceError // replaced, never changed
	changed   chan struct{} // closed and replaced when those two are
}

var _ Source = (*Files)(nil)

// NewFiles assembles a source; nothing is read before Run.
func NewFiles(cfg FilesConfig) *Files {
	return &Files{
		cluster: cluster{name: cfg.ClusterName, id: cfg.ClusterID, layout: cfg.Layout}, dir: yamldir.New[declaration](cfg.Dir, "endpoints"),
		ready: make(chan struct{}), changed: make(chan struct{}),
	}
}

func (f *Files) String() string { return "endpoint files" }

// Ready is closed once the directory has been read for the first time.
func (f *Files) Ready() <-chan struct{} { return f.ready }

// Changed returns a channel that closes at the next change of what Workloads or Problems return.
func (f *Files) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

// Workloads returns what the files declare, in the order of their names and of the entries in each.
func (f *Files) Workloads() []Workload {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.workloads
}

// Problems returns what is wrong with the files.
func (f *Files) Problems() []SourceError {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.problems
}

// Run follows the directory until ctx ends.
func (f *Files) Run(ctx context.Context) error {
	first := true
	f.dir.Follow(ctx, f.cluster.parse, func(changed bool) {
		if changed {
			f.take()
		}
		if first {
			close(f.ready)
		}
		first = false
	})
	return nil
}

// take takes what the files declare.
func (f *Files) take() {
	declarations, problems := f.dir.All()
	workloads := make([]Workload, len(declarations))
	for i := range declarations {
		d := &declarations[i]
		workloads[i] = Workload{
			Source: fileSource, Origin: filepath.Join(f.dir.Path, d.file) + ":" + strconv.Itoa(d.line), Namespace: d.namespace, Name: d.name,
			ServiceAccount: d.serviceAccount, IPs: d.ips, Labels: d.given, Ports: d.ports, ID: d.id, Identity: d.identity,
		}
	}
	for i := range problems {
		if problems[i].File != "" {
			problems[i].File = filepath.Join(f.dir.Path, problems[i].File)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.workloads, f.problems = workloads, problems
	close(f.changed)
	f.changed = make(chan struct{})
}
