// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"net/netip"
	"net/url"
)

// Service is all that is known of the services of one name.
type Service struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Local is the service of our own cluster, without which nothing of the others' is used; nil: there is none.
	Local     *LocalService     `json:"local,omitempty"`
	Clusters  []ServiceCluster  `json:"clusters"`  // the other ones that offer backends
	Frontends []ServiceFrontend `json:"frontends"` // of the local service
	// KernelError is why it is not known what the kernel has.
	KernelError string `json:"kernelError,omitempty"`
}

// LocalService is a service of our own cluster.
type LocalService struct {
	Source    string `json:"source"`    // kubernetes, files or etcd
	Global    bool   `json:"global"`    // backends of other clusters are wanted
	Shared    bool   `json:"shared"`    // backends are offered to other clusters
	Affinity  string `json:"affinity"`  // none, local or remote
	Algorithm string `json:"algorithm"` // default, random or maglev
	// ClientAffinity is for how many seconds a client stays with a backend; 0: it does not.
	ClientAffinity uint32 `json:"clientAffinitySeconds,omitempty"`
	Ready          int    `json:"ready"` // backends
	Draining       int    `json:"draining,omitempty"`
	// Shadowed are sources that have a service of the name, too, which does not count.
	Shadowed []string `json:"shadowed,omitempty"`
}

// ServiceCluster is what another cluster offers of a service, in sum.
type ServiceCluster struct {
	Cluster         string `json:"cluster"`
	ClusterID       uint32 `json:"clusterID"`
	Slices          int    `json:"slices,omitempty"` // 0: the offer is in one piece
	Shared          bool   `json:"shared"`
	IncludeExternal bool   `json:"includeExternal"`
	Ready           int    `json:"ready"` // backends
	Draining        int    `json:"draining,omitempty"`
	// Lost: the cluster has been away for so long that its backends are used only where there are no others.
	Lost bool `json:"lost,omitempty"`
}

// ServiceFrontend is an address at which a local service is reached.
type ServiceFrontend struct {
	IP       netip.Addr `json:"ip"`
	Port     uint16     `json:"port"`
	Protocol string     `json:"protocol"`
	PortName string     `json:"portName"`
	// Used is how many backends are in use, and Why is the reason for which they are those.
	Used int    `json:"used"`
	Why  string `json:"why"`
	// Holder is the other service that has the frontend, so that this one does not.
	Holder   string           `json:"holder,omitempty"`
	Backends []ServiceBackend `json:"backends,omitempty"` // not in lists
	// Kernel is what the kernel has; nil in lists, of SCTP, and where sockets are given no backends.
	Kernel *KernelFrontend `json:"kernel,omitempty"`
}

// KernelFrontend is a frontend as the kernel has it.
type KernelFrontend struct {
	Absent         bool   `json:"absent,omitempty"` // the kernel does not have it, yet; the rest is nothing
	Backends       int    `json:"backends"`
	Algorithm      string `json:"algorithm"`                       // random or maglev
	ClientAffinity uint32 `json:"clientAffinitySeconds,omitempty"` // 0: a client keeps no backend
	Chosen         uint64 `json:"chosen"`                          // flows that were given a backend since the frontend is there
	Refused        uint64 `json:"refused"`                         // flows for which there was none
	// Strays are backends that nobody offers any more: found at the start, and kept until all have been heard.
	Strays []netip.AddrPort `json:"strays,omitempty"`
}

// ServiceBackend is a backend that a frontend could use.
type ServiceBackend struct {
	IP      netip.Addr `json:"ip"`
	Port    uint16     `json:"port"`
	Cluster string     `json:"cluster"`
	State   string     `json:"state"` // ready or draining
	Lost    bool       `json:"lost,omitempty"`
	Used    bool       `json:"used"`
	Why     string     `json:"why,omitempty"` // it is not used
	// InKernel: the kernel leads to it. It follows Used within moments.
	InKernel bool `json:"inKernel,omitempty"`
}

// ServiceDetail is a single service as an answer.
type ServiceDetail struct {
	Meta
	Service
}

// Services lists the services, by namespace and name.
func (c *Client) Services(ctx context.Context) ([]Service, error) {
	list, err := ask[List[Service]](ctx, c, "/v1/service")
	return list.Items, err
}

// Service returns what is known of one service, with its backends.
func (c *Client) Service(ctx context.Context, namespace, name string) (ServiceDetail, error) {
	return ask[ServiceDetail](ctx, c, "/v1/service/"+url.PathEscape(namespace)+"/"+url.PathEscape(name))
}

func (s *Server) service(w http.ResponseWriter, r *http.Request) error {
	namespace, name := r.PathValue("namespace"), r.PathValue("name")
	found, ok := s.agent.Service(namespace, name)
	if !ok {
		return refuse(http.StatusNotFound, "nobody has a service %s/%s", namespace, name)
	}
	return write(w, ServiceDetail{Meta: MetaOf(KindService), Service: found})
}
