// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// lockLife is how long the lease of a lock lasts, in weft and in Cilium: a lock that is held for as long without a break is
// not let go of by anybody.
const lockLife = 25 * time.Second

// watchdog frees the locks of identities whose holder lives and never unlocks: without it, nobody would ever again get an
// identity for the labels.
type watchdog struct {
	term    *Term
	sweeper *kvstore.LockSweeper
}

// NewWatchdog returns the duty. A lock is freed when two rounds have found it held by the same key.
func NewWatchdog() *Loop { return newWatchdog(lockLife) }

func newWatchdog(every time.Duration) *Loop { return NewLoop("lock-gc", every, new(watchdog).round) }

func (w *watchdog) round(ctx context.Context, t *Term) (Outcome, error) {
	if w.term != t {
		w.term, w.sweeper = t, kvstore.NewLockSweeper(t.Client(), t.Fence(), identity.LockKey(""))
	}
	freed, err := w.sweeper.Sweep(ctx)
	did := Outcome{Deleted: len(freed), Detail: "no lock was held for too long"}
	if len(freed) > 0 {
		did.Detail = fmt.Sprintf("freed: %s", strings.Join(freed, ", "))
		t.Log("lock-gc").Warn("locks were held for too long and are freed: whoever held them finds that out at the next write", "keys", freed)
	}
	return did, err
}
