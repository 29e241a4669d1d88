// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// policy is the limits that are in force, and the file that they come from. A file that has become bad changes nothing but
// the status.
//
// The beginning of a file that is being written in place may be a good file, too: one with fewer limits than are meant.
// Therefore only a file at rest counts.
type policy struct {
	path     string // empty: there is no file
	quiet    time.Duration
	defaults Limits
	ours     []netip.Prefix // this node's
	log      *slog.Logger

	now atomic.Pointer[Limits]

	mu      sync.Mutex
	content []byte // of the file that the limits in force come from; nil if it has been bad since
	latest  finding
	status  LimitsStatus
}

// finding is what a file was found to be, and since when.
type finding struct {
	content []byte
	err     error // why it cannot be read
	since   time.Time
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

// newPolicy reads the file, once it has been at rest for quiet. At the start, a bad one is an error: limits that were meant
// to be must not be missing.
func newPolicy(cfg *Config, t timing) (*policy, error) {
	p := &policy{
		path: cfg.LimitsFile, quiet: t.quiet, defaults: *cfg.Limits, ours: cfg.OwnPrefixes, log: cfg.Log,
		status: LimitsStatus{Path: cfg.LimitsFile},
	}
	p.now.Store(cfg.Limits)
	if p.path == "" {
		return p, nil
	}
	if err := p.awaitRest(t.settle, time.Sleep); err != nil {
		return nil, err
	}
	if _, err := p.load(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLimits, err)
	}
	return p, nil
}

// awaitRest waits until the file is at rest, but not for longer than bound.
func (p *policy) awaitRest(bound time.Duration, sleep func(time.Duration)) error {
	for end := time.Now().Add(bound); !p.look(time.Now()); sleep(p.quiet) {
		if time.Now().After(end) {
			return fmt.Errorf("%w: %s: is being written again and again, and at no time the same for %s; write it aside and rename it",
				ErrLimits, p.path, p.quiet)
		}
	}
	return nil
}

// look reads the file, and reports whether it is at rest: was not written for a while, or is what it was a while ago.
func (p *policy) look(now time.Time) bool {
	content, written, err := readDated(p.path)
	if l := &p.latest; l.since.IsZero() || !bytes.Equal(l.content, content) || (l.err == nil) != (err == nil) {
		*l = finding{content, err, now}
	}
	return now.Sub(written) >= p.quiet && !written.IsZero() || now.Sub(p.latest.since) >= p.quiet
}

// readDated reads a file, and tells when it was last written: a time that is not before what has been read came about.
func readDated(path string) (content []byte, written time.Time, err error) {
	content, err = readRegular(path)
	if info, err := os.Stat(path); err == nil {
		written = info.ModTime()
	}
	return content, written, err
}

// load takes up what the last look has found, if that is something else than before, and reports whether it has put other
// limits into force.
func (p *policy) load() (changed bool, err error) {
	content, err := p.latest.content, p.latest.err
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

// reload looks at the file again, and reports whether other limits are in force now. Where the file is not at rest, it wants
// to be called again soon.
func (p *policy) reload(now time.Time) (changed, again bool) {
	if p.path == "" {
		return false, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.look(now) {
		return false, true
	}
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
	return changed, false
}

func (p *policy) report() LimitsStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}
