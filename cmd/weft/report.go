// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/endpoint"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/mesh"
)

// status reports on every part of the agent.
func (a *agent) status() api.Status {
	s := api.Status{
		Meta: api.MetaOf(api.KindStatus), Version: versionInfo().Version, Started: a.started,
		Cluster: api.LocalCluster{
			Name: a.cfg.clusterName, ID: a.cfg.clusterID, MaxConnectedClusters: uint16(a.cfg.maxConnectedClusters),
		},
		Node:      api.LocalNode{Name: a.cfg.nodeName, IPs: a.cfg.nodeIPs, PodCIDRs: present(a.cfg.podCIDRs)},
		KVStore:   a.kvstoreStatus(),
		Clusters:  []api.Cluster{},
		Endpoints: a.endpointStatus(),
		Allocator: a.allocatorStatus(),
		Config:    []api.ConfigError{},
		Tasks:     tasksOf(a.tasks),
	}
	s.Tables = api.Tables{IPs: a.ips.Len(), Identities: a.identities.Len(), Services: a.services.Len(), Conflicts: a.ips.Conflicted()}
	nodes, _ := a.nodes.Snapshot()
	s.Tables.Nodes = len(nodes)
	clusters := a.mesh.Status()
	underway := a.carried.look(clusters)
	s.Datapath = a.datapathStatus() // after the clusters, so that it has what they have
	for _, r := range clusters {
		c := makeCluster(&r)
		if underway[r.Name] {
			c.Ready, c.State = false, string(mesh.Syncing)
		}
		s.Clusters = append(s.Clusters, c)
	}
	if limits := a.mesh.Limits(); limits.Error != "" {
		s.Config = append(s.Config, api.ConfigError{File: limits.Path, Message: limits.Error})
	}
	if dir := a.mesh.Directory(); dir.Error != "" {
		s.Config = append(s.Config, api.ConfigError{File: dir.Path, Message: dir.Error})
	}
	for _, f := range a.serviceFeeds {
		for _, problem := range f.Problems() {
			s.Config = append(s.Config, api.ConfigError{Message: problem})
		}
	}
	s.Assess()
	return s
}

// fullStatus is the status with what takes a look at the whole table: for who asks, not for what asks all the time.
func (a *agent) fullStatus() api.Status {
	s := a.status()
	if s.Tables.Conflicts == 0 {
		return s
	}
	of := make(map[uint32]int)
	for claims := range a.ips.Conflicts(netip.Prefix{}) {
		seen := make(map[identity.ClusterID]bool, len(claims))
		for i := range claims {
			if id := claims[i].Owner.Cluster; !seen[id] {
				seen[id] = true
				of[uint32(id)]++
			}
		}
	}
	for i := range s.Clusters {
		s.Clusters[i].Conflicts = of[s.Clusters[i].ID]
	}
	return s
}

func (a *agent) kvstoreStatus() *api.KVStore {
	if a.client == nil {
		return nil
	}
	c, w := a.client.Status(), a.writer.Status()
	k := &api.KVStore{
		Endpoints: present(c.Endpoints), Endpoint: c.Endpoint, Connected: c.Connected, ServerVersion: c.ServerVersion,
		State: string(c.State), Since: c.Since, Warning: c.Warning,
		EtcdClusterID: hex(c.EtcdClusterID), Revision: c.Revision, Ready: isClosed(a.writer.Ready()), Keys: w.Keys, Pending: w.Pending,
		Leases: []string{}, LastError: errorText(w.LastError), LastErrorAt: w.LastErrorAt, KeyErrors: map[string]string{},
		LastContact: c.LastContact, Certificates: makeCertificates(c.Certificates), CertificateWarnings: c.Warnings,
	}
	if c.LastErrorAt.After(w.LastErrorAt) {
		k.LastError, k.LastErrorAt = errorText(c.LastError), c.LastErrorAt
	}
	for _, id := range w.Leases {
		k.Leases = append(k.Leases, hex(uint64(id)))
	}
	for key, err := range w.Errors {
		k.KeyErrors[key] = errorText(err)
	}
	return k
}

func makeCluster(r *mesh.RemoteStatus) api.Cluster {
	c := api.Cluster{
		Name: r.Name, ID: r.ClusterID, Own: r.Own, State: string(r.State), Ready: r.State == mesh.Ready, Since: r.Since,
		ConfigFile: r.ConfigFile, ConfigError: r.ConfigError, Endpoints: present(r.Endpoints), ServerVersion: r.ServerVersion,
		Warning: r.Warning, EtcdClusterID: hex(r.EtcdClusterID), Revision: r.Revision, Lag: r.Lag, Canaries: r.Canaries, Cached: r.Cached,
		Counts: api.Counts{Nodes: r.Nodes, IPs: r.IPs, Identities: r.Identities, Services: r.Services},
		Synced: map[string]bool{
			"nodes": r.Synced.Nodes, "ips": r.Synced.IPs, "identities": r.Synced.Identities, "services": r.Synced.Services,
		},
		Failures: r.Failures, Reconnects: r.Reconnects, LastReconnect: r.LastReconnect, LastError: r.LastError, LastErrorAt: r.LastErrorAt, Rejected: r.Rejected,
		LastSuccess: r.LastSuccess, StaleSince: r.StaleSince, Withdrawn: r.Withdrawn, ServicesLost: r.ServicesLost,
		Certificates: makeCertificates(r.Certificates), CertificateWarnings: r.CertificateWarnings,
		Waiting: r.Waiting, Quotas: api.Quotas{
			Entries: api.Quota(r.Quotas.Entries), Bytes: api.Quota(r.Quotas.Bytes), EventsPerSecond: r.Quotas.EventsPerSecond,
			HeldBack: r.Quotas.HeldBack, Full: r.Quotas.Full,
		},
	}
	for _, x := range r.LastRejections {
		c.Rejections = append(c.Rejections, api.Rejection{Kind: x.Kind, Key: x.Key, Reason: x.Reason, At: x.At})
	}
	return c
}

func makeCertificates(certificates []kvstore.Certificate) []api.Certificate {
	var shown []api.Certificate
	for _, c := range certificates {
		shown = append(shown, api.Certificate{Role: string(c.Role), Of: c.Of, Subject: c.Subject, NotAfter: c.NotAfter})
	}
	return shown
}

func (a *agent) endpointStatus() api.Endpoints {
	status := a.endpoints.Status()
	shown := api.Endpoints{Items: []api.Endpoint{}, Errors: []api.ConfigError{}}
	for i := range status.Endpoints {
		e := makeEndpoint(&status.Endpoints[i])
		shown.Items = append(shown.Items, e)
		if e.Reason != "" {
			what := "waits for its identity, and is not announced"
			if e.State == string(endpoint.Restored) {
				what = "has the identity of before the restart, and nothing new of it is announced"
			}
			shown.Errors = append(shown.Errors, api.ConfigError{Message: fmt.Sprintf("endpoint %s %s: %s", endpointName(&e), what, e.Reason)})
		}
	}
	for _, e := range status.Errors {
		shown.Errors = append(shown.Errors, api.ConfigError{File: e.File, Line: e.Line, Message: e.Message})
	}
	return shown
}

func (a *agent) allocatorStatus() *api.Allocator {
	if a.allocator == nil {
		return nil
	}
	s := a.allocator.Status()
	return &api.Allocator{
		Listed: s.Listed, LabelSets: s.Used, Waiting: s.Waiting, Restored: s.Restored, Free: s.Free, Allocated: s.Allocated, Failed: s.Failed,
	}
}

func makeEndpoint(e *endpoint.Endpoint) api.Endpoint {
	return api.Endpoint{
		Namespace: e.Namespace, Name: e.Name, IPs: e.IPs, Identity: uint32(e.Identity), Labels: texts(e.Labels),
		Source: e.Source, Origin: e.Origin, State: string(e.State), Reason: e.Reason, Since: e.Since,
	}
}

func makePods(p *datapath.PodStatus) api.PodDevices {
	shown := api.PodDevices{Devices: []api.Device{}, Missing: []api.MissingPod{}}
	if p == nil {
		return shown
	}
	shown.Check, shown.Addresses = string(p.Check), p.Addresses
	for i := range p.Devices {
		shown.Devices = append(shown.Devices, makeDevice(&p.Devices[i]))
	}
	for _, m := range p.Missing {
		shown.Missing = append(shown.Missing, api.MissingPod{Address: m.Address, Reason: m.Reason})
	}
	return shown
}

func (a *agent) datapathStatus() api.Datapath {
	d := a.datapath.Status()
	shown := api.Datapath{
		Ready: d.Ready, RoutingMode: string(d.RoutingMode), Devices: []api.Device{}, Errors: []string{},
		Map: api.Map{
			Pin: filepath.Join(d.PinDir, "ipcache"), Entries: d.IPCache.Entries, MaxEntries: d.IPCache.MaxEntries,
			Pending: d.IPCache.Pending, Full: d.IPCache.Full, Unclaimed: d.IPCache.Unclaimed, Failures: d.IPCache.Failures,
			Error: d.IPCache.LastError, Adopted: d.IPCache.Adopted, Written: d.IPCache.Written, Deleted: d.IPCache.Deleted,
			Pruned: d.IPCache.Pruned, Drift: d.IPCache.Drift, VerifiedAt: d.IPCache.VerifiedAt,
		},
		Flows: api.FlowStat{Received: d.Flows.Received, Lost: d.Flows.Dropped},
	}
	for _, device := range d.Devices {
		shown.Devices = append(shown.Devices, makeDevice(&device))
	}
	if o := d.Overlay; o != nil {
		shown.Overlay = &api.Overlay{Device: o.Device, Port: o.Port, MTU: o.MTU, Error: o.Error}
	}
	shown.Drift = d.Drift
	shown.Pods = makePods(d.Pods)
	for _, r := range d.Routes {
		if r.Installed {
			shown.Routes++
		}
		if r.Error != "" {
			shown.Errors = append(shown.Errors, fmt.Sprintf("route to %s of node %s: %s", r.Prefix, r.Node, r.Error))
		}
	}
	shown.Errors = append(shown.Errors, d.Errors...)
	if t := d.Services; t != nil {
		shown.Services = &api.ServiceTable{
			Cgroup: t.Cgroup, Frontends: t.Frontends, MaxFrontends: t.MaxFrontends, Backends: t.Backends, MaxBackends: t.MaxBackends,
			Pending: t.Pending, Unclaimed: t.Unclaimed, Full: t.Full, Chosen: t.Chosen, Refused: t.Refused, Destroyed: t.Destroyed, Namespaces: t.Namespaces,
			Slots: t.Slots, MaxSlots: t.MaxSlots, Affinities: t.Affinities, MaxAffinities: t.MaxAffinities,
			Written: t.Written, Calls: t.Calls, Rebuilds: t.Rebuilds, Failures: t.Failures, VerifiedAt: t.VerifiedAt,
			Translation: makeTranslation(t.Translation),
		}
		shown.Errors = append(shown.Errors, t.Problems()...)
	}
	if d.Flows.LastError != "" {
		shown.Errors = append(shown.Errors, "flows: "+d.Flows.LastError)
	}
	return shown
}

func makeTranslation(t *datapath.TranslationStatus) *api.Translation {
	if t == nil {
		return nil
	}
	shown := &api.Translation{
		Devices: []api.Device{}, Flows: t.Flows, MaxFlows: t.MaxFlows, Begun: t.Begun, Requests: t.Requests, Replies: t.Replies,
		Errors: t.Errors, Refused: t.Refused, Hairpin: t.Hairpin, Clashes: t.Clashes, Failed: t.Failed, Answered: t.Answered,
	}
	for i := range t.Devices {
		shown.Devices = append(shown.Devices, makeDevice(&t.Devices[i]))
	}
	return shown
}

func makeDevice(d *datapath.DeviceStatus) api.Device {
	shown := api.Device{Name: d.Name, Index: d.IfIndex, Programs: []api.DeviceProgram{}, Error: d.Error}
	for _, p := range d.Programs {
		shown.Programs = append(shown.Programs, api.DeviceProgram{Name: p.Name, Attached: p.Attached, Error: p.Error})
	}
	return shown
}

func tasksOf(tasks []task) []api.Task {
	var shown []api.Task
	for _, t := range tasks {
		shown = append(shown, api.Task{Name: t.String(), Ready: isClosed(t.Ready())})
	}
	return shown
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// hex prints an id of etcd as etcd's own tools do; empty for none.
func hex(id uint64) string {
	if id == 0 {
		return ""
	}
	return strconv.FormatUint(id, 16)
}
