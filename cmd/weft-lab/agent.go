// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
)

// agentPatience bounds how long an agent or an operator is waited for.
const agentPatience = time.Minute

// agentConfig is a node's agent.yaml: its keys are the flags of `weft agent`.
type agentConfig struct {
	ClusterName          string   `yaml:"cluster-name"`
	ClusterID            uint8    `yaml:"cluster-id"`
	MaxConnectedClusters int      `yaml:"max-connected-clusters"`
	NodeName             string   `yaml:"node-name"`
	NodeIP               []string `yaml:"node-ip"`
	PodCIDR              []string `yaml:"pod-cidr"`
	ClusterMeshConfig    string   `yaml:"clustermesh-config"`
	KVStoreConfig        string   `yaml:"kvstore-config"`
	EndpointsDir         string   `yaml:"endpoints-dir"`
	ServicesDir          string   `yaml:"services-dir,omitempty"`
	KubernetesServices   bool     `yaml:"kubernetes-services,omitempty"`
	Kubeconfig           string   `yaml:"kubeconfig,omitempty"`
	ServiceLB            bool     `yaml:"service-lb"`
	ServiceCgroup        string   `yaml:"service-cgroup"`
	ServiceTC            bool     `yaml:"service-tc"`
	StateDir             string   `yaml:"state-dir"`
	BPFFS                string   `yaml:"bpffs"`
	APISocket            string   `yaml:"api-socket"`
	Devices              []string `yaml:"devices"`
	RoutingMode          string   `yaml:"routing-mode"`
	FlowSample           int      `yaml:"flow-sample"`
	LogLevel             string   `yaml:"log-level"`
}

func (l *lab) agentConfig(n nodePlan) agentConfig {
	config := agentConfig{
		ClusterName:          n.Cluster,
		ClusterID:            n.ClusterID,
		MaxConnectedClusters: maxConnectedClusters,
		NodeName:             n.Name,
		NodeIP:               []string{n.IPv4.Addr().String(), n.IPv6.Addr().String()},
		PodCIDR:              []string{n.PodCIDR4.String(), n.PodCIDR6.String()},
		ClusterMeshConfig:    l.nodeFile(n.Name, "clustermesh"),
		KVStoreConfig:        l.nodeFile(n.Name, "kvstore.yaml"),
		EndpointsDir:         l.endpoints(n.Name),
		ServiceLB:            true,
		ServiceCgroup:        l.cgroup(n),
		ServiceTC:            true,
		StateDir:             l.nodeFile(n.Name, "state"),
		BPFFS:                l.bpffs(n.Name),
		APISocket:            l.socket(n.Name),
		Devices:              []string{"eth0"},
		RoutingMode:          l.mode,
		FlowSample:           1,
		LogLevel:             "info",
	}
	if l.kubernetes() {
		config.KubernetesServices, config.Kubeconfig = true, l.kubeconfig(n.Cluster)
	} else {
		config.ServicesDir = l.services(n.Cluster)
	}
	return config
}

func etcdClientConfig(e etcdPlan) []byte { return fmt.Appendf(nil, "endpoints:\n- %s\n", e.endpoint()) }

// writeNodeFiles writes what a node's agent reads, except its pods: agent.yaml, kvstore.yaml for its own etcd, and for
// every other cluster a file of that cluster's name in clustermesh/.
func (l *lab) writeNodeFiles(n nodePlan) error {
	mesh := l.nodeFile(n.Name, "clustermesh")
	for _, dir := range []string{mesh, l.endpoints(n.Name)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	agent, err := yaml.Marshal(l.agentConfig(n))
	if err != nil {
		return err
	}
	if err := writeFile(l.nodeFile(n.Name, "agent.yaml"), agent); err != nil {
		return err
	}
	for _, c := range l.Clusters {
		file := filepath.Join(mesh, c.Name)
		if c.Name == n.Cluster {
			file = l.nodeFile(n.Name, "kvstore.yaml")
		}
		if err := writeFile(file, etcdClientConfig(c.Etcd)); err != nil {
			return err
		}
	}
	return nil
}

func (l *lab) agentDaemon(n nodePlan) daemon {
	config := l.nodeFile(n.Name, "agent.yaml")
	return daemon{
		name:    "the agent of " + n.Name,
		path:    l.weft,
		args:    []string{"agent", "--config", config},
		marker:  config,
		netNS:   n.NetNS,
		logFile: l.nodeFile(n.Name, "agent.log"),
		pidFile: l.nodeFile(n.Name, "agent.pid"),
	}
}

// waitAgent waits until a node's agent says that all is well.
func (l *lab) waitAgent(ctx context.Context, n nodePlan) error {
	return waitDaemon(ctx, l.agentDaemon(n), "is not well", agentPatience, func(ctx context.Context) error { return l.agentReady(ctx, n) })
}

// waitKernel waits until the kernel of a node knows every pod of the other clusters and has a route to each of their
// nodes' pods.
func (l *lab) waitKernel(ctx context.Context, n nodePlan) error {
	return waitDaemon(ctx, l.agentDaemon(n), "has not completed its kernel", agentPatience,
		func(context.Context) error { return l.kernelComplete(n) })
}

// agentReady returns nil when a node's agent answers and has no problem.
func (l *lab) agentReady(ctx context.Context, n nodePlan) error {
	if problems := l.agentProblems(ctx, n); len(problems) > 0 {
		return errors.New(strings.Join(problems, "; "))
	}
	return nil
}

// agentProblems asks a node's agent what is wrong; that it does not answer is a problem too.
func (l *lab) agentProblems(ctx context.Context, n nodePlan) []string {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	status, err := api.NewClient(l.socket(n.Name)).Status(ctx)
	if err != nil {
		return []string{err.Error()}
	}
	return status.Problems
}

func (l *lab) kernelComplete(n nodePlan) error {
	ipcache, err := datapath.OpenIPCache(l.bpffs(n.Name))
	if err != nil {
		return err
	}
	defer ipcache.Close()
	var want []netip.Prefix
	for _, c := range l.remoteClusters(n) {
		for _, remote := range c.Nodes {
			pods, err := l.pods(remote)
			if err != nil {
				return err
			}
			for _, p := range pods {
				if err := knows(ipcache, p); err != nil {
					return err
				}
			}
			want = append(want, remote.PodCIDR4, remote.PodCIDR6)
		}
	}
	routes, err := weftRoutes(n.NetNS)
	if err != nil {
		return err
	}
	for _, p := range want {
		if !slices.Contains(routes, p) {
			return fmt.Errorf("no route to %s yet", p)
		}
	}
	return nil
}

// knows checks that a kernel map gives both addresses of a pod its identity.
func knows(ipcache *datapath.IPCache, p podPlan) error {
	for _, addr := range []netip.Addr{p.IPv4, p.IPv6} {
		entry, ok, err := ipcache.Lookup(addr)
		if err != nil {
			return err
		}
		if !ok || uint32(entry.Identity) != p.Identity {
			return fmt.Errorf("%s (%s) has the identity %d there, not %d", addr, p.path(), uint32(entry.Identity), p.Identity)
		}
	}
	return nil
}
