// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/endpoint"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/mesh"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

func agentCommand(env environment, c *clientOptions) *cobra.Command {
	var options *agentOptions
	cmd := newCommand("agent", "Run the agent of this node until it is interrupted", func(cmd *cobra.Command, _ []string) error {
		cfg, err := options.load(cmd.Flags(), c)
		if err != nil {
			return err
		}
		a, err := newAgent(cfg, env)
		if err != nil {
			return err
		}
		defer a.close()
		return a.run(env.ctx)
	})
	options = newAgentOptions(cmd.Flags())
	cmd.Annotations = map[string]string{daemonAnnotation: "true"}
	return cmd
}

// task is a part of the agent that runs by itself. Run returns nil when ctx ends.
type task interface {
	Run(ctx context.Context) error
	Ready() <-chan struct{}
	String() string
}

// agent is everything that runs on a node, assembled.
type agent struct {
	cfg     agentConfig
	log     *slog.Logger
	level   *slog.LevelVar // of log
	started time.Time
	self    node.Node

	ips        *ipcache.Table
	nodes      *node.Table
	identities *identity.Table
	services   *service.Table

	serviceFeeds []*source.Feed // of services of our own cluster, besides its etcd

	client    *kvstore.Client // nil without an etcd of our own, and so is writer
	writer    *kvstore.Writer
	sources   []endpoint.Source   // of workloads, in the order of their precedence
	added     *endpoint.Manual    // the source that the API writes to
	allocator *endpoint.Allocator // nil without an etcd of our own
	endpoints *endpoint.Registry
	mesh      *mesh.Mesh
	datapath  *datapath.Datapath
	carried   carried
	flows     *api.FlowLog
	tasks     []task // in the order in which data flows
}

// newAgent assembles an agent. Nothing runs, and nothing outside of the process has changed, before run.
func newAgent(cfg agentConfig, env environment) (a *agent, err error) {
	if len(cfg.nodeIPs) == 0 {
		if cfg.nodeIPs, err = detectNodeIPs(cfg.devices); err != nil {
			return nil, err
		}
	}
	level := new(slog.LevelVar)
	level.Set(cfg.logLevel)
	a = &agent{
		cfg: cfg, log: newLog(env, level), level: level, started: time.Now(), self: cfg.self(),
		ips: ipcache.New(), nodes: node.NewTable(), identities: identity.NewTable(), services: service.NewTable(),
		flows: api.NewFlowLog(),
	}
	opened := a // a is nil where an error is returned
	defer func() {
		if err != nil {
			opened.close()
		}
	}()
	for _, assemble := range []func() error{a.addKVStore, a.addSources, a.addEndpoints, a.addHerald, a.addServices, a.addMesh, a.addDatapath} {
		if err := assemble(); err != nil {
			return nil, err
		}
	}
	view := a.view()
	var page *api.PageServer
	if cfg.pageAddress.IsValid() {
		page = api.NewPageServer(cfg.pageAddress, view, a.log.With("task", "page"))
		view.Page = page.URL
	}
	server := api.NewServer(cfg.socket, view, a.log.With("task", "api"))
	a.tasks = append(a.tasks, &flowTask{agent: a, ready: make(chan struct{})}, server)
	if cfg.metricsAddress.IsValid() {
		a.tasks = append(a.tasks, api.NewMetricsServer(cfg.metricsAddress, view, a.log.With("task", "metrics")))
	}
	if page != nil {
		a.tasks = append(a.tasks, page)
	}
	if notify := newNotifyTask(env.lookup, func() string { return agentLine(a.status()) }, a.log.With("task", "notify")); notify != nil {
		notify.after = []task{a.datapath, server}
		a.tasks = append(a.tasks, notify)
	}
	a.tasks = append(a.tasks,
		&signalTask{signals: env.signals, log: a.log, ready: make(chan struct{})},
	)
	return a, nil
}

// dualStack: a node with addresses of both families tells the worlds of the two apart.
func (a *agent) dualStack() bool {
	return len(familyOf(a.cfg.nodeIPs, false)) > 0 && len(familyOf(a.cfg.nodeIPs, true)) > 0
}

// underlay6: nodes reach one another over IPv6 where they have no IPv4.
func (a *agent) underlay6() bool { return len(familyOf(a.cfg.nodeIPs, false)) == 0 }

func (a *agent) addKVStore() (err error) {
	if a.cfg.kvstore == nil {
		return nil
	}
	log := a.log.With("task", "kvstore")
	if a.client, err = kvstore.Dial(*a.cfg.kvstore, log); err != nil {
		return usagef("--kvstore-config %s: %w", a.cfg.kvstoreConfig, err)
	}
	a.writer = kvstore.NewWriter(a.client, kvstore.WriterConfig{TTL: a.cfg.kvstoreLeaseTTL, Log: log})
	a.tasks = append(a.tasks, a.writer)
	return nil
}

// addSources assembles where workloads come from, in the order of their precedence.
func (a *agent) addSources() (err error) {
	if a.cfg.kubernetes {
		kubernetes, err := endpoint.NewKubernetes(endpoint.KubernetesConfig{
			Kubeconfig: a.cfg.kubeconfig, NodeName: a.cfg.nodeName, Log: a.log.With("task", "kubernetes"),
		})
		if err != nil {
			return usagef("--kubernetes: %w", err)
		}
		a.sources = append(a.sources, kubernetes)
	}
	a.added, err = endpoint.NewManual(endpoint.ManualConfig{
		Dir: a.cfg.stateDir, ClusterName: a.cfg.clusterName, ClusterID: identity.ClusterID(a.cfg.clusterID), Layout: a.cfg.layout,
		Log: a.log.With("task", "api endpoints"),
	})
	if err != nil {
		return err
	}
	a.sources = append(a.sources, a.added)
	if a.cfg.endpointsDir != "" {
		a.sources = append(a.sources, endpoint.NewFiles(endpoint.FilesConfig{
			Dir: a.cfg.endpointsDir, ClusterName: a.cfg.clusterName, ClusterID: identity.ClusterID(a.cfg.clusterID), Layout: a.cfg.layout,
		}))
	}
	for _, s := range a.sources {
		a.tasks = append(a.tasks, s)
	}
	return nil
}

func (a *agent) addEndpoints() (err error) {
	cfg := endpoint.Config{
		Sources: a.sources, ClusterName: a.cfg.clusterName, ClusterID: identity.ClusterID(a.cfg.clusterID), NodeName: a.cfg.nodeName,
		HostIP: a.self.IP(a.underlay6()), IPs: a.ips, Identities: a.identities, Log: a.log.With("task", "endpoints"),
	}
	if cfg.Filter, err = identity.NewFilter(a.cfg.labels...); err != nil {
		return err
	}
	if a.writer != nil {
		a.allocator, err = endpoint.NewAllocator(endpoint.AllocatorConfig{
			Client: a.client, ClusterName: cfg.ClusterName, ClusterID: cfg.ClusterID, Layout: a.cfg.layout, StateDir: a.cfg.stateDir,
			HostIP: cfg.HostIP, Observe: a.writer.Observe,
			Log: a.log.With("task", "identities"),
		})
		if err != nil {
			return err
		}
		a.tasks = append(a.tasks, a.allocator)
		cfg.Publisher, cfg.Allocator, cfg.Leftovers = a.writer, a.allocator, a.client
	}
	if a.endpoints, err = endpoint.New(cfg); err == nil {
		a.tasks = append(a.tasks, a.endpoints)
	}
	return err
}

// addHerald has the cluster described where no operator does it.
func (a *agent) addHerald() error {
	if a.writer == nil || a.cfg.clusterID == 0 {
		return nil
	}
	herald, err := endpoint.NewHerald(endpoint.HeraldConfig{
		Client: a.client, ClusterName: a.cfg.clusterName, TTL: a.cfg.kvstoreLeaseTTL,
		Config: identity.ClusterConfig{ID: uint32(a.cfg.clusterID), Capabilities: identity.Capabilities{
			SyncedCanaries: true, MaxConnectedClusters: uint32(a.cfg.maxConnectedClusters),
		}},
		Prefixes:  []string{node.StatePrefix, service.StatePrefix, identity.StatePrefix, ipcache.StatePrefix},
		Published: a.endpoints.Ready(), Flush: a.writer.Flush, Log: a.log.With("task", "cluster description"),
	})
	if err == nil {
		a.tasks = append(a.tasks, herald)
	}
	return err
}

func (a *agent) addMesh() (err error) {
	a.mesh, err = mesh.New(mesh.Config{
		Dir: a.cfg.clustermeshConfig, ClusterName: a.cfg.clusterName, ClusterID: identity.ClusterID(a.cfg.clusterID),
		NodeName: a.cfg.nodeName, Layout: a.cfg.layout, DualStack: a.dualStack(), Underlay6: a.underlay6(), Own: a.cfg.kvstore, Tune: a.cfg.tune,
		CacheTTL: a.cfg.cacheTTL, CacheTTLAll: a.cfg.cacheTTLAll, LoseAfter: a.cfg.serviceWithdrawAfter, PreferSlices: a.cfg.serviceSlices, Preferences: a.cfg.preferences(),
		IPs: a.ips, Nodes: a.nodes, Identities: a.identities, Services: a.services, Log: a.log.With("task", "mesh"),
		OwnPrefixes: ownPrefixes(a.self), LimitsFile: a.cfg.meshLimits, MaxEntries: int(a.cfg.maxEntries),
	})
	if errors.Is(err, mesh.ErrLimits) {
		return usagef("--mesh-limits: %w", err)
	}
	if err == nil {
		a.tasks = append(a.tasks, a.mesh)
	}
	return err
}

func (a *agent) addDatapath() (err error) {
	cfg := datapath.Config{
		BPFFS: a.cfg.bpffs, Devices: a.cfg.devices, RoutingMode: datapath.RoutingMode(a.cfg.routingMode),
		ClusterRouting: a.cfg.clusterRouting(), TunnelPort: a.cfg.tunnelPort, OverlayLax: a.cfg.overlayCheck == "count", Mark: a.cfg.datapathMark(),
		Pods: a.endpoints, PodCheck: datapath.PodCheck(a.cfg.podCheck),
		MaxEntries: a.cfg.maxEntries, VerifyInterval: a.cfg.verifyInterval, ClusterName: a.cfg.clusterName, NodeName: a.cfg.nodeName, NodeIPs: a.cfg.nodeIPs,
		DualStack: a.dualStack(), Underlay6: a.underlay6(), FlowSample: a.cfg.flowSample, Layout: a.cfg.layout,
		LocalPodCIDRs: a.self.PodCIDRs(), IPs: a.ips, Nodes: a.nodes, Listed: a.listed, Log: a.log.With("task", "datapath"),
	}
	if a.cfg.serviceLB {
		cfg.Services, cfg.ServicesListed = a.services, a.servicesListed
		cfg.ServiceCgroup, cfg.ServiceNetNSDir = a.cfg.serviceCgroup, a.cfg.serviceNetNSDir
		cfg.ServiceTC, cfg.ServiceTCDevices, cfg.ServiceTCFlows = a.cfg.serviceTC, a.cfg.serviceTCDevices, a.cfg.serviceTCFlows
		if cfg.ServiceAlgorithm, err = service.ParseAlgorithm(a.cfg.serviceAlgorithm); err != nil {
			return err
		}
	}
	if a.datapath, err = datapath.New(cfg); err == nil {
		a.carried.kernel = a.datapath
		a.tasks = append(a.tasks, a.datapath)
	}
	return err
}

// preferences gathers the choices by cluster.
func (o *agentOptions) preferences() node.Preferences {
	p := make(node.Preferences)
	for _, c := range o.nodeIPPreference {
		p[c.cluster] = append(p[c.cluster], c.Choice)
	}
	return p
}

// tune applies --kvstore-opt, whose values have been checked.
func (o *agentOptions) tune(c *kvstore.Config) {
	for _, opt := range o.kvstoreOpts {
		_ = c.SetOption(opt.name, opt.value)
	}
}

// listed reports whether all who claim for a cluster, or for any if id is 0, have been heard: the mesh, and for our own
// cluster the files that declare workloads, too.
func (a *agent) listed(id identity.ClusterID) bool {
	if id == 0 || id == identity.ClusterID(a.cfg.clusterID) {
		select {
		case <-a.endpoints.Ready():
		default:
			return false
		}
	}
	return a.mesh.Listed(id)
}

// close releases what newAgent opened. Tasks have ended before.
func (a *agent) close() {
	if a.client != nil {
		_ = a.client.Close() // nothing that is in etcd depends on it
	}
}

// errStopped indicates that a signal asked the agent to end.
var errStopped = errors.New("stopped by a signal")

// run introduces the node and runs all tasks until one fails, a signal comes, or ctx ends.
func (a *agent) run(ctx context.Context) error {
	a.log.Info("agent starts", "version", versionInfo().Version, "cluster", a.cfg.clusterName, "clusterID", a.cfg.clusterID,
		"node", a.cfg.nodeName, "nodeIPs", a.cfg.nodeIPs)
	if err := a.introduce(); err != nil {
		return err
	}
	if err := runTasks(ctx, a.tasks); err != nil {
		return err
	}
	a.log.Info("agent ends; what is in the kernel and in etcd stays")
	return nil
}

// runTasks runs tasks until one fails, a signal comes, or ctx ends.
func runTasks(ctx context.Context, tasks []task) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, t := range tasks {
		group.Go(func() error {
			if err := t.Run(ctx); err != nil {
				return fmt.Errorf("%s: %w", t, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil && !errors.Is(err, errStopped) {
		return err
	}
	return nil
}

// introduce puts this node into the tables, and into etcd.
func (a *agent) introduce() error {
	a.ips.Apply(selfClaims(a.self))
	a.nodes.Upsert(a.self)
	if a.writer == nil {
		return nil
	}
	value, err := a.self.Marshal()
	if err != nil {
		return err
	}
	a.writer.Set(a.self.Key(), value)
	return nil
}

// signalTask ends the agent when a signal comes.
type signalTask struct {
	signals func() <-chan os.Signal
	log     *slog.Logger
	ready   chan struct{}
}

func (t *signalTask) String() string         { return "signals" }
func (t *signalTask) Ready() <-chan struct{} { return t.ready }

func (t *signalTask) Run(ctx context.Context) error {
	signals := t.signals()
	close(t.ready)
	select {
	case <-ctx.Done():
		return nil
	case s := <-signals:
		// A second signal ends the process at once.
		signal.Reset()
		t.log.Info("stopping", "signal", s.String())
		return errStopped
	}
}

// flowTask keeps the flows that the kernel reports.
type flowTask struct {
	agent *agent
	ready chan struct{}
}

func (t *flowTask) String() string         { return "flows" }
func (t *flowTask) Ready() <-chan struct{} { return t.ready }

func (t *flowTask) Run(ctx context.Context) error {
	close(t.ready)
	return t.agent.datapath.Flows(ctx, func(batch []datapath.Flow) {
		flows := make([]api.Flow, 0, len(batch))
		for i := range batch {
			flows = append(flows, t.agent.flow(&batch[i]))
		}
		t.agent.flows.Append(flows)
	})
}
