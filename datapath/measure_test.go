// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// Every figure is there. How large they are is this machine's affair.
func TestMeasure(t *testing.T) {
	testutil.RequireRoot(t)
	c, err := Measure(t.Context(), 5000, func(string, int, int) {})
	if err != nil {
		t.Fatal(err)
	}
	if c.Write <= 0 || c.WriteHash <= 0 || c.Packet <= 0 || c.World <= 0 || c.Empty < 0 {
		t.Errorf("%+v", c)
	}
	t.Logf("%+v", c)
}
