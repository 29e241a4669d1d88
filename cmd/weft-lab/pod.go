// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// podFile is the declaration of a pod, as the node's agent reads it.
type podFile struct {
	Name           string            `yaml:"name"`
	Namespace      string            `yaml:"namespace"`
	IPs            []string          `yaml:"ips"`
	Labels         map[string]string `yaml:"labels"`
	Identity       uint32            `yaml:"identity"`
	ServiceAccount string            `yaml:"serviceAccount"`
}

// declaration returns the YAML by which the agent of the pod's node knows the pod.
func (p podPlan) declaration() ([]byte, error) {
	return yaml.Marshal(podFile{
		Name:           p.Name,
		Namespace:      namespace,
		IPs:            []string{p.IPv4.String(), p.IPv6.String()},
		Labels:         map[string]string{"app": p.App},
		Identity:       p.Identity,
		ServiceAccount: "default",
	})
}

// parsePod is the inverse of declaration.
func (n nodePlan) parsePod(content []byte) (podPlan, error) {
	var f podFile
	if err := yaml.Unmarshal(content, &f); err != nil {
		return podPlan{}, err
	}
	if err := validatePodName(f.Name); err != nil {
		return podPlan{}, err
	}
	for _, text := range f.IPs {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return podPlan{}, err
		}
		if addr.Is4() && n.PodCIDR4.Contains(addr) {
			bytes := addr.As4()
			p := n.pod(f.Name, f.Labels["app"], bytes[3])
			p.Identity = f.Identity
			return p, nil
		}
	}
	return podPlan{}, fmt.Errorf("pod %s has no address in %s", f.Name, n.PodCIDR4)
}

func (l *lab) podFile(p podPlan) string { return filepath.Join(l.endpoints(p.Node), p.Name+".yaml") }

// pods returns the pods that are declared on a node, by address, and what is wrong with declarations it cannot read.
func (l *lab) pods(n nodePlan) ([]podPlan, error) {
	files, err := filepath.Glob(filepath.Join(l.endpoints(n.Name), "*.yaml"))
	if err != nil {
		return nil, err
	}
	var pods []podPlan
	var wrong []error
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err == nil {
			var p podPlan
			if p, err = n.parsePod(content); err == nil {
				pods = append(pods, p)
			}
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", file, err))
		}
	}
	sortPods(pods)
	return pods, errors.Join(wrong...)
}

// declarePod writes the file that makes a pod known to its node's agent.
func (l *lab) declarePod(p podPlan) error {
	content, err := p.declaration()
	if err != nil {
		return err
	}
	return writeFile(l.podFile(p), content)
}

// addPod builds a pod and then declares it, so that nobody learns of an address that does not answer.
func (l *lab) addPod(n nodePlan, p podPlan) error {
	if err := buildPodNetwork(n, p); err != nil {
		return errors.Join(err, removePodNetwork(n, p))
	}
	return l.declarePod(p)
}

// withdrawPod removes the declaration of a pod.
func (l *lab) withdrawPod(p podPlan) error { return removeFile(l.podFile(p)) }

// removePod withdraws a pod and then removes its namespace.
func (l *lab) removePod(n nodePlan, p podPlan) error {
	if err := l.withdrawPod(p); err != nil {
		return err
	}
	return removePodNetwork(n, p)
}

// findPlace returns the network namespace, the node and the environment of "east-1" or "east-1/web".
func (l *lab) findPlace(path string) (netNS string, n nodePlan, err error) {
	nodeName, podName, isPod := strings.Cut(path, "/")
	if n, err = l.node(nodeName); err != nil {
		return "", n, err
	}
	netNS = n.NetNS
	if isPod {
		if err := validatePodName(podName); err != nil {
			return "", n, err
		}
		netNS += "-" + podName
	}
	if netNSAlive(netNS) {
		return netNS, n, nil
	}
	if _, err := readManifest(l.dir); errors.Is(err, os.ErrNotExist) {
		return "", n, errNoLab
	}
	return "", n, fmt.Errorf("%s has no network namespace %s: see `weft-lab status`", path, netNS)
}

func newPodCommand(env *environment) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pod",
		Short: "Add a pod to a node, or remove one",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var app string
	add := &cobra.Command{
		Use:     "add NODE NAME",
		Short:   "Build a pod and declare it to its node's agent",
		Example: "  weft-lab pod add west-1 cache --app redis",
		Args:    cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			return env.withNode(args[0], func(l *lab, n nodePlan) error { return l.runPodAdd(n, args[1], cmp.Or(app, args[1])) })
		},
	}
	add.Flags().StringVar(&app, "app", "", "the pod's label app, which makes its identity (default: its name)")
	remove := &cobra.Command{
		Use:   "remove NODE NAME",
		Short: "Withdraw a pod from its node's agent and remove it",
		Args:  cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			return env.withNode(args[0], func(l *lab, n nodePlan) error { return l.runPodRemove(n, args[1]) })
		},
	}
	cmd.AddCommand(add, remove)
	return cmd
}

// withNode runs f under the lock on a node of the running lab.
func (env *environment) withNode(name string, f func(*lab, nodePlan) error) error {
	l, err := env.lab()
	if err != nil {
		return err
	}
	n, err := l.node(name)
	if err != nil {
		return err
	}
	unlock, err := l.lock(false)
	if err != nil {
		return err
	}
	defer unlock()
	if !netNSAlive(n.NetNS) {
		return errNoLab
	}
	return f(l, n)
}

func (l *lab) runPodAdd(n nodePlan, name, app string) error {
	if err := validatePodName(name); err != nil {
		return err
	}
	pods, err := l.pods(n)
	if err != nil {
		return err
	}
	if netNSAlive(n.NetNS + "-" + name) {
		return fmt.Errorf("node %s has a pod %s already", n.Name, name)
	}
	host, err := n.freeHost(pods)
	if err != nil {
		return err
	}
	p := n.pod(name, app, host)
	if err := l.addPod(n, p); err != nil {
		return err
	}
	l.done("%s: %s and %s, identity %d, declared in %s", p.path(), p.IPv4, p.IPv6, p.Identity, l.podFile(p))
	return nil
}

func (l *lab) runPodRemove(n nodePlan, name string) error {
	if err := validatePodName(name); err != nil {
		return err
	}
	p := n.pod(name, "", 0)
	if !netNSAlive(p.NetNS) {
		return fmt.Errorf("node %s has no pod %s: see `weft-lab status`", n.Name, name)
	}
	if err := l.removePod(n, p); err != nil {
		return err
	}
	l.done("%s removed", p.path())
	return nil
}
