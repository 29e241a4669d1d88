// SPDX-License-Identifier: Apache-2.0

package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"time"

	"github.com/weftmesh/weft/test/kernels/job"
)

// suite is one package's tests about the kernel.
type suite struct {
	pkg string // directory below the module's root
	// olderSkip is -test.skip on kernels before tcx: what needs it, and has no counterpart there.
	olderSkip string
	// oldestSkip is the same before Linux 5.16.
	oldestSkip string
}

const aboutLinks = "TestDeviceComesAndGoes|TestDeviceMovesAway|TestRenamedDeviceKeepsItsLinks|TestDeselectedDevice|" +
	"TestOlderProgramIsUpdatedInPlace|TestDeadLinksAreReplaced|TestLink.*"

var suites = []suite{
	// The live tests attach programs to devices by links.
	// Before 5.16 the kernel does not tell how many instructions it verified, and before 5.11 two capabilities do not suffice.
	{pkg: "bpf", olderSkip: "^TestLive", oldestSkip: "^TestLive|^(TestVerifiedInstructions|TestLoadWithTwoCapabilities)$"},
	// These look at links. What they prove of links, TestFilter* and the rest prove of filters. Before 5.16 the trie does not
	// let entries be changed once it is full, either.
	{pkg: "datapath", olderSkip: "^(" + aboutLinks + ")$", oldestSkip: "^(" + aboutLinks + "|TestKernelMapFull)$"},
}

// tcx is the first series with links of programs to devices (bpf_link for tcx). Before it weft attaches by filters.
const tcx = "6.6"

// flags selects the suite's tests on a kernel.
func (s suite) flags(series, run string) []string {
	if compareVersions(series, tcx) >= 0 {
		return []string{"-test.run", run}
	}
	skip := s.olderSkip
	if s.oldestSkip != "" && compareVersions(series, "5.16") < 0 {
		skip = s.oldestSkip
	}
	return []string{"-test.run", run, "-test.skip", skip}
}

// moduleRoot is where the packages' files lie in the machine, as they lie in the module: tests open testdata by
// relative paths.
const moduleRoot = "/weft"

// wantedModules are what the tests and the code under test make devices, qdiscs and filters of.
var wantedModules = []string{
	"veth", "vxlan", "udp_tunnel", "ip6_udp_tunnel", "sch_ingress", "cls_bpf", "dummy", "tun", "bridge", "inet_diag", "udp_diag",
}

// payload is what all kernels run: the first process and the test binaries, built.
type payload struct {
	root   string // of the module
	init   string // file
	suites []suite
	tests  map[string]string // package → file
	tools  []string          // files of the host, at the same paths in the machine
}

// build builds the payload into a directory.
func build(ctx context.Context, root, dir string, suites []suite) (payload, error) {
	p := payload{root: root, init: filepath.Join(dir, "init"), suites: suites, tests: make(map[string]string)}
	const strip = "-ldflags=-s -w"
	if err := goTool(ctx, root, "build", strip, "-o", p.init, "./test/kernels/init"); err != nil {
		return payload{}, err
	}
	for _, s := range suites {
		file := filepath.Join(dir, path.Base(s.pkg)+".test")
		if err := goTool(ctx, root, "test", "-c", strip, "-o", file, "./"+s.pkg); err != nil {
			return payload{}, err
		}
		if _, err := os.Stat(file); err != nil {
			return payload{}, fmt.Errorf("%s has no tests", s.pkg)
		}
		p.tests[s.pkg] = file
	}
	var err error
	p.tools, err = findTools(ctx, wantedTools...)
	return p, err
}

// goTool runs the go command such that it makes static executables for the machine.
func goTool(ctx context.Context, root string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	cmd.Stderr = os.Stderr // the compiler's errors are for the reader as they are
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s: %w", args[0], err)
	}
	return nil
}

// job is what a machine with a kernel does, each binary within limit. It also returns the files of the modules to load.
func (p payload) job(k kernel, id, run string, limit time.Duration) (j job.Job, modules []string, err error) {
	dep, err := os.ReadFile(filepath.Join(k.modules, "modules.dep"))
	if err != nil {
		return job.Job{}, nil, err
	}
	builtin, err := os.ReadFile(filepath.Join(k.modules, "modules.builtin"))
	if err != nil {
		return job.Job{}, nil, err
	}
	d, err := parseDependencies(string(dep), string(builtin))
	if err != nil {
		return job.Job{}, nil, err
	}
	if modules, err = d.order(wantedModules...); err != nil {
		return job.Job{}, nil, err
	}
	j.ID = id
	for _, module := range modules {
		j.Modules = append(j.Modules, path.Join("/modules", module))
	}
	for _, s := range p.suites {
		j.Runs = append(j.Runs, job.Run{
			Package: s.pkg,
			Dir:     path.Join(moduleRoot, s.pkg),
			Binary:  path.Join("/tests", path.Base(p.tests[s.pkg])),
			Args:    append([]string{"-test.v=test2json", "-test.count=1", "-test.timeout", limit.String()}, s.flags(k.series, run)...),
		})
	}
	return j, modules, nil
}

// writeRoot writes the first root of a machine: a compressed archive for the kernel to unpack.
func (p payload) writeRoot(file string, k kernel, j job.Job, modules []string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	zip, err := gzip.NewWriterLevel(out, gzip.BestSpeed) // unpacking is what takes time
	if err != nil {
		return errors.Join(err, out.Close())
	}
	err = p.fill(newArchive(zip), k, j, modules)
	return errors.Join(err, zip.Close(), out.Close())
}

func (p payload) fill(a *archive, k kernel, j job.Job, modules []string) error {
	description, err := json.Marshal(j)
	if err != nil {
		return err
	}
	a.file(job.File, 0o644, description)
	a.copy("/init", p.init)
	for i, module := range modules {
		a.copy(j.Modules[i], filepath.Join(k.modules, module))
	}
	for i, s := range p.suites {
		a.copy(j.Runs[i].Binary, p.tests[s.pkg])
		a.tree(j.Runs[i].Dir, filepath.Join(p.root, s.pkg))
	}
	for _, tool := range p.tools {
		a.copy(tool, tool)
	}
	a.tree(path.Join(moduleRoot, "test/testdata"), filepath.Join(p.root, "test/testdata"))
	return a.close()
}
