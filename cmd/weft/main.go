// SPDX-License-Identifier: Apache-2.0

// Weft is the agent of a node, and the command line that answers every question about it.
//
// Exit codes: 0 all is well, 1 it is not, 2 the command line or the configuration is wrong, 3 no agent answers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

// Exit codes.
const (
	exitOK          = 0
	exitNot         = 1
	exitUsage       = 2
	exitUnreachable = 3
	// exitSignal and the signal's number is the code of a command that a signal has ended, as shells have it: 130 for Ctrl-C.
	exitSignal = 128
)

// errUnhealthy indicates that all was said already, and that it was not good.
var errUnhealthy = errors.New("unhealthy")

// usageError is a mistake in the command line or the configuration.
type usageError struct{ cause error }

func (e *usageError) Error() string { return e.cause.Error() }
func (e *usageError) Unwrap() error { return e.cause }

func usagef(format string, args ...any) error { return &usageError{cause: fmt.Errorf(format, args...)} }

// environment is all that a command takes from its process.
type environment struct {
	ctx            context.Context // ends what runs
	stdin          io.Reader
	stdout, stderr io.Writer
	lookup         func(name string) (value string, ok bool) // of environment variables
	stop           context.CancelCauseFunc                   // ends ctx
	signals        func() <-chan os.Signal                   // asks for the signals that end what runs; nil: nobody sends any
	terminal       bool                                      // stderr is a terminal
	now            func() time.Time
}

func main() {
	_, onTerminal := terminalOf(os.Stderr)
	os.Exit(run(environment{
		ctx: context.Background(), stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, lookup: os.LookupEnv, signals: stopSignals,
		terminal: onTerminal, now: time.Now,
	}, os.Args[1:]))
}

// stopSignals delivers what asks a process to end.
func stopSignals() <-chan os.Signal {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	return signals
}

// daemonAnnotation marks a command that takes the signals that end it by itself.
const daemonAnnotation = "weft-daemon"

// interruption is why a command ends that a signal has ended.
type interruption struct{ signal syscall.Signal }

func (i *interruption) Error() string { return i.signal.String() }

// interrupt ends a command at the first signal, so that it leaves nothing half done and the terminal as it was. The next one ends
// the process, whatever it does.
func (e *environment) interrupt(signals <-chan os.Signal) {
	select {
	case <-e.ctx.Done():
	case s := <-signals:
		if number, ok := s.(syscall.Signal); ok {
			signal.Reset() // all of them
			e.stop(&interruption{number})
		}
	}
}

// run executes one command line and returns the exit code.
func run(env environment, args []string) int {
	env.ctx, env.stop = context.WithCancelCause(env.ctx)
	defer env.stop(nil)
	root, started := newRoot(env)
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	var by *interruption
	switch {
	case errors.As(context.Cause(env.ctx), &by):
		return exitSignal + int(by.signal) // who has ended it knows why it says no more
	case err == nil:
		return exitOK
	}
	var usage *usageError
	switch {
	case errors.Is(err, errUnhealthy):
		return exitNot
	case !*started:
		complain(env.stderr, fmt.Errorf("%w (see `%s --help`)", err, cmd.CommandPath()))
		return exitUsage
	case errors.As(err, &usage):
		complain(env.stderr, err)
		return exitUsage
	case errors.Is(err, api.ErrUnreachable):
		complain(env.stderr, err)
		return exitUnreachable
	}
	complain(env.stderr, err)
	return exitNot
}

// complain prints an error as one line that cannot drive a terminal.
func complain(w io.Writer, err error) {
	fmt.Fprintln(w, "weft: "+printable(strings.TrimSpace(strings.ReplaceAll(err.Error(), "\n", "; "))))
}

// newRoot makes the tree of commands. started becomes true once a command line has proved well-formed.
func newRoot(env environment) (root *cobra.Command, started *bool) {
	started = new(bool)
	root = &cobra.Command{
		Use:   "weft",
		Short: "Cross-cluster workload identity in the kernel of this node",
		Long: "weft brings the identities of the workloads of remote clusters into the kernel of this node.\n\n" +
			"Every option can be given in the environment too: --api-socket as WEFT_API_SOCKET. A flag counts more than the\n" +
			"environment, and that, for the agent, more than the file named by --config.\n\n" +
			"Exit codes: 0 all is well, 1 it is not, 2 the command line or the configuration is wrong, 3 no agent answers.",
		SilenceUsage: true, SilenceErrors: true,
		RunE: needsVerb,
		Args: onlyVerbs,
	}
	root.SetOut(env.stdout)
	root.SetErr(env.stderr)
	root.SetContext(env.ctx)
	root.CompletionOptions.HiddenDefaultCmd = false
	c := newClientOptions(root.PersistentFlags())
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := fromEnvironment(cmd.Flags(), env.lookup); err != nil {
			return err
		}
		*started = true
		if env.signals != nil && cmd.Annotations[daemonAnnotation] == "" {
			go env.interrupt(env.signals())
		}
		return nil
	}
	root.AddCommand(
		agentCommand(env, c), statusCommand(env, c), ipCommand(env, c), nodeCommand(env, c), identityCommand(env, c), serviceCommand(env, c),
		explainCommand(env, c), endpointCommand(env, c), operatorCommand(env),
		clustersCommand(env, c), metricsCommand(env, c), bpfCommand(env, c), flowsCommand(env, c), topCommand(env, c), kvstoreCommand(env, c), troubleshootCommand(env, c),
		verifyCommand(env, c), benchCommand(env, c), cleanupCommand(env, c), diagnoseCommand(env, c),
		configCommand(env, c), pageCommand(env, c), logLevelCommand(env, c), gatherCommand(env, c), versionCommand(env, c),
	)
	addHelp(root)
	return root, started
}

// needsVerb refuses a command that only groups others.
func needsVerb(cmd *cobra.Command, _ []string) error {
	var verbs []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			verbs = append(verbs, sub.Name())
		}
	}
	return usagef("%s needs one of: %s", cmd.CommandPath(), strings.Join(verbs, ", "))
}

// onlyVerbs refuses what a command that only groups others has no verb for, and names those that are spelled alike.
func onlyVerbs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = min(2, len(args[0])/2)
	err := fmt.Errorf("unknown command %q for %q", args[0], cmd.CommandPath())
	if alike := cmd.SuggestionsFor(args[0]); len(alike) > 0 {
		err = fmt.Errorf("%w: did you mean %s?", err, strings.Join(alike, " or "))
	}
	return err
}

// group is a noun that only has verbs.
func group(name, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: name, Short: short, Args: onlyVerbs, RunE: needsVerb}
	cmd.AddCommand(verbs...)
	return cmd
}

// asUsed wants the arguments that the use of a command names: those in brackets may be missing, and of one with dots there may be
// many.
func asUsed(cmd *cobra.Command, args []string) error {
	names := strings.Fields(cmd.Use)[1:]
	for i, name := range names {
		optional := strings.HasPrefix(name, "[")
		switch {
		case i >= len(args) && !optional:
			return fmt.Errorf("%s is missing", name)
		case strings.HasSuffix(name, "..."):
			return nil
		}
	}
	if len(args) > len(names) {
		return fmt.Errorf("there is an argument too many: %q", args[len(names)])
	}
	return nil
}

// newCommand is a command that takes exactly the arguments that use names in capitals.
func newCommand(use, short string, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: asUsed, RunE: run,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
}
