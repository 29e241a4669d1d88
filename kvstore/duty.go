// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"sync"
	"time"
)

// never is when a duty is due that is not.
const never time.Duration = -1

// duty is something to do from time to time. It has no goroutine while nothing
// is to be done: of hundreds of clusters with several watches each, those
// would take more memory than what the clusters hold.
type duty struct {
	do func() (again time.Duration)

	mu    sync.Mutex
	timer *time.Timer // nil if it is never due
	over  bool
	busy  sync.WaitGroup // do
}

// startDuty calls do after a while, and again after what it returns, until stop.
func startDuty(in time.Duration, do func() (again time.Duration)) *duty {
	d := &duty{do: do}
	if in != never {
		d.mu.Lock() // run sees the timer
		defer d.mu.Unlock()
		d.timer = time.AfterFunc(in, d.run)
	}
	return d
}

func (d *duty) run() {
	d.mu.Lock()
	over := d.over
	if !over {
		d.busy.Add(1)
	}
	d.mu.Unlock()
	if over {
		return
	}
	defer d.busy.Done()
	again := d.do()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.over && again != never {
		d.timer.Reset(again)
	}
}

// stop ends the duty, and waits for what is being done, which whoever stops it
// has told to end.
func (d *duty) stop() {
	d.mu.Lock()
	d.over = true
	if d.timer != nil {
		d.timer.Stop()
	}
	d.mu.Unlock()
	d.busy.Wait()
}
