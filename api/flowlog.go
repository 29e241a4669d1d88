// SPDX-License-Identifier: Apache-2.0

package api

import "sync"

// flowLogSize is how many flows are kept for readers that come later or fall behind.
const flowLogSize = 4096

// FlowLog holds the latest flows. Readers ask for what came after what they have seen, each at its own pace: a slow one
// loses flows, and is told how many, but neither holds up the writer nor costs memory. It is safe for concurrent use.
type FlowLog struct {
	mu      sync.Mutex
	ring    [flowLogSize]Flow
	next    uint64 // number of the flow to come; the first is 0
	changed chan struct{}
}

// NewFlowLog returns an empty log.
func NewFlowLog() *FlowLog { return &FlowLog{changed: make(chan struct{})} }

// Append adds flows, oldest first. The log shares their slices from then on.
func (l *FlowLog) Append(flows []Flow) {
	if len(flows) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range flows {
		l.ring[l.next%flowLogSize] = f
		l.next++
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

// Since appends to buf, up to its capacity, the flows from number since on, and returns the number to ask from next, and
// how many were overwritten before they could be read.
func (l *FlowLog) Since(since uint64, buf []Flow) (flows []Flow, next, lost uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.next - min(l.next, flowLogSize)
	if since < oldest {
		lost, since = oldest-since, oldest
	}
	for since < l.next && len(buf) < cap(buf) {
		buf = append(buf, l.ring[since%flowLogSize])
		since++
	}
	return buf, since, lost
}

// Last returns the number from which [FlowLog.Since] gives the last n flows, or all if there are fewer.
func (l *FlowLog) Last(n int) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next - min(l.next, flowLogSize, uint64(max(n, 0)))
}

// Changed returns a channel that is closed when the next flow comes. Take it before the [FlowLog.Since] that it guards.
func (l *FlowLog) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}
