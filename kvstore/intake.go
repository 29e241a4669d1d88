// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
)

// What an answer of a watch costs of the intake: about what it takes to read
// and to look at, in events.
const (
	answerCost = 10  // beside its events
	noticeCost = 200 // one without events, of which an honest server gives one every few seconds
	junkCost   = 100 // an event that is no news: honest servers send such ones as echoes, few and seldom
)

// mostIntake is what all watches of one etcd may bring, in events: more than any
// honest cluster has, and about a quarter of one core's time. What comes faster waits
// at the server.
var mostIntake = rate{interval: time.Second / 200_000, burst: 1_000_000}

// intake bounds what the watches of one etcd bring. Safe for concurrent use.
type intake struct {
	mu   sync.Mutex
	full time.Time // when, with nothing more to come, the whole burst is there again
}

// take charges for something that has come, and returns how long to take no
// more.
func (i *intake) take(cost int, now time.Time) (wait time.Duration) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.full, wait = mostIntake.take(i.full, now, cost)
	return wait
}

func costOf(resp *etcdserverpb.WatchResponse) int {
	if len(resp.Events) == 0 {
		return noticeCost
	}
	return answerCost + len(resp.Events)
}
