// SPDX-License-Identifier: Apache-2.0

package main

import (
	"sync/atomic"
	"testing"

	"github.com/weftmesh/weft/api"
)

// --wait sees an agent become healthy, and gives up on one that does not, showing what it is like.
func TestStatusWaits(t *testing.T) {
	var asked atomic.Int32
	agent := lab(true)
	agent.Status = func() api.Status { return labStatus(asked.Add(1) > 2) }
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, agent)}
	if code, stdout, stderr := weft(t, env, "status", "--wait", "--brief"); code != exitOK || stdout != "Health:        ok\n" || stderr != "" {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
	if n := asked.Load(); n != 3 {
		t.Errorf("asked %d times, want 3", n)
	}
	env["WEFT_API_SOCKET"] = serveAgent(t, lab(false))
	code, stdout, stderr := weft(t, env, "status", "--wait", "--timeout", "600ms", "--brief")
	if err := contains(stdout, "problems └ cluster south: "); code != exitNot || err != nil || stderr != "" {
		t.Errorf("exit code %d, %v, %q", code, err, stderr)
	}
}
