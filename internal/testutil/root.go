// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"os"
	"testing"
)

// RequireRoot fails the test unless it runs as root. Tests about the kernel fail rather than skip, so that a run which
// did not check them cannot look green.
func RequireRoot(t testing.TB) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		t.Fatalf("this test works on the real kernel and needs root, but runs as uid %d: run it with sudo", uid)
	}
}
