// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/api"
)

// operatorConfig is a cluster's operator.yaml: its keys are the flags of `weft operator`. There is one replica, so nobody is
// elected; agents of the lab start together, so nobody waits for others before a cluster is called complete.
type operatorConfig struct {
	ClusterName          string `yaml:"cluster-name"`
	ClusterID            uint8  `yaml:"cluster-id"`
	MaxConnectedClusters int    `yaml:"max-connected-clusters"`
	KVStoreConfig        string `yaml:"kvstore-config"`
	ServicesDir          string `yaml:"services-dir,omitempty"`
	Kubernetes           bool   `yaml:"kubernetes,omitempty"`
	Kubeconfig           string `yaml:"kubeconfig,omitempty"`
	Election             string `yaml:"election"`
	CanaryDelay          string `yaml:"canary-delay"`
	LogLevel             string `yaml:"log-level"`
}

func (l *lab) operatorFile(cluster, name string) string {
	return filepath.Join(l.dir, "operators", cluster, name)
}
func (l *lab) operatorSocket(cluster string) string { return l.operatorFile(cluster, "operator.sock") }

func (l *lab) operatorConfig(c clusterPlan) operatorConfig {
	config := operatorConfig{
		ClusterName:          c.Name,
		ClusterID:            c.ID,
		MaxConnectedClusters: maxConnectedClusters,
		KVStoreConfig:        l.operatorFile(c.Name, "kvstore.yaml"),
		Election:             "none",
		CanaryDelay:          "0s",
		LogLevel:             "info",
	}
	if l.kubernetes() {
		config.Kubernetes, config.Kubeconfig = true, l.kubeconfig(c.Name)
	} else {
		config.ServicesDir = l.services(c.Name)
	}
	return config
}

// writeClusterFiles writes what a cluster's operator reads: operator.yaml, kvstore.yaml and the cluster's services, or where
// there is Kubernetes what its API server needs.
func (l *lab) writeClusterFiles(c clusterPlan) error {
	if err := os.MkdirAll(l.operatorFile(c.Name, ""), 0o755); err != nil {
		return err
	}
	operator, err := yaml.Marshal(l.operatorConfig(c))
	if err != nil {
		return err
	}
	if err := errors.Join(
		writeFile(l.operatorFile(c.Name, "operator.yaml"), operator),
		writeFile(l.operatorFile(c.Name, "kvstore.yaml"), etcdClientConfig(c.Etcd)),
	); err != nil {
		return err
	}
	if l.kubernetes() {
		return l.writeKubeFiles(c)
	}
	if err := os.MkdirAll(l.services(c.Name), 0o755); err != nil {
		return err
	}
	return l.declareService(c, c.web())
}

// operatorDaemon describes a cluster's operator, which lives beside the cluster's etcd.
func (l *lab) operatorDaemon(c clusterPlan) daemon {
	config := l.operatorFile(c.Name, "operator.yaml")
	return daemon{
		name:    "the operator of " + c.Name,
		path:    l.weft,
		args:    []string{"operator", "--config", config, "--operator-socket", l.operatorSocket(c.Name)},
		marker:  config,
		netNS:   c.Etcd.NetNS,
		logFile: l.operatorFile(c.Name, "operator.log"),
		pidFile: l.operatorFile(c.Name, "operator.pid"),
	}
}

// waitOperator waits until a cluster's operator has told the other clusters all that it has to.
func (l *lab) waitOperator(ctx context.Context, c clusterPlan) error {
	return waitDaemon(ctx, l.operatorDaemon(c), "is not well", agentPatience, func(ctx context.Context) error {
		if problems := l.operatorProblems(ctx, c); len(problems) > 0 {
			return errors.New(strings.Join(problems, "; "))
		}
		return askEtcd(ctx, c.Etcd, clusterConfigKey(c.Name))
	})
}

// operatorProblems asks a cluster's operator what is wrong; that it does not answer, or has not published all services yet,
// is a problem too.
func (l *lab) operatorProblems(ctx context.Context, c clusterPlan) []string {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	status, err := api.NewClient(l.operatorSocket(c.Name)).Operator(ctx)
	if err != nil {
		return []string{err.Error()}
	}
	problems := status.Problems
	i := slices.IndexFunc(status.Duties, func(d api.OperatorDuty) bool { return d.Name == "services" })
	if len(problems) == 0 && (i < 0 || !status.Duties[i].Ready) {
		problems = append(problems, fmt.Sprintf("the services of %s are not published yet", c.Name))
	}
	return problems
}
