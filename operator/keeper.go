// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/service"
)

// sweepDelay is how long a key that is not ours may stay: time for the writer, and for a watch that tells late of what the
// writer has done, so that what is swept is what really nobody here has put.
const sweepDelay = 500 * time.Millisecond

// keeper makes the keys below a prefix those that are wanted, and no others: what an earlier life left, and what anybody else
// puts there, is deleted. It is one term's. Its methods are for one goroutine, but for those that say otherwise.
type keeper struct {
	t      *Term
	prefix string // with "/" at its end
	log    *slog.Logger
	store  *kvstore.Store[int64] // when each key was written
	strays chan struct{}         // of capacity 1: something is there that may not be wanted

	mu   sync.Mutex
	want map[string]service.Name // keys that are wanted, and for which service; guarded by mu

	of map[service.Name][]string // the keys of each service; of the goroutine that says what is wanted
}

var _ kvstore.StoreObserver[int64] = (*keeper)(nil)

// keyValue is a key, relative to the prefix of a keeper, with its value.
type keyValue struct {
	key   string
	value []byte
}

func newKeeper(t *Term, duty, prefix string) *keeper {
	k := &keeper{
		t: t, prefix: prefix, log: t.Log(duty), strays: make(chan struct{}, 1),
		want: make(map[string]service.Name), of: make(map[service.Name][]string),
	}
	k.store = kvstore.NewStore(t.client, kvstore.StoreConfig[int64]{
		Prefix: prefix, Decode: func(e kvstore.Event) (int64, error) { return e.Revision, nil }, Observer: k, Writer: t.writes(duty),
	})
	return k
}

// assign wants a service to have these keys and no others, and returns how many it had that are to be deleted. A key that
// another service has had is this one's from now on.
func (k *keeper) assign(name service.Name, all []keyValue) (deleted int) {
	before := k.of[name]
	keys := make([]string, len(all))
	k.mu.Lock()
	for i, kv := range all {
		keys[i] = kv.key
		k.want[kv.key] = name
	}
	gone := slices.DeleteFunc(before, func(key string) bool { return k.want[key] != name || slices.Contains(keys, key) })
	for _, key := range gone {
		delete(k.want, key)
	}
	k.mu.Unlock()
	if k.of[name] = keys; len(keys) == 0 {
		delete(k.of, name)
	}
	for _, kv := range all {
		k.store.Set(kv.key, kv.value)
	}
	for _, key := range gone {
		if _, there := k.store.Get(key); there { // perhaps not as this store put it
			k.suspect()
		}
		k.store.Delete(key)
	}
	return len(gone)
}

// retain deletes the keys of services that keep does not name, and returns how many those were.
func (k *keeper) retain(keep func(service.Name) bool) (deleted int) {
	for name := range k.of {
		if !keep(name) {
			deleted += k.assign(name, nil)
		}
	}
	return deleted
}

// OnUpdate takes note of a key that is there.
func (k *keeper) OnUpdate(key string, _ int64) {
	k.mu.Lock()
	_, wanted := k.want[key]
	k.mu.Unlock()
	if !wanted {
		k.suspect()
	}
}

// OnDelete has nothing to do: the store puts back what is wanted.
func (k *keeper) OnDelete(string) {}

// OnSync has what was there at first looked through.
func (k *keeper) OnSync() { k.suspect() }

func (k *keeper) suspect() {
	select {
	case k.strays <- struct{}{}:
	default:
	}
}

// sweep deletes what is there and not wanted, and returns how many keys that were. It is for the goroutine that says what is
// wanted: so nothing becomes wanted while it is deleted.
func (k *keeper) sweep(ctx context.Context) (deleted int, err error) {
	var strays []kvstore.KV
	there := k.store.Snapshot()
	k.mu.Lock()
	for key, revision := range there {
		if _, wanted := k.want[key]; !wanted {
			strays = append(strays, kvstore.KV{Key: k.prefix + key, Revision: revision})
		}
	}
	k.mu.Unlock()
	if len(strays) == 0 {
		return 0, nil
	}
	slices.SortFunc(strays, func(a, b kvstore.KV) int { return strings.Compare(a.Key, b.Key) })
	deleted, err = k.t.Delete(ctx, strays...)
	if deleted > 0 {
		k.log.Info("keys that this operator did not write are removed", "keys", deleted, "first", strays[0].Key)
	}
	return deleted, err
}

// note adds the state of the keys to a duty's.
func (k *keeper) note(s *DutyStatus) {
	w := k.store.Status().Writer
	s.Keys, s.Pending = w.Keys, w.Pending
	const most = 3
	for _, key := range slices.Sorted(maps.Keys(w.Errors)) {
		if len(s.Problems) == most {
			s.Problems = append(s.Problems, fmt.Sprintf("%d keys are refused", len(w.Errors)))
			break
		}
		s.Problems = append(s.Problems, w.Errors[key].Error())
	}
}
