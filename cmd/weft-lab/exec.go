// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func newExecCommand(env *environment) *cobra.Command {
	outside := false
	cmd := &cobra.Command{
		Use:   "exec NODE|NODE/POD COMMAND [ARG…]",
		Short: "Run a command in the network namespace of a node or a pod",
		Long: `exec becomes the command: its streams and its exit code are the command's. Only the network namespace
and the cgroup change; with --outside-cgroup the cgroup is none of a node's, as that of a pod in a virtual machine: what it sends to a
service is translated at its pod's device. WEFT_API_SOCKET, WEFT_BPFFS and WEFT_OPERATOR_SOCKET lead weft to the node's agent and pins and to the
cluster's operator, and PATH to the lab's own weft and weft-lab.`,
		Example: "  weft-lab exec east-1 weft status\n  weft-lab exec east-1/web ip address",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			return env.become(args[0], args[1:], outside)
		},
	}
	cmd.Flags().BoolVar(&outside, "outside-cgroup", false, "run it in no node's cgroup, so that services are reached by its packets alone")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func newShellCommand(env *environment) *cobra.Command {
	return &cobra.Command{
		Use:   "shell NODE|NODE/POD",
		Short: "Open a shell in the network namespace of a node or a pod",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			fmt.Fprintf(cmd.ErrOrStderr(),
				"This shell is in the network namespace of %s; weft talks to that node's agent. Leave it with exit.\n", args[0])
			return env.become(args[0], []string{cmp.Or(os.Getenv("SHELL"), "/bin/sh")}, false)
		},
	}
}

// become replaces this process by a command in the network namespace of a node or a pod, and in the node's cgroup or outside of
// all. It returns only on an error.
func (env *environment) become(place string, argv []string, outside bool) error {
	l, err := env.lab()
	if err != nil {
		return err
	}
	netNS, n, err := l.findPlace(place)
	if err != nil {
		return err
	}
	// The rest of the command may well not need weft.
	if weft, err := findWeft(env.weft, l.self); err == nil {
		l.weft = weft
	}
	environ := l.commandEnv(n, place)
	path, err := lookPath(argv[0], environ)
	if err != nil {
		return err
	}
	if outside {
		err = l.leaveCgroups()
	} else {
		err = l.joinCgroup(n)
	}
	if err != nil {
		return err
	}
	return inNetNS(netNS, func() error {
		// The kernel ends the other threads and lets the command run in the namespace of this one.
		err := syscall.Exec(path, argv, environ)
		return fmt.Errorf("run %s: %w", path, err)
	})
}

// commandEnv returns the environment of a command at a place of the lab.
func (l *lab) commandEnv(n nodePlan, place string) []string {
	path := os.Getenv("PATH")
	for _, binary := range []string{l.weft, l.self} {
		if binary != "" {
			path = filepath.Dir(binary) + string(os.PathListSeparator) + path
		}
	}
	var environ []string
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if !slices.Contains([]string{"PATH", "WEFT_LAB_PLACE", "WEFT_API_SOCKET", "WEFT_BPFFS", "WEFT_OPERATOR_SOCKET"}, name) &&
			(name != "KUBECONFIG" || !l.kubernetes()) {
			environ = append(environ, v)
		}
	}
	environ = append(environ, "PATH="+path, "WEFT_LAB_PLACE="+place)
	return append(environ, l.weftEnv(n)...)
}

// lookPath finds a program by the PATH of an environment that is not this process's own.
func lookPath(name string, environ []string) (string, error) {
	if strings.Contains(name, "/") {
		return exec.LookPath(name)
	}
	for _, v := range environ {
		path, ok := strings.CutPrefix(v, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(path) {
			if dir == "" {
				continue
			}
			if found, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
				return found, nil
			}
		}
	}
	return "", &exec.Error{Name: name, Err: errors.New("not found in PATH")}
}
