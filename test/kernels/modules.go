// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path"
	"strings"
)

// dependencies is what depmod found out about a kernel's modules. Names are written with "_", as the kernel does; files
// are paths below lib/modules/<release>.
type dependencies struct {
	files   map[string]string   // module → file
	needs   map[string][]string // module → modules it needs
	builtin map[string]bool
}

// parseDependencies reads modules.dep ("file: file file…") and modules.builtin (a file per line).
func parseDependencies(dep, builtin string) (dependencies, error) {
	d := dependencies{files: make(map[string]string), needs: make(map[string][]string), builtin: make(map[string]bool)}
	for n, line := range strings.Split(strings.TrimSpace(dep), "\n") {
		file, needs, ok := strings.Cut(line, ":")
		if !ok {
			return dependencies{}, fmt.Errorf("modules.dep: line %d: no colon in %q", n+1, line)
		}
		name := moduleName(file)
		d.files[name] = file
		for _, need := range strings.Fields(needs) {
			d.needs[name] = append(d.needs[name], moduleName(need))
		}
	}
	for _, file := range strings.Fields(builtin) {
		d.builtin[moduleName(file)] = true
	}
	return d, nil
}

// moduleName is the module of a file: "kernel/drivers/net/foo-bar.ko.xz" holds foo_bar.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// order returns the files to load for the wanted modules: each once, behind all that it needs. Modules that are part of
// the kernel itself need no file.
func (d dependencies) order(wanted ...string) ([]string, error) {
	var files []string
	seen := make(map[string]bool)
	var visit func(name string) error
	visit = func(name string) error {
		if seen[name] || d.builtin[name] {
			return nil
		}
		seen[name] = true
		file, ok := d.files[name]
		if !ok {
			return fmt.Errorf("module %s is neither in the kernel nor in its package", name)
		}
		for _, need := range d.needs[name] {
			if err := visit(need); err != nil {
				return fmt.Errorf("%s needs: %w", name, err)
			}
		}
		files = append(files, file)
		return nil
	}
	for _, name := range wanted {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return files, nil
}
