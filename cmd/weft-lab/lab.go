// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	defaultStateDir = "/run/weft-lab"
	defaultPrefix   = "weft"

	defaultRoutingMode = "native"

	// askPatience bounds how long something that runs has to answer on a busy machine.
	askPatience = 10 * time.Second
)

var (
	errNoLab = errors.New("no lab is up: start one with `weft-lab up`")
	errBusy  = errors.New("another weft-lab is at work on this lab: wait for it to end")
)

// lab is one lab on this machine: a topology, and the directory that holds its state.
type lab struct {
	topology
	mode string // how the nodes reach the pods of others: "native" or "tunnel"
	dir  string // absolute
	weft string // the weft binary; empty where a command has no need of it
	// apiserver is the program of Kubernetes' API server; empty in a lab without Kubernetes.
	apiserver string
	self      string // this binary
	out       io.Writer
}

// manifest is the file that tells what stands in a state directory.
type manifest struct {
	Prefix      string    `json:"prefix"`
	RoutingMode string    `json:"routingMode"`
	APIServer   string    `json:"kubeAPIServer,omitempty"`
	Created     time.Time `json:"created"`
	Complete    bool      `json:"complete"` // the network has been built to its end
}

func (l *lab) manifestFile() string { return filepath.Join(l.dir, "lab.json") }

// readManifest returns the manifest of a state directory, or an error that is os.ErrNotExist.
func readManifest(dir string) (manifest, error) {
	var m manifest
	content, err := os.ReadFile(filepath.Join(dir, "lab.json"))
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(content, &m); err != nil {
		return m, fmt.Errorf("read %s: %w", filepath.Join(dir, "lab.json"), err)
	}
	return m, nil
}

func (l *lab) writeManifest(complete bool) error {
	content, err := json.Marshal(manifest{
		Prefix: l.Prefix, RoutingMode: l.mode, APIServer: l.apiserver, Created: time.Now().UTC(), Complete: complete,
	})
	if err != nil {
		return err
	}
	return writeFile(l.manifestFile(), append(content, '\n'))
}

// openLab returns the lab of a state directory. The prefix is the manifest's where there is one, so that only `up`
// need be told; a given prefix that differs from it is an error. An empty prefix means the default.
func openLab(dir, prefix string, out io.Writer) (*lab, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	mode, apiserver := defaultRoutingMode, ""
	switch m, err := readManifest(dir); {
	case err == nil && prefix != "" && prefix != m.Prefix:
		return nil, fmt.Errorf("the lab in %s has the prefix %q: take it down first, or give another --state-dir", dir, m.Prefix)
	case err == nil:
		prefix, mode, apiserver = m.Prefix, cmp.Or(m.RoutingMode, mode), m.APIServer
	case !errors.Is(err, os.ErrNotExist) && !isSyntax(err):
		return nil, err
	}
	if prefix == "" {
		prefix = defaultPrefix
	}
	if err := validatePrefix(prefix); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program's own file: %w", err)
	}
	return &lab{topology: newTopology(prefix), mode: mode, dir: dir, self: self, apiserver: apiserver, out: out}, nil
}

// choice is what may be chosen of a lab that is to be built. What one that stands is like cannot be changed.
type choice struct {
	mode       string // "": native, or as the lab that stands
	kubernetes bool
	apiserver  string // the program; "": see findAPIServer
}

// choose makes a lab that is to be built as it is wanted, and refuses what one that stands is not.
func (l *lab) choose(want choice) error {
	if want.mode != "" && want.mode != "native" && want.mode != "tunnel" {
		return usage(fmt.Errorf("--routing-mode %q: give native or tunnel", want.mode))
	}
	if want.apiserver != "" && !want.kubernetes {
		return usage(errors.New("--kube-apiserver goes with --kubernetes: give that, too"))
	}
	stands, err := l.stands()
	switch {
	case err != nil:
		return err
	case stands && want.mode != "" && want.mode != l.mode:
		return fmt.Errorf("the lab in %s has the routing mode %s: take it down first", l.dir, l.mode)
	case stands && want.kubernetes && !l.kubernetes():
		return fmt.Errorf("the lab in %s has no Kubernetes: take it down first", l.dir)
	case stands:
		return nil
	}
	l.mode = cmp.Or(want.mode, l.mode)
	if want.kubernetes {
		l.apiserver, err = findAPIServer(want.apiserver, l.self)
	}
	return err
}

// isSyntax reports whether a manifest was cut short by a crash.
func isSyntax(err error) bool {
	var syntax *json.SyntaxError
	return errors.As(err, &syntax)
}

// findWeft returns the weft binary: the one given, else the one beside weft-lab, else the one in PATH.
func findWeft(given, self string) (string, error) {
	if given != "" {
		path, err := exec.LookPath(given)
		if err != nil {
			return "", fmt.Errorf("--weft: %w", err)
		}
		return filepath.Abs(path)
	}
	beside := filepath.Join(filepath.Dir(self), "weft")
	if path, err := exec.LookPath(beside); err == nil {
		return path, nil
	}
	path, err := exec.LookPath("weft")
	if err != nil {
		return "", fmt.Errorf("no weft binary at %s nor in PATH: build it with `make build`, or give --weft PATH", beside)
	}
	return filepath.Abs(path)
}

// lock takes the state directory for this process, and creates it where create says so. The returned function gives it
// back. It fails with errNoLab where there is no directory, with errBusy while another process has it, and where the
// directory or the network namespaces with this prefix belong to something else.
func (l *lab) lock(create bool) (func(), error) {
	if create {
		if err := os.MkdirAll(l.dir, 0o755); err != nil {
			return nil, err
		}
	}
	f, err := os.Open(l.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errNoLab
	}
	if err != nil {
		return nil, err
	}
	if err := l.lockDir(f); err != nil {
		if create && !errors.Is(err, errBusy) {
			_ = os.Remove(l.dir) // where it was made for nothing; one that is not empty stays
		}
		return nil, errors.Join(err, f.Close())
	}
	return func() { f.Close() }, nil
}

func (l *lab) lockDir(f *os.File) error {
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("%s: %w", l.dir, errBusy)
	case err != nil:
		return fmt.Errorf("lock %s: %w", l.dir, err)
	}
	// Between the opening and the lock, another `down` may have removed the directory.
	if !sameFile(f, l.dir) {
		return fmt.Errorf("%s: %w", l.dir, errBusy)
	}
	return l.checkOwner(f)
}

// checkOwner keeps a mistaken --state-dir or --prefix from removing what is not this lab's: the manifest is the first
// thing that a lab writes and the last that it removes.
func (l *lab) checkOwner(dir *os.File) error {
	owner, err := switchOwner(l.netNet())
	if err != nil {
		return err
	}
	if owner != "" && owner != l.dir {
		return fmt.Errorf("network namespaces %s-… belong to the lab in %s: give another --prefix, or --state-dir %s",
			l.Prefix, owner, owner)
	}
	if _, err := os.Stat(l.manifestFile()); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	switch names, err := dir.Readdirnames(1); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	default:
		return fmt.Errorf("%s holds %s and no lab: give an empty or a new directory as --state-dir", l.dir, names[0])
	}
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

func (l *lab) nodesDir() string                  { return filepath.Join(l.dir, "nodes") }
func (l *lab) nodeFile(node, name string) string { return filepath.Join(l.nodesDir(), node, name) }
func (l *lab) bpffs(node string) string          { return l.nodeFile(node, "bpf") }
func (l *lab) socket(node string) string         { return l.nodeFile(node, "weft.sock") }
func (l *lab) endpoints(node string) string      { return l.nodeFile(node, "endpoints") }
func (l *lab) etcdFile(cluster, name string) string {
	return filepath.Join(l.dir, "etcd", cluster, name)
}

// weftEnv is the environment in which the command-line nouns of weft find a node's agent and pins, and its cluster's operator,
// and kubectl the cluster's API server.
func (l *lab) weftEnv(n nodePlan) []string {
	environ := []string{
		"WEFT_API_SOCKET=" + l.socket(n.Name), "WEFT_BPFFS=" + l.bpffs(n.Name), "WEFT_OPERATOR_SOCKET=" + l.operatorSocket(n.Cluster),
	}
	if l.kubernetes() {
		environ = append(environ, "KUBECONFIG="+l.kubeconfig(n.Cluster))
	}
	return environ
}

// say prints one line of progress.
func (l *lab) say(format string, args ...any) { fmt.Fprintf(l.out, format+"\n", args...) }

// done prints one line about something that has come true.
func (l *lab) done(format string, args ...any) { l.say("  ✓ "+format, args...) }

// writeFile replaces a file in one step, so that no reader sees half of it.
func writeFile(path string, content []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	if _, err := tmp.Write(content); err != nil {
		tmp.Close()
		return err
	}
	if err := tmp.Chmod(0o644); err != nil {
		tmp.Close()
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}
