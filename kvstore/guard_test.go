// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// A transaction under a lock is done only if what it wants to be absent is, and what it wants to be equal is.
func TestTxnConditions(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	l := mustLock(t, c, lockPath)
	e.Put(t, "p/a/x", "1")
	for name, v := range map[string]struct {
		op Op
		ok bool
	}{
		"absent":         {Op{Kind: OpAbsent, Key: "p/b/"}, true},
		"not absent":     {Op{Kind: OpAbsent, Key: "p/a/"}, false},
		"equal":          {Op{Kind: OpEqual, Key: "p/a/x", Value: []byte("1")}, true},
		"not equal":      {Op{Kind: OpEqual, Key: "p/a/x", Value: []byte("2")}, false},
		"equal, no such": {Op{Kind: OpEqual, Key: "p/c", Value: []byte("1")}, false},
	} {
		err := l.Txn(t.Context(), v.op, Op{Kind: OpPut, Key: "q/" + name, Value: []byte("done")})
		if _, done := e.Get(t, "q/"+name); done != v.ok || (err == nil) != v.ok || err != nil && !errors.Is(err, ErrExists) {
			t.Errorf("%s: done %v, %v", name, done, err)
		}
	}
	mustUnlock(t, l)
}
