// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Why values are refused: few words, to count by.
const (
	reasonMalformed = "malformed"        // does not decode
	reasonMismatch  = "mismatch"         // contradicts its key, or the cluster that published it
	reasonForeign   = "foreign-identity" // claims an identity that is not the cluster's own
	reasonTooLarge  = "too-large"        // more bytes than any honest value of the kind has

	// These the limits decide, which may change.
	reasonReserved      = "reserved-identity" // claims a reserved identity that the cluster may not use
	reasonPrefixLength  = "prefix-length"     // claims a prefix that is too short
	reasonSpecialPrefix = "special-prefix"    // claims what is nobody's: loopback, link-local and the like
	reasonOwnPrefix     = "own-prefix"        // claims what is ours
	reasonDeniedPrefix  = "denied-prefix"     // claims what the limits do not allow the cluster
	reasonForeignPrefix = "foreign-prefix"    // claims what the nodes of another cluster say is theirs
	reasonForeignHost   = "foreign-host"      // announces an address behind a host that is no node of the cluster
	reasonQuota         = "quota"             // the cluster has as much as it may have
)

// errIgnored indicates a value that nothing is made of, without anything being wrong.
var errIgnored = errors.New("nothing to use")

// refusal is the error of a value that breaks a rule.
type refusal struct {
	reason string
	err    error
	// limit: a change of the limits, or of what other clusters claim, may lift it.
	limit bool
	// partial: the value is in use, but for the part that the refusal is of.
	partial bool
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func refuse(reason string, err error) error { return &refusal{reason: reason, err: err} }

func limited(reason string, err error) error { return &refusal{reason: reason, err: err, limit: true} }

func isPartial(err error) bool {
	var r *refusal
	return errors.As(err, &r) && r.partial
}

// partly makes a refusal one of a part of the value; nil stays nil.
func partly(err error) error {
	var r *refusal
	if errors.As(err, &r) {
		return &refusal{reason: r.reason, err: r.err, limit: r.limit, partial: true}
	}
	return err
}

const (
	lastRejections   = 100
	rejectionTextMax = 512              // bytes of text kept from a remote
	rejectionLogGap  = 10 * time.Second // at most one line per remote in this time
)

// rejections remembers what was refused of one cluster. It is safe for concurrent use.
type rejections struct {
	log *slog.Logger
	now func() time.Time

	mu      sync.Mutex
	counts  map[string]uint64
	last    []Rejection // a ring once it is full
	next    int         // where the ring continues
	logged  time.Time
	skipped int // lines not logged since
}

func newRejections(log *slog.Logger) *rejections {
	return &rejections{log: log, now: time.Now, counts: make(map[string]uint64)}
}

// add counts, remembers and, at a limited rate, logs one refusal.
func (r *rejections) add(kind string, key []byte, err error) {
	reason := reasonMalformed
	var refused *refusal
	if errors.As(err, &refused) {
		reason = refused.reason
	}
	rej := Rejection{Kind: kind, Key: printable(string(key)), Reason: printable(err.Error()), At: r.now()}

	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[kind+"/"+reason]++
	if len(r.last) < lastRejections {
		r.last = append(r.last, rej)
	} else {
		r.last[r.next] = rej
		r.next = (r.next + 1) % lastRejections
	}
	if !r.logged.IsZero() && rej.At.Sub(r.logged) < rejectionLogGap {
		r.skipped++
		return
	}
	r.log.Warn("value of remote cluster refused", "kind", kind, "key", rej.Key, "err", rej.Reason, "notLogged", r.skipped)
	r.logged, r.skipped = rej.At, 0
}

// report returns the counts by "kind/reason", and the newest refusals, oldest first.
func (r *rejections) report() (map[string]uint64, []Rejection) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := make([]Rejection, 0, len(r.last))
	last = append(last, r.last[r.next:]...)
	last = append(last, r.last[:r.next]...)
	return maps.Clone(r.counts), last
}

// printable makes text of a remote safe to show: it comes back as it is if all of it prints and it is short, else cut and
// escaped.
func printable(s string) string {
	cut := len(s) > rejectionTextMax
	if cut {
		s = s[:rejectionTextMax]
	}
	if strings.ContainsFunc(s, func(c rune) bool { return c == '\uFFFD' || !strconv.IsPrint(c) }) {
		quoted := strconv.Quote(s)
		s = quoted[1 : len(quoted)-1]
	}
	if cut {
		s += "…"
	}
	return s
}
