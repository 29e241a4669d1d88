// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

// addServices assembles where services of our own cluster come from besides its etcd.
func (a *agent) addServices() error {
	add := func(from source.Source, as service.Source) {
		feed := source.NewFeed(from, as, a.services)
		a.serviceFeeds = append(a.serviceFeeds, feed)
		a.tasks = append(a.tasks, from, feed)
	}
	if a.cfg.kubernetesServices {
		kubernetes, err := source.NewKubernetes(source.KubernetesConfig{
			Kubeconfig: a.cfg.kubeconfig, Agent: "weft", DefaultGlobal: a.cfg.globalNamespaces, Log: a.log.With("task", "kubernetes services"),
		})
		if err != nil {
			return usagef("--kubernetes-services: %w", err)
		}
		add(kubernetes, service.Kubernetes)
	}
	if a.cfg.servicesDir != "" {
		add(source.NewFiles(a.cfg.servicesDir), service.Files)
	}
	return nil
}

// servicesListed reports whether all services, of our own cluster and of the others, have been heard of, so that what the table
// lacks is known to be gone.
func (a *agent) servicesListed() bool {
	for _, f := range a.serviceFeeds {
		if !isClosed(f.Ready()) {
			return false
		}
	}
	return a.mesh.ServicesListed()
}
