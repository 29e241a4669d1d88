// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
)

// memoryVersion is that of the format of a [memory]'s file.
const memoryVersion = 1

// A memory's file is written soon after a change, and again after a rest of so many times what the last writing took, but
// of so long at least: many changes in a row cost some part of a disk, not all of it.
const (
	memoryRest  = 100 * time.Millisecond
	memoryShare = 10
	memoryRetry = 2 * time.Second
)

// errUnconfirmed indicates an identity that an earlier agent of this node had allocated.
var errUnconfirmed = errors.New("the identity is the one of before the restart, which etcd has not confirmed yet")

// memory keeps on disk which identities were allocated, so that an agent that starts while etcd is away knows those of
// its workloads. What it says may be old: it is believed until etcd is heard.
type memory struct {
	file    stateFile
	cluster string
	log     *slog.Logger

	dirty chan struct{} // of capacity 1
	// changed is called when problems has another answer.
	changed func()

	mu      sync.Mutex
	problem string   // what keeps the file from being read or written; guarded by mu
	aside   []string // files that were not understood; guarded by mu
}

// remembered is what the file holds.
type remembered struct {
	Version int `json:"version"`
	// Identities are canonical labels, by the number that stands for them.
	Identities map[string]string `json:"identities"`
	// Checksum is the SHA-256 of Identities as JSON, in hexadecimal.
	Checksum string `json:"checksum"`
}

func newMemory(cfg *AllocatorConfig, changed func()) *memory {
	return &memory{
		file: stateFile{path: filepath.Join(cfg.StateDir, "identities.json")}, cluster: cfg.ClusterName, log: cfg.Log,
		dirty: make(chan struct{}, 1), changed: changed,
	}
}

// recall reads what an earlier agent knew, by labels. A file that cannot be understood is set aside.
func (m *memory) recall(layout identity.Layout, cluster identity.ClusterID) map[string]identity.ID {
	content, err := m.file.read()
	if err == nil && content != nil {
		var known map[string]identity.ID
		if known, err = m.understand(content, layout, cluster); err == nil {
			m.tell(nil)
			return known
		}
		m.log.Error("state of allocated identities is corrupt, kept aside", "file", m.file.path, "err", err)
		err = m.file.setAside()
	}
	if err != nil {
		err = fmt.Errorf("the identities of before the restart are not known: %w", err)
	}
	m.tell(err)
	return nil
}

func (m *memory) understand(content []byte, layout identity.Layout, cluster identity.ClusterID) (map[string]identity.ID, error) {
	var r remembered
	if err := json.Unmarshal(content, &r); err != nil {
		return nil, err
	}
	if r.Version != memoryVersion {
		return nil, fmt.Errorf("it is of version %d, and this weft reads %d", r.Version, memoryVersion)
	}
	if sum := checksum(r.Identities); sum != r.Checksum {
		return nil, fmt.Errorf("its checksum is %s, not %q", sum, r.Checksum)
	}
	known := make(map[string]identity.ID, len(r.Identities))
	for number, text := range r.Identities {
		id, labels, err := identity.ParseEntry(layout, cluster, m.cluster, number, []byte(text))
		if err == nil && labels.String() != text {
			err = errors.New("the labels are not in their canonical form")
		}
		if err != nil { // this node is of another cluster now, or another layout
			m.log.Info("identity of before the restart is not of this cluster", "identity", number, "labels", text, "err", err)
			continue
		}
		known[text] = id
	}
	return known, nil
}

// checksum is that of the identities in a file.
func checksum(identities map[string]string) string {
	text, err := json.Marshal(identities) // with sorted keys
	if err != nil {
		return "" // strings can always be written
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// keep writes what there is to remember after every touch, until ctx ends.
func (m *memory) keep(ctx context.Context, known func() map[string]identity.ID) error {
	for {
		var look <-chan time.Time
		if m.lookAside() {
			look = time.After(memoryRetry)
		}
		select {
		case <-ctx.Done():
		case <-look:
			continue
		case <-m.dirty:
			begun := time.Now()
			err := m.write(known())
			m.tell(err)
			rest := max(memoryRest, memoryShare*time.Since(begun))
			if err != nil {
				m.touch()
				rest = memoryRetry
			}
			pause(ctx, rest)
		}
		if ctx.Err() == nil {
			continue
		}
		select {
		case <-m.dirty:
			m.tell(m.write(known()))
		default:
		}
		return nil
	}
}

// touch says that there is something else to remember.
func (m *memory) touch() { poke(m.dirty) }

func (m *memory) write(known map[string]identity.ID) error {
	r := remembered{Version: memoryVersion, Identities: make(map[string]string, len(known))}
	for text, id := range known {
		r.Identities[strconv.FormatUint(uint64(id), 10)] = text
	}
	r.Checksum = checksum(r.Identities)
	content, err := json.Marshal(r)
	if err == nil {
		err = m.file.write(append(content, '\n'))
	}
	if err != nil {
		return fmt.Errorf("allocated identities are not kept for a restart: %w", err)
	}
	return nil
}

// lookAside brings up to date which files were set aside, and reports whether there are any.
func (m *memory) lookAside() bool {
	files := m.file.aside()
	m.mu.Lock()
	same := slices.Equal(files, m.aside)
	m.aside = files
	m.mu.Unlock()
	if !same {
		m.changed()
	}
	return len(files) > 0
}

// tell notes what came of the last reading or writing.
func (m *memory) tell(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	m.mu.Lock()
	same := m.problem == problem
	m.problem = problem
	m.mu.Unlock()
	if !same {
		m.changed()
	}
}

// problems returns what is wrong with the file.
func (m *memory) problems() []SourceError {
	m.mu.Lock()
	defer m.mu.Unlock()
	var problems []SourceError
	if m.problem != "" {
		problems = append(problems, SourceError{File: m.file.path, Message: m.problem})
	}
	for _, file := range m.aside {
		problems = append(problems, SourceError{
			File: file, Message: "it was kept here because it could not be understood; the identities are found again in etcd: delete it",
		})
	}
	return problems
}
