// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
)

func newDownCommand(env *environment) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Remove the lab: its processes, mounts, namespaces and state",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := env.lab()
			if err != nil {
				return err
			}
			names, err := netNSNames(l.topology)
			if err != nil {
				return err
			}
			if _, err := os.Stat(l.dir); errors.Is(err, os.ErrNotExist) && len(names) == 0 {
				l.say("No lab is up.")
				return nil
			}
			unlock, err := l.lock(true)
			if err != nil {
				return err
			}
			defer unlock()
			if err := l.down(cmd.Context()); err != nil {
				return err
			}
			l.say("The lab is gone.")
			return nil
		},
	}
}

// down removes the lab and its state directory. The caller holds the lock, which goes with the directory.
func (l *lab) down(ctx context.Context) error {
	if err := l.tearDown(ctx); err != nil {
		return err
	}
	if err := os.Remove(l.dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// tearDown stops the lab's processes and removes its mounts, its network namespaces and the content of its state
// directory. It goes on past an error, and returns them all; what is absent is fine.
func (l *lab) tearDown(ctx context.Context) error {
	var errs []error
	for _, d := range l.daemons() {
		errs = append(errs, d.stop(ctx, 3*time.Second))
	}
	for _, n := range l.nodes() {
		errs = append(errs, unmountAll(l.bpffs(n.Name)))
	}
	errs = append(errs, l.removeCgroups())
	names, err := netNSNames(l.topology)
	errs = append(errs, err)
	for _, name := range names {
		errs = append(errs, deleteNetNS(name))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take the lab down: %w", err)
	}
	return l.removeState()
}

// daemons returns the lab's long-lived processes, whether they run or not, in the order in which to stop them.
func (l *lab) daemons() []daemon {
	var all []daemon
	for _, n := range l.nodes() {
		all = append(all, l.agentDaemon(n))
	}
	for _, c := range l.Clusters {
		all = append(all, l.operatorDaemon(c), l.kubeDaemon(c), l.etcdDaemon(c))
	}
	return all
}

// removeState removes what the lab keeps in its state directory, by name: the directory may have been given by a user.
func (l *lab) removeState() error {
	for _, n := range l.nodes() {
		// Removing the pins of a file system that is still mounted would take the kernel's objects from under someone.
		if bpffsMounted(l.bpffs(n.Name)) {
			return fmt.Errorf("%s is still mounted", l.bpffs(n.Name))
		}
	}
	if cgroupsMounted(l.cgroupRoot()) {
		return fmt.Errorf("%s is still mounted", l.cgroupRoot())
	}
	for _, name := range []string{"cgroup", "nodes", "operators", "services", "kubernetes", "etcd", "lab.json"} {
		if err := os.RemoveAll(filepath.Join(l.dir, name)); err != nil {
			return err
		}
	}
	return nil
}
