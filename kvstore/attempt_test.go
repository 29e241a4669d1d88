// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"fmt"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// An attempt is made by itself, whatever becomes of those beside it.
func TestAttempts(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	fence := mustTakeFence(t, c)
	for key, value := range map[string]string{"k/a": "1", "k/b": "1", "k/c": "1", "of/b/n1": "7", "of/c/n1": "8", "of/c/n2": "9", "of/d": "7"} {
		e.Put(t, key, value)
	}
	read, _, err := c.Get(t.Context(), "k/a")
	if err != nil {
		t.Fatal(err)
	}
	gone := func(key string) Op { return Op{Kind: OpDelete, Key: key} }
	none := func(of string) Op { return Op{Kind: OpNone, Key: of, Value: []byte("7")} }
	attempts := []Attempt{
		{{Kind: OpUnchanged, Key: "k/a", Revision: read.Revision}, none("of/a/"), gone("k/a")},
		{none("of/b/"), gone("k/b")},                      // somebody has that value
		{none("of/c/"), gone("k/c")},                      // there are only others
		{none("of/d"), gone("of/d")},                      // it has it itself
		{{Kind: OpAbsent, Key: "of/e/"}, none("of/")},     // nothing to do
		{{Kind: OpCreate, Key: "k/new", Value: []byte{}}}, // without such a condition
		{{Kind: OpUnchanged, Key: "k/b", Revision: 1}, none("of/x/"), gone("k/b")},
	}
	results, err := c.AttemptBehind(t.Context(), fence, attempts)
	if err != nil || len(results) != len(attempts) {
		t.Fatalf("%v, %v", results, err)
	}
	for i, done := range []bool{true, false, true, false, false, true, false} {
		if (results[i] == nil) != done || !done && !errors.Is(results[i], ErrExists) {
			t.Errorf("attempt %d: %v, want it done: %t", i, results[i], done)
		}
	}
	for key, want := range map[string]bool{"k/a": false, "k/b": true, "k/c": false, "k/new": true, "of/d": true} {
		if _, ok := e.Get(t, key); ok != want {
			t.Errorf("%s exists: %t, want %t", key, ok, want)
		}
	}
	if err := c.TxnBehind(t.Context(), fence, none("of/c/"), gone("of/c/n1")); err != nil {
		t.Errorf("transaction: %v", err)
	}
	if err := c.TxnBehind(t.Context(), fence, none("of/b/"), gone("of/b/n1")); !errors.Is(err, ErrExists) {
		t.Errorf("transaction: %v", err)
	}
	if err := c.TxnBehind(t.Context(), fence, none("a"), none("b")); !errors.Is(err, ErrTooMuch) {
		t.Errorf("two conditions that may be there once: %v", err)
	}
	mustTakeFence(t, c)
	if results, err := c.AttemptBehind(t.Context(), fence, attempts); !errors.Is(err, ErrFenced) || len(results) > 0 {
		t.Errorf("another one has the fence: %v, %v", results, err)
	}
}

// A key that etcd refuses keeps no other one, and many are done in several
// transactions.
func TestAttemptsRefused(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	fence := mustTakeFence(t, c)
	var attempts []Attempt
	for i := range 2*attemptBatch + 1 {
		attempts = append(attempts, Attempt{{Kind: OpCreate, Key: fmt.Sprintf("k/%d", i)}})
	}
	attempts[3][0].Key = "" // which etcd has no place for
	results, err := c.AttemptBehind(t.Context(), fence, attempts)
	if err != nil || len(results) != len(attempts) {
		t.Fatalf("%d results, %v", len(results), err)
	}
	for i, result := range results {
		if _, ok := e.Get(t, fmt.Sprintf("k/%d", i)); (result == nil) != ok || ok == (i == 3) {
			t.Errorf("attempt %d: %v, its key exists: %t", i, result, ok)
		}
	}
}
