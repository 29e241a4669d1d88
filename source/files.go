// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"path/filepath"
	"slices"
	"sync"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/internal/yamldir"
	"github.com/weftmesh/weft/service"
)

// Files is the source of the services that the YAML files of a directory declare. Files that become bad leave their last good
// version in force.
type Files struct {
	*Table
	dir   *yamldir.Dir[declared] // only Run touches it
	ready chan struct{}

	mu       sync.Mutex
	problems []string // replaced, never changed
}

var _ Source = (*Files)(nil)

// NewFiles assembles a source; nothing is read before Run.
func NewFiles(dir string) *Files {
	return &Files{Table: NewTable(true), dir: yamldir.New[declared](dir, "services"), ready: make(chan struct{})}
}

func (f *Files) String() string { return "service files" }

// Ready is closed once the directory has been read for the first time: one that cannot be is not one without services.
func (f *Files) Ready() <-chan struct{} { return f.ready }

// Problems returns what is wrong with the files.
func (f *Files) Problems() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.problems)
}

// Run follows the directory until ctx ends.
func (f *Files) Run(ctx context.Context) error {
	f.dir.Follow(ctx, parseFile, func(changed bool) {
		if changed {
			f.take()
		}
		if f.dir.Err() == nil && !closed(f.ready) {
			close(f.ready)
		}
	})
	return nil
}

// take takes what the files declare.
func (f *Files) take() {
	all, problems := f.dir.All()
	there := make(map[service.Name]string, len(all))
	for i := range all {
		d := &all[i]
		if first, twice := there[d.Name]; twice {
			problems = append(problems, yamldir.Problem{File: d.file, Line: d.line, Message: "service " + d.Name.String() + " is declared already, in " + first})
			continue
		}
		there[d.Name] = d.file
		f.PutBackends(d.Name, d.Name.Name, d.Backends) // its one piece is called as it is
		f.PutService(d.Service)
	}
	f.Keep(func(name service.Name) bool { _, ok := there[name]; return ok })
	f.KeepBackends(func(name service.Name, _ string) bool { _, ok := there[name]; return ok })
	var texts []string
	for _, p := range problems {
		if p.File != "" {
			p.File = filepath.Join(f.dir.Path, p.File)
		}
		texts = append(texts, p.Error())
	}
	f.mu.Lock()
	f.problems = texts
	f.mu.Unlock()
	f.Wake()
}

// parseFile reads a file of services.
func parseFile(file string, content []byte) ([]declared, []yamldir.Problem, error) {
	return yamldir.Parse(file, content, func(node *yaml.Node) (declared, error) {
		s, err := declare(node)
		return declared{Service: s, file: file, line: node.Line}, err
	})
}

// declared is a service with the place where it stands.
type declared struct {
	Service
	file string
	line int
}
