// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
)

// wantedTools are the programs that tests start.
var wantedTools = []string{"bpftool", "ip", "tc"}

// findTools returns the files of programs on the host and of the shared libraries they need, each once.
func findTools(ctx context.Context, names ...string) ([]string, error) {
	var files []string
	for _, name := range names {
		file, err := exec.LookPath(name)
		if err != nil {
			return nil, fmt.Errorf("%w: tests need it: run 'make deps'", err)
		}
		loads, err := runCommand(ctx, ".", "ldd", file)
		if err != nil {
			return nil, err
		}
		files = append(append(files, file), libraries(string(loads))...)
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

// loaded is a line of ldd: "libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x7f…)", or without the arrow for the loader
// itself. What the kernel provides has no path.
var loaded = regexp.MustCompile(`(?m)^\s+(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$`)

// libraries returns the paths in what ldd prints.
func libraries(ldd string) []string {
	var paths []string
	for _, m := range loaded.FindAllStringSubmatch(ldd, -1) {
		paths = append(paths, m[1])
	}
	return paths
}
