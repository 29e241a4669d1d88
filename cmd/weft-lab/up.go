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

func newUpCommand(env *environment) *cobra.Command {
	var want choice
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Build the lab, or check and repair one that is up",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := env.labWithWeft()
			if err != nil {
				return err
			}
			unlock, err := l.lock(true)
			if err != nil {
				return err
			}
			defer unlock()
			if err := l.choose(want); err != nil {
				return err
			}
			if err := l.up(cmd.Context()); err != nil {
				if cmd.Context().Err() != nil {
					err = context.Cause(cmd.Context())
				}
				return fmt.Errorf("%w\nwhat has been built stays for you to look at; `weft-lab down` removes it", err)
			}
			l.say("\nThe lab is up. Look around with `weft-lab status`, `weft-lab exec east-1 weft status`, `weft-lab shell east-1`.")
			return nil
		},
	}
	cmd.Flags().BoolVar(&want.kubernetes, "kubernetes", false,
		"give each cluster an API server of Kubernetes, from which its operator and its agents have the services")
	cmd.Flags().StringVar(&want.apiserver, "kube-apiserver", "",
		"the program of the API server (default: the one beside weft-lab, else what `make kube-apiserver` builds, else in PATH)")
	cmd.Flags().StringVar(&want.mode, "routing-mode", "",
		"how nodes reach the pods of others: native, or tunnel, through an overlay (default: the running lab's, or "+defaultRoutingMode+")")
	return cmd
}

// up makes the lab stand and work. The caller holds the lock.
func (l *lab) up(ctx context.Context) error {
	switch stands, err := l.stands(); {
	case err != nil:
		return err
	case stands:
		l.say("A lab is already up in %s: checking it.", l.dir)
	default:
		if err := l.cleanLeftovers(ctx); err != nil {
			return err
		}
		if err := l.buildNetwork(); err != nil {
			return err
		}
	}
	if err := l.startEtcds(ctx); err != nil {
		return err
	}
	if err := l.startKubernetes(ctx); err != nil {
		return err
	}
	if err := l.startOperators(ctx); err != nil {
		return err
	}
	return l.startAgents(ctx)
}

// stands reports whether a lab's network is there in full, whether or not its processes run.
func (l *lab) stands() (bool, error) {
	m, err := readManifest(l.dir)
	if errors.Is(err, os.ErrNotExist) || isSyntax(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if !m.Complete || !netNSAlive(l.netNet()) {
		return false, nil
	}
	for _, c := range l.Clusters {
		if !netNSAlive(c.Etcd.NetNS) {
			return false, nil
		}
		for _, n := range c.Nodes {
			if whole, err := l.nodeStands(n); err != nil || !whole {
				return false, err
			}
		}
	}
	return true, nil
}

func (l *lab) nodeStands(n nodePlan) (bool, error) {
	if !netNSAlive(n.NetNS) || !bpffsMounted(l.bpffs(n.Name)) || !cgroupsMounted(l.cgroup(n)) {
		return false, nil
	}
	pods, err := l.pods(n)
	if err != nil {
		return false, err
	}
	for _, p := range pods {
		if !netNSAlive(p.NetNS) {
			return false, nil
		}
	}
	return true, nil
}

// cleanLeftovers removes what a crash or a reboot left of an earlier lab.
func (l *lab) cleanLeftovers(ctx context.Context) error {
	names, err := netNSNames(l.topology)
	if err != nil {
		return err
	}
	files, err := os.ReadDir(l.dir)
	if err != nil {
		return err
	}
	if len(names) == 0 && len(files) == 0 {
		return nil
	}
	l.say("Cleaning up what an earlier run left behind")
	if err := l.tearDown(ctx); err != nil {
		return err
	}
	l.done("%d network namespaces and the state in %s removed", len(names), l.dir)
	return nil
}

// buildNetwork makes every namespace, device and address of the lab, and the files of its nodes.
func (l *lab) buildNetwork() error {
	l.say("Building the network")
	if err := l.writeManifest(false); err != nil {
		return err
	}
	bridge, err := buildSwitch(l.netNet(), l.dir)
	if err != nil {
		return err
	}
	defer bridge.close()
	if err := l.mountCgroups(); err != nil {
		return err
	}
	for _, c := range l.Clusters {
		if err := l.writeClusterFiles(c); err != nil {
			return err
		}
		if err := buildEtcdNetwork(bridge, c.Etcd); err != nil {
			return err
		}
		for _, n := range c.Nodes {
			if err := l.buildNode(bridge, n); err != nil {
				return err
			}
			l.done("node %s: %s and %s, pods in %s and %s", n.Name, n.IPv4.Addr(), n.IPv6.Addr(), n.PodCIDR4, n.PodCIDR6)
		}
	}
	return l.writeManifest(true)
}

func (l *lab) buildNode(bridge *netNamespace, n nodePlan) error {
	if err := buildNodeNetwork(bridge, n); err != nil {
		return err
	}
	if err := l.writeNodeFiles(n); err != nil {
		return err
	}
	if err := mountBPFFS(l.bpffs(n.Name)); err != nil {
		return err
	}
	if err := l.buildCgroup(n); err != nil {
		return err
	}
	for _, p := range n.Pods {
		if err := l.addPod(n, p); err != nil {
			return err
		}
	}
	return nil
}

func (l *lab) startEtcds(ctx context.Context) error {
	l.say("Starting an etcd for each cluster")
	started := make(map[string]string)
	for _, c := range l.Clusters {
		if err := os.MkdirAll(l.etcdFile(c.Name, ""), 0o755); err != nil {
			return err
		}
		isNew, err := l.etcdDaemon(c).ensure()
		if err != nil {
			return err
		}
		started[c.Name] = startedWord(isNew)
	}
	for _, c := range l.Clusters {
		since := time.Now()
		if err := l.waitEtcd(ctx, c); err != nil {
			return err
		}
		l.done("%s: etcd at %s answers%s%s", c.Name, c.Etcd.endpoint(), started[c.Name], took(since))
	}
	return nil
}

func (l *lab) startOperators(ctx context.Context) error {
	l.say("Starting an operator for each cluster (%s)", filepath.Base(l.weft)+" operator")
	started := make(map[string]string)
	for _, c := range l.Clusters {
		isNew, err := l.operatorDaemon(c).ensure()
		if err != nil {
			return err
		}
		started[c.Name] = startedWord(isNew)
	}
	for _, c := range l.Clusters {
		since := time.Now()
		if err := l.waitOperator(ctx, c); err != nil {
			return err
		}
		l.done("%s: the cluster and its global services are published%s%s", c.Name, started[c.Name], took(since))
	}
	return nil
}

func (l *lab) startAgents(ctx context.Context) error {
	l.say("Starting an agent on each node (%s)", filepath.Base(l.weft)+" agent")
	started := make(map[string]string)
	for _, n := range l.nodes() {
		isNew, err := l.agentDaemon(n).ensure()
		if err != nil {
			return err
		}
		started[n.Name] = startedWord(isNew)
	}
	for _, n := range l.nodes() {
		since := time.Now()
		if err := l.waitAgent(ctx, n); err != nil {
			return err
		}
		if err := l.waitKernel(ctx, n); err != nil {
			return err
		}
		l.done("%s: ready, its kernel knows every pod of the other cluster%s%s", n.Name, started[n.Name], took(since))
	}
	return nil
}

// startedWord marks in a check of a running lab what was found running.
func startedWord(started bool) string {
	if started {
		return ""
	}
	return ", as before"
}

// took tells how long something was waited for, where it was long enough to be told.
func took(since time.Time) string {
	d := time.Since(since)
	if d < 100*time.Millisecond {
		return ""
	}
	return fmt.Sprintf(" (%.1f s)", d.Seconds())
}
