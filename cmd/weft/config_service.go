// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
)

// serviceOptions are the options of where services come from.
type serviceOptions struct {
	kubernetesServices   bool
	servicesDir          string
	globalNamespaces     bool
	serviceSlices        bool
	serviceWithdrawAfter time.Duration
}

func (o *serviceOptions) declare(flags *pflag.FlagSet) {
	flags.BoolVar(&o.kubernetesServices, "kubernetes-services", false,
		"take the services of our own cluster from the Kubernetes API; without it, from its etcd, where an operator publishes the global ones")
	flags.StringVar(&o.servicesDir, "services-dir", "", "`directory` of YAML files that declare services of our own cluster")
	flags.BoolVar(&o.globalNamespaces, "clustermesh-default-global-namespace", true,
		"whether services of namespaces that do not say so can be global; with --kubernetes-services")
	flags.BoolVar(&o.serviceSlices, "service-slices", false, "read services of remote clusters in slices where they are there in both forms")
	flags.DurationVar(&o.serviceWithdrawAfter, "service-withdraw-after", 5*time.Minute,
		"how long a remote cluster may be without connection or heartbeat before its backends are used only where there are no others, a `duration`; 0: for ever")
}

func (o *serviceOptions) check() error {
	switch {
	case o.serviceWithdrawAfter < 0 || o.serviceWithdrawAfter > 0 && o.serviceWithdrawAfter < time.Second:
		return fmt.Errorf("--service-withdraw-after %s: want 0 or at least 1s", o.serviceWithdrawAfter)
	case !o.globalNamespaces && !o.kubernetesServices:
		return errors.New("--clustermesh-default-global-namespace: it is for namespaces of Kubernetes: give --kubernetes-services, too")
	}
	return nil
}
