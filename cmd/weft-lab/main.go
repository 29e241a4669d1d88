// SPDX-License-Identifier: Apache-2.0

// Weft-lab builds two clusters on one machine, out of network namespaces, and shows what weft does between them.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	env := &environment{stdout: os.Stdout, stderr: os.Stderr}
	os.Exit(env.run(ctx, os.Args[1:]))
}

// environment is what a run of weft-lab gets from outside: its streams, and the flags that all commands share.
type environment struct {
	stdout, stderr io.Writer

	stateDir string
	prefix   string
	weft     string
}

// Exit codes.
const (
	exitOK    = 0
	exitNotOK = 1
	exitUsage = 2
)

var (
	// errNotWell indicates that a command has already printed what is wrong.
	errNotWell = errors.New("not well")
	// errUsage indicates a mistake in the command line.
	errUsage = errors.New("usage")
)

// run runs weft-lab with the given arguments and returns its exit code.
func (env *environment) run(ctx context.Context, args []string) int {
	root := env.newRootCommand()
	root.SetArgs(args)
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errNotWell):
		return exitNotOK
	}
	fmt.Fprintf(env.stderr, "weft-lab: %v\n", err)
	if errors.Is(err, errUsage) {
		return exitUsage
	}
	return exitNotOK
}

func (env *environment) newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "weft-lab",
		Short: "Two clusters on one machine, made of network namespaces",
		Long: `weft-lab builds two clusters, east and west, on this machine: each with an etcd and two nodes, each node a network
namespace with an agent of its own, its own BPF file system and two pods. It needs root, and the weft binary.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&env.stateDir, "state-dir", defaultStateDir, "directory of the lab's state")
	flags.StringVar(&env.prefix, "prefix", "",
		"first part of the names of the lab's network namespaces (default: the running lab's, or "+defaultPrefix+")")
	flags.StringVar(&env.weft, "weft", "", "the weft binary (default: the one beside weft-lab, else in PATH)")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.AddCommand(
		newUpCommand(env), newStatusCommand(env), newExecCommand(env), newShellCommand(env), newPodCommand(env),
		newDemoCommand(env), newDownCommand(env), newKubernetesCommand(env), newEtcdCommand(), newServeCommand(env), newRequestCommand(env),
	)
	for _, cmd := range root.Commands() {
		usageArgs(cmd)
	}
	return root
}

// usage marks an error as one of the command line.
func usage(err error) error { return fmt.Errorf("%w: %w", errUsage, err) }

// usageArgs makes wrong positional arguments of a command and of those under it errors of usage.
func usageArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usage(err)
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		usageArgs(sub)
	}
}

// lab opens the lab that the flags name. It needs root.
func (env *environment) lab() (*lab, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces and BPF need root: run weft-lab as root")
	}
	return openLab(env.stateDir, env.prefix, env.stdout)
}

// labWithWeft opens the lab and finds the weft binary.
func (env *environment) labWithWeft() (*lab, error) {
	l, err := env.lab()
	if err != nil {
		return nil, err
	}
	l.weft, err = findWeft(env.weft, l.self)
	return l, err
}
