// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	packagePrefix = "linux-image-"
	// Debian's kernel for virtual machines: the smallest that has everything needed here, and signed.
	packageSuffix = "-cloud-amd64"
)

// olderSuites are the suites of Debian with kernels that the machine's own suite does not have.
var olderSuites = map[string]string{"5.10": "bullseye"}

// kernel is one of Debian's kernels, unpacked.
type kernel struct {
	series  string // as asked for: "6.1"
	release string // as uname -r prints it: "6.1.0-56-cloud-amd64"
	image   string // file
	modules string // directory lib/modules/<release>, with modules.dep
}

// debian finds kernels in the archive that the machine's own apt knows and keeps them unpacked in a directory. It never
// learns where that archive is.
type debian struct {
	dir     string
	log     io.Writer
	run     func(ctx context.Context, dir, name string, args ...string) (stdout []byte, err error)
	updated bool // apt's lists were fetched in this run: once is enough
	// options make apt look into another suite than the machine's, with lists of its own; empty for the machine's.
	options []string
}

// of returns the debian that has the kernels of a series.
func (d *debian) of(ctx context.Context, series string) (*debian, error) {
	suite, older := olderSuites[series]
	if !older {
		return d, nil
	}
	sites, err := d.sites(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(filepath.Join(d.dir, "apt-"+suite))
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, err
		}
	}
	list := filepath.Join(dir, "sources.list")
	const deb = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n"
	source := fmt.Sprintf(deb, sites["Debian"], suite)
	if security := sites["Debian-Security"]; security != "" { // the later kernels, with fixes
		source += fmt.Sprintf(deb, security, suite+"-security")
	}
	if err := os.WriteFile(list, []byte(source), 0o644); err != nil {
		return nil, err
	}
	return &debian{dir: d.dir, log: d.log, run: d.run, options: []string{
		"-o", "Dir::Etc::sourcelist=" + list, "-o", "Dir::Etc::sourceparts=-",
		"-o", "Dir::State::lists=" + filepath.Join(dir, "lists"), "-o", "Dir::Cache=" + filepath.Join(dir, "cache"),
	}}, nil
}

// sites is where the machine's own apt finds the archives, by their labels. Debian's is among them.
func (d *debian) sites(ctx context.Context) (map[string]string, error) {
	for {
		targets, err := d.run(ctx, ".", "apt-get", "indextargets", "--format", "$(LABEL) $(SITE)", "Created-By: Packages")
		if err != nil {
			return nil, err
		}
		sites := map[string]string{}
		for line := range strings.Lines(string(targets)) {
			if label, site, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
				sites[label] = site
			}
		}
		if sites["Debian"] != "" {
			return sites, nil
		}
		if d.updated {
			return nil, errors.New("apt knows no archive of Debian")
		}
		if err := d.update(ctx); err != nil {
			return nil, err
		}
	}
}

// apt are the arguments of a program of apt.
func (d *debian) apt(args ...string) []string { return append(slices.Clone(d.options), args...) }

// kernel returns the newest kernel of a series, fetching it unless it is there.
func (d *debian) kernel(ctx context.Context, series string) (kernel, error) {
	d, err := d.of(ctx, series)
	if err != nil {
		return kernel{}, fmt.Errorf("kernel %s: %w", series, err)
	}
	pkg, err := d.newest(ctx, series)
	if err != nil {
		return kernel{}, fmt.Errorf("kernel %s: %w", series, err)
	}
	root := filepath.Join(d.dir, pkg)
	release := strings.TrimPrefix(pkg, packagePrefix)
	if _, err := os.Stat(root); err != nil {
		fmt.Fprintf(d.log, "%s: fetching %s\n", series, pkg)
		if err := d.fetch(ctx, pkg, release, root); err != nil {
			return kernel{}, fmt.Errorf("kernel %s: fetch %s: %w", series, pkg, err)
		}
	}
	return kernel{
		series:  series,
		release: release,
		image:   filepath.Join(root, "boot", "vmlinuz-"+release),
		modules: filepath.Join(root, "lib", "modules", release),
	}, nil
}

// newest returns the package of the newest kernel of a series. Where apt knows none its lists may be empty, as in a fresh
// container: they are fetched then.
func (d *debian) newest(ctx context.Context, series string) (string, error) {
	for {
		pattern := "^" + packagePrefix + strings.ReplaceAll(series, ".", `\.`) + `\..*` + packageSuffix + "$"
		found, err := d.run(ctx, ".", "apt-cache", d.apt("search", "--names-only", pattern)...)
		if err != nil {
			return "", err
		}
		if pkg, ok := newestPackage(string(found), series); ok {
			return pkg, nil
		}
		if d.updated {
			return "", fmt.Errorf("apt knows no package %s%s.*%s: is this Debian on amd64?", packagePrefix, series, packageSuffix)
		}
		if err := d.update(ctx); err != nil {
			return "", err
		}
	}
}

func (d *debian) update(ctx context.Context) error {
	d.updated = true
	_, err := d.run(ctx, ".", "apt-get", d.apt("-qq", "update")...)
	return err
}

// fetch downloads a package and unpacks it aside; the directory root appears complete or not at all.
func (d *debian) fetch(ctx context.Context, pkg, release, root string) error {
	tmp, err := os.MkdirTemp(d.dir, "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	_, err = d.run(ctx, tmp, "apt-get", d.apt("-qq", "download", pkg)...)
	if err != nil && !d.updated { // the archive may have moved on from the lists
		if err := d.update(ctx); err != nil {
			return err
		}
		_, err = d.run(ctx, tmp, "apt-get", d.apt("-qq", "download", pkg)...)
	}
	if err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download left %d packages, want 1", len(debs))
	}
	if _, err := d.run(ctx, tmp, "dpkg-deb", "-x", debs[0], "root"); err != nil {
		return err
	}
	// The package's own post-installation script would do this.
	if _, err := d.run(ctx, tmp, "depmod", "-b", "root", release); err != nil {
		return fmt.Errorf("%w (depmod is in Debian's package kmod)", err)
	}
	return os.Rename(filepath.Join(tmp, "root"), root)
}

// newestPackage picks the newest kernel of a series from the lines "name - description" of apt-cache search. Packages
// that only depend on the newest one, unsigned ones and those with debug symbols are not meant.
func newestPackage(found, series string) (string, bool) {
	newest := ""
	for line := range strings.Lines(found) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		version, ok := strings.CutPrefix(name, packagePrefix+series+".")
		if !ok || !strings.HasSuffix(version, packageSuffix) {
			continue
		}
		if newest == "" || compareVersions(name, newest) > 0 {
			newest = name
		}
	}
	return newest, newest != ""
}

// compareVersions compares runs of digits as numbers and what is between them as text: "6.1.0-9" is before "6.1.0-10".
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		var textA, textB string
		textA, a = cutAt(a, isDigit)
		textB, b = cutAt(b, isDigit)
		if c := cmp.Compare(textA, textB); c != 0 {
			return c
		}
		var numA, numB string
		numA, a = cutAt(a, isNoDigit)
		numB, b = cutAt(b, isNoDigit)
		nA, _ := strconv.ParseUint(numA, 10, 64)
		nB, _ := strconv.ParseUint(numB, 10, 64)
		if c := cmp.Compare(nA, nB); c != 0 {
			return c
		}
	}
	return cmp.Compare(len(a), len(b))
}

func isDigit(r rune) bool   { return '0' <= r && r <= '9' }
func isNoDigit(r rune) bool { return !isDigit(r) }

// cutAt cuts s before the first rune that is.
func cutAt(s string, is func(rune) bool) (before, after string) {
	if i := strings.IndexFunc(s, is); i >= 0 {
		return s[:i], s[i:]
	}
	return s, ""
}

// runCommand runs a program in a directory and returns what it printed; what it complained about is in the error.
func runCommand(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err == nil {
		return out, nil
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	err = fmt.Errorf("%s: %w", strings.Join(append([]string{name}, args...), " "), err)
	if said := strings.TrimSpace(stderr.String()); said != "" {
		err = errors.Join(err, errors.New(said))
	}
	return nil, err
}
