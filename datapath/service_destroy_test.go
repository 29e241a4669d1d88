// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// Whether sockets can be ended is found out on one, and told with what follows from it.
//
// lesson: K12
func TestDiagnoseDestroy(t *testing.T) {
	for _, v := range []struct {
		err   error
		level Level
		text  string
	}{
		{nil, Fine, "are ended"},
		{errNoUDPDiag, Warning, "stay with backends that are gone: modprobe udp_diag"},
		{fmt.Errorf("end: %w", errNoDestroy), Warning, "stay with backends that are gone: nothing, unless"},
		{unix.EPERM, Warning, "cannot be tried: operation not permitted"},
	} {
		var e examiner
		e.destroying(v.err)
		wantFinding(t, e.found, v.level, "connected UDP", v.text)
	}
	h := newServiceHost(t)
	var err error
	h.ns.Do(t, func() { err = tryDestroy() })
	if err != nil && !errors.Is(err, errNoUDPDiag) && !errors.Is(err, errNoDestroy) {
		t.Errorf("%v, want that it can be done, or what the kernel lacks", err)
	}
	var want examiner
	want.destroying(err)
	if found := h.diagnose(Diagnosis{ServiceCgroup: h.cgroup.Path()}); !slices.Contains(found, want.found[0]) {
		t.Errorf("want %+v in %+v", want.found[0], found)
	}
}
