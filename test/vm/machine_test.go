// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fakeEmulator puts a shell script in the emulator's place.
func fakeEmulator(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, Emulator), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestMachineDelivers(t *testing.T) {
	fakeEmulator(t, `
for arg; do case $arg in file:*) port=${arg#file:};; esac; done
echo "console of $*"
printf 'one\r\n\ntwo\n' >$port
printf 'no end' >$port`)
	var lines []string
	console, err := Machine{Image: "vmlinuz", Root: "initrd", Disks: []string{"disk"}, Append: "root=/dev/vda"}.Run(t.Context(), func(line string) { lines = append(lines, line) })
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"one", "", "two", "no end"}, lines); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	for _, want := range []string{"console of", "-kernel vmlinuz", "-initrd initrd", "-accel tcg",
		"panic=-1 oops=panic root=/dev/vda", "-drive file=disk,format=raw,if=virtio,snapshot=on",
	} {
		if !strings.Contains(console, want) {
			t.Errorf("console %q lacks %q", console, want)
		}
	}
}

func TestMachineFails(t *testing.T) {
	fakeEmulator(t, "echo last words; echo no such machine >&2; exit 3")
	console, err := Machine{}.Run(t.Context(), func(string) {})
	if err == nil || !strings.Contains(err.Error(), "exit status 3: no such machine") || console != "last words\n" {
		t.Errorf("%v, console %q, want the exit code, what the emulator says, and the console", err, console)
	}
}

// TestMachineHangs ends a machine that would never end. The test itself would not end either if it stayed alive.
func TestMachineHangs(t *testing.T) {
	fakeEmulator(t, "echo last words; echo alive >&3; exec sleep 1000000")
	late := errors.New("too late")
	ctx, cancel := context.WithCancelCause(t.Context())
	console, err := Machine{}.Run(ctx, func(string) { cancel(late) })
	if !errors.Is(err, late) || console != "last words\n" {
		t.Errorf("%v, console %q, want %v and the console", err, console, late)
	}
}

func TestLineWithoutBounds(t *testing.T) {
	endless := strings.NewReader(strings.Repeat("x", longestLine+1) + "\nnext\n")
	if err := deliverLines(endless, func(string) {}); err == nil || endless.Len() != 0 {
		t.Errorf("%v with %d bytes unread, want an error and everything read", err, endless.Len())
	}
}

func TestTail(t *testing.T) {
	out := &tail{max: 5}
	for _, s := range []string{"ab", "cde", "f", "ghijklmnop"} {
		if n, err := out.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatalf("write %q: %d %v", s, n, err)
		}
	}
	if got := out.String(); got != "lmnop" {
		t.Errorf("tail %q, want the last 5 bytes", got)
	}
}
