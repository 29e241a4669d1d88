// SPDX-License-Identifier: Apache-2.0

package kvstore

// State says what a Client's connection is good for.
type State string

// The states of a connection.
const (
	// Connecting: etcd has not answered yet, and nothing has failed.
	Connecting State = "connecting"
	// Syncing: etcd answers, and a Watcher has not begun to follow yet.
	Syncing State = "syncing"
	// Ready: etcd answers, and all Watchers follow.
	Ready State = "ready"
	// Stale: it was ready, but etcd is not connected now, or is another one,
	// or a Watcher does not get what it asks for, or the heartbeat is late.
	// What is known stays.
	Stale State = "stale"
	// Failed: it was never ready, and the last attempt ended in an error.
	Failed State = "failed"
)

// phase is how far a Watcher has come over one Client.
type phase uint8

const (
	phaseListing phase = iota // it has never followed yet
	phaseLive                 // it follows
	phaseBroken               // its last list or watch has failed
	phaseEnded                // it runs no more
)

// health is what a Client's state follows from. It knows no time and no locks.
type health struct {
	conns    map[connection]bool // open ones, and whether etcd has answered over them
	watchers map[*Watcher]phase
	late     bool // the heartbeat
	foreign  bool // another history answers
	failed   bool // anything, ever
	ready    bool // was Ready, ever
}

// observe returns the present state, and remembers if it is Ready.
func (h *health) observe() State {
	answers, count := false, [phaseEnded]int{}
	for _, answered := range h.conns {
		answers = answers || answered
	}
	for _, p := range h.watchers {
		count[p]++
	}
	well := answers && !h.late && !h.foreign && count[phaseBroken] == 0
	switch {
	case well && count[phaseListing] > 0:
		return Syncing
	case well:
		h.ready = true
		return Ready
	case h.ready:
		return Stale
	case h.failed:
		return Failed
	case answers:
		return Syncing
	}
	return Connecting
}
