// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestLibraries finds the files of a real program too.
func TestLibraries(t *testing.T) {
	const ldd = "\tlinux-vdso.so.1 (0x00007f5364388000)\n" +
		"\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f53642b7000)\n" +
		"\t/lib64/ld-linux-x86-64.so.2 (0x00007f536438a000)\n"
	want := []string{"/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"}
	if diff := cmp.Diff(want, libraries(ldd)); diff != "" {
		t.Errorf("libraries (-want +got):\n%s", diff)
	}
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	files, err := findTools(t.Context(), "sh", "sh")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 2 || !slices.Contains(files, sh) {
		t.Errorf("files of sh: %v, want the program and its libraries", files)
	}
	for i, file := range files {
		if _, err := os.Stat(file); err != nil || i > 0 && file == files[i-1] {
			t.Errorf("files of sh: %v: %v", files, err)
		}
	}
	if _, err := findTools(t.Context(), "no-such-program-of-weft"); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("absent program: %v", err)
	}
}
