// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// policy is the limits that are in force, and the file that they come from. A file that has become bad changes nothing but
// the status.
type policy struct {
	path     string // empty: there is no file
	defaults Limits
	ours     []netip.Prefix // this node's
	log      *slog.Logger

	now atomic.Pointer[Limits]

	mu      sync.Mutex
	content []byte // of the file when it was last looked at
	status  LimitsStatus
}

// LimitsStatus is the state of the file of limits.
type LimitsStatus struct {
	Path string `json:"path,omitempty"`
	// LoadedAt is when the limits in force were read.
	LoadedAt time.Time `json:"loadedAt,omitzero"`
	// Error is what is wrong with the file now. The limits that were read before it stay in force.
	Error string `json:"error,omitempty"`
}

// ErrLimits indicates a file of limits that cannot be used.
var ErrLimits = errors.New("limits of remote clusters")

// newPolicy reads the file. At the start, a bad one is an error: limits that were meant to be must not be missing.
func newPolicy(cfg *Config) (*policy, error) {
	p := &policy{
		path: cfg.LimitsFile, defaults: *cfg.Limits, ours: cfg.OwnPrefixes, log: cfg.Log, status: LimitsStatus{Path: cfg.LimitsFile},
	}
	p.now.Store(cfg.Limits)
	if p.path == "" {
		return p, nil
	}
	if _, err := p.load(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLimits, err)
	}
	return p, nil
}

// load reads the file, if it is another than before, and reports whether that has put other limits into force.
func (p *policy) load() (changed bool, err error) {
	content, err := readRegular(p.path)
	if err == nil && p.content != nil && bytes.Equal(content, p.content) {
		return false, nil
	}
	var l Limits
	if err == nil {
		if l, err = ParseLimits(content, p.defaults); err != nil {
			err = fmt.Errorf("%s: %w", p.path, err)
		}
	}
	if err != nil {
		p.content = nil // so that it is read again when it is as it was
		return false, err
	}
	p.content = content
	p.now.Store(&l)
	p.status.LoadedAt = time.Now()
	return true, nil
}

// reload looks at the file again, and reports whether other limits are in force now.
func (p *policy) reload() bool {
	if p.path == "" {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.status.Error
	changed, err := p.load()
	if p.status.Error = ""; err != nil {
		p.status.Error = printable(err.Error())
	}
	switch {
	case p.status.Error != "" && p.status.Error != was:
		p.log.Warn("limits of remote clusters are unusable, those before stay in force", "err", err)
	case changed:
		p.log.Info("limits of remote clusters read", "file", p.path)
	}
	return changed
}

func (p *policy) report() LimitsStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}
