// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// newLog writes text for people at a terminal, and JSON for all others; what repeats itself, a bounded number of times.
func newLog(env environment, level slog.Leveler) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	var handler slog.Handler = slog.NewJSONHandler(env.stderr, options)
	if env.terminal {
		handler = slog.NewTextHandler(env.stderr, options)
	}
	return slog.New(&limitedLog{next: handler, lines: &lineCounts{counts: make(map[string]int)}})
}

const (
	// maxSameLines is how many lines of one message about one thing are logged in a window.
	maxSameLines = 50
	lineWindow   = time.Minute
	// maxLineKinds bounds what is remembered of a window. Messages are ours, and so few; clusters are others'.
	maxLineKinds = 10_000
)

// limitedLog lets at most maxSameLines lines of a kind through in a minute: a cluster that writes nonsense, or an etcd that
// comes and goes, must fill neither the disk nor the reader's eyes. Lines are of one kind that have the same level, message and
// subject, whatever else they tell. The last one that is let through says so; the first of the next minute says how many
// were left out. What is logged for debugging is not limited.
type limitedLog struct {
	next    slog.Handler
	subject string // of the attributes that a logger was made with
	lines   *lineCounts
}

// lineCounts is shared by a log and all that are made of it.
type lineCounts struct {
	mu     sync.Mutex
	window time.Time      // when it began
	counts map[string]int // lines in the window, by kind
	before map[string]int // lines left out in the window before
}

var _ slog.Handler = (*limitedLog)(nil)

// subjects are the attributes that say what a line is about, where it is one of a few.
var subjects = map[string]bool{"task": true, "cluster": true, "device": true, "program": true, "remote": true, "name": true}

func subjectOf(a slog.Attr) string {
	if !subjects[a.Key] {
		return ""
	}
	return "\x00" + a.Key + "=" + a.Value.String()
}

// Enabled is that of the handler behind.
func (l *limitedLog) Enabled(ctx context.Context, level slog.Level) bool {
	return l.next.Enabled(ctx, level)
}

// WithGroup returns a log whose attributes are in a group; they are no subjects.
func (l *limitedLog) WithGroup(name string) slog.Handler {
	return &limitedLog{next: l.next.WithGroup(name), subject: l.subject, lines: l.lines}
}

// WithAttrs returns a log whose lines all have the attributes.
func (l *limitedLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	subject := l.subject
	for _, a := range attrs {
		subject += subjectOf(a)
	}
	return &limitedLog{next: l.next.WithAttrs(attrs), subject: subject, lines: l.lines}
}

// Handle writes a line unless there were enough of its kind.
func (l *limitedLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelInfo {
		return l.next.Handle(ctx, r)
	}
	var kind strings.Builder
	kind.WriteString(r.Level.String() + "\x00" + r.Message + l.subject)
	r.Attrs(func(a slog.Attr) bool {
		kind.WriteString(subjectOf(a))
		return true
	})
	n, missed := l.lines.count(kind.String(), r.Time)
	if n > maxSameLines {
		return nil
	}
	r = r.Clone()
	if missed > 0 {
		r.AddAttrs(slog.Int("leftOut", missed))
	}
	if n == maxSameLines {
		r.AddAttrs(slog.String("note", "further lines like this one are left out for up to "+lineWindow.String()))
	}
	return l.next.Handle(ctx, r)
}

// count says the how manieth of its kind a line is in the window, and how many were left out in the window before, once.
func (c *lineCounts) count(kind string, at time.Time) (n, missed int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if age := at.Sub(c.window); age >= lineWindow || len(c.counts) >= maxLineKinds {
		c.before = make(map[string]int)
		for kind, n := range c.counts {
			if n > maxSameLines {
				c.before[kind] = n - maxSameLines
			}
		}
		c.window, c.counts = at, make(map[string]int)
	}
	c.counts[kind]++
	missed = c.before[kind]
	delete(c.before, kind)
	return c.counts[kind], missed
}
