// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/operator"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

const defaultOperatorSocket = "/run/weft/operator.sock"

// exportServices is the value of --service-export beside those that a cluster says of itself.
const exportServices = "services"

func operatorCommand(env environment) *cobra.Command {
	var (
		options *operatorOptions
		socket  string
	)
	cmd := newCommand("operator", "Run what is done once per cluster until it is interrupted", func(cmd *cobra.Command, _ []string) error {
		cfg, err := options.load(cmd.Flags())
		if err != nil {
			return err
		}
		cfg.socket = socket
		d, err := newOperatorDaemon(cfg, env)
		if err != nil {
			return err
		}
		return d.run(env.ctx)
	})
	cmd.PersistentFlags().StringVar(&socket, "operator-socket", defaultOperatorSocket, "unix socket of the operator, a `path`")
	options = newOperatorOptions(cmd.Flags())
	cmd.Annotations = map[string]string{daemonAnnotation: "true"}
	cmd.AddCommand(operatorStatusCommand(env, &socket), operatorExport(env), operatorGC(env), operatorEtcdInit(env))
	return cmd
}

// operatorOptions are the options of the operator alone, as given.
type operatorOptions struct {
	config               string
	clusterName          string
	clusterID            uint16
	maxConnectedClusters int
	kvstoreConfig        string
	kvstoreOpts          []kvstoreOption
	kvstoreLeaseTTL      time.Duration
	election             string
	leaseDuration        time.Duration
	renewDeadline        time.Duration
	retryPeriod          time.Duration
	kubernetes           bool
	kubeconfig           string
	namespace            string
	servicesDir          string
	serviceExport        string
	exportNodes          bool
	nodesDir             string
	globalNamespaces     bool
	canaryDelay          time.Duration
	metricsAddress       netip.AddrPort
	logLevel             slog.Level
	gc                   gcOptions
}

func newOperatorOptions(flags *pflag.FlagSet) *operatorOptions {
	o := new(operatorOptions)
	flags.StringVar(&o.config, "config", "", "YAML `file` of options, by their names without dashes")
	flags.StringVar(&o.clusterName, "cluster-name", defaultCluster, "`name` of the cluster")
	flags.Uint16Var(&o.clusterID, "cluster-id", 0, "`number` of the cluster, from 1 on; 0 if it is in no mesh")
	flags.IntVar(&o.maxConnectedClusters, "max-connected-clusters", 255, "255 or 511, the same `number` in all clusters of the mesh")
	flags.StringVar(&o.kvstoreConfig, "kvstore-config", "", "etcd client config of the cluster's own etcd, a `file`")
	flags.Var(&list[kvstoreOption]{&o.kvstoreOpts, parseKVStoreOption, kvstoreOption.String, "options", false}, "kvstore-opt",
		"how the etcd is used, one `option`, such as etcd.qps=100")
	flags.DurationVar(&o.kvstoreLeaseTTL, "kvstore-lease-ttl", maxLeaseTTL,
		"how long what is published stays when no operator runs any more, a `duration`")
	flags.StringVar(&o.election, "election", "etcd", "`how` replicas agree on a leader: etcd, kubernetes, or none if there is one replica")
	flags.DurationVar(&o.leaseDuration, "leader-election-lease-duration", 15*time.Second,
		"how long the other replicas wait for a leader that is not heard of, a `duration`")
	flags.DurationVar(&o.renewDeadline, "leader-election-renew-deadline", 10*time.Second,
		"after which `duration` a leader gives up that cannot renew its lease in Kubernetes")
	flags.DurationVar(&o.retryPeriod, "leader-election-retry-period", 2*time.Second,
		"how often a replica looks at the lease in Kubernetes, a `duration`")
	flags.BoolVar(&o.kubernetes, "kubernetes", false, "take services from the Kubernetes API")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "",
		"`file` that says where the Kubernetes API is (default: the service account of the operator's own pod)")
	flags.StringVar(&o.namespace, "namespace", "",
		"`name` of the namespace that holds the Lease of --election kubernetes (default: CILIUM_K8S_NAMESPACE of the environment, or default)")
	o.gc.add(flags)
	flags.StringVar(&o.servicesDir, "services-dir", "", "`directory` of YAML files that declare services, instead of --kubernetes")
	flags.StringVar(&o.serviceExport, "service-export", exportServices,
		"`form` in which services are published: "+exportServices+" (whole), "+identity.SlicesToo+", or "+identity.SlicesOnly+", which no Cilium before 1.20 reads")
	flags.BoolVar(&o.exportNodes, "export-nodes", false,
		"with --kubernetes, publish its nodes, those aside that publish themselves, as nodes with an agent do")
	flags.StringVar(&o.nodesDir, "nodes-dir", "", "`directory` of YAML files that declare nodes to publish, those aside that publish themselves")
	flags.BoolVar(&o.globalNamespaces, "clustermesh-default-global-namespace", true,
		"services of namespaces without the annotation "+source.NamespaceAnnotation+" can be global")
	flags.DurationVar(&o.canaryDelay, "canary-delay", 2*time.Minute,
		"how long agents have, in an etcd that is new or was emptied, before what they publish is declared complete, and readers before a form of "+
			"--service-export that is switched off is removed, a `duration`")
	flags.TextVar(&o.metricsAddress, "metrics-address", netip.AddrPort{},
		"`address` of the loopback device, such as 127.0.0.1:9963, that answers /metrics and health probes, too (default: the socket only)")
	flags.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "least `level` of what is logged: debug, info, warn or error")
	return o
}

// operatorConfig is what the operator is made from: every option checked, every default in place.
type operatorConfig struct {
	operatorOptions
	socket  string
	kvstore kvstore.Config
}

// load completes the options from the file, if one is named, and checks them.
func (o *operatorOptions) load(flags *pflag.FlagSet) (operatorConfig, error) {
	if o.config != "" {
		if err := fromFile(flags, o.config, "config"); err != nil {
			return operatorConfig{}, err
		}
	}
	cfg := operatorConfig{operatorOptions: *o}
	if err := cfg.check(); err != nil {
		return operatorConfig{}, &usageError{cause: err}
	}
	k, err := kvstore.LoadConfig(o.kvstoreConfig)
	if err != nil {
		return operatorConfig{}, usagef("--kvstore-config: %w", err)
	}
	for _, opt := range o.kvstoreOpts {
		_ = k.SetOption(opt.name, opt.value) // it was checked when it was parsed
	}
	cfg.kvstore = k
	return cfg, nil
}

// check refuses what cannot work, whatever the machine is like.
func (c *operatorConfig) check() error {
	layout, err := identity.NewLayout(c.maxConnectedClusters)
	if err != nil {
		return fmt.Errorf("--max-connected-clusters: %w", err)
	}
	if err := identity.ValidateClusterName(c.clusterName); err != nil {
		return fmt.Errorf("--cluster-name: %w", err)
	}
	id := identity.ClusterID(c.clusterID)
	switch {
	case id > layout.MaxCluster():
		return fmt.Errorf("--cluster-id %d: want at most %d", id, layout.MaxCluster())
	case id != 0 && c.clusterName == defaultCluster:
		return fmt.Errorf("--cluster-id %d: a cluster of a mesh needs a name of its own: give one with --cluster-name", id)
	case c.kvstoreConfig == "":
		return errors.New("--kvstore-config: name the etcd of the cluster: all that an operator does is done there")
	case c.kvstoreLeaseTTL < minLeaseTTL || c.kvstoreLeaseTTL > maxLeaseTTL:
		return fmt.Errorf("--kvstore-lease-ttl %s: want %s to %s", c.kvstoreLeaseTTL, minLeaseTTL, maxLeaseTTL)
	case c.kubeconfig != "" && !c.kubernetes && c.election != string(operator.ElectKubernetes):
		return errors.New("--kubeconfig: it is read with --kubernetes or --election kubernetes alone: give one of them, too")
	case (c.kubernetes || c.servicesDir != "" || c.nodesDir != "") && id == 0:
		return errors.New("--kubernetes, --services-dir, --nodes-dir: only a cluster of a mesh publishes: give its number with --cluster-id")
	case c.kubernetes && c.servicesDir != "":
		return errors.New("--services-dir: services come from there or from --kubernetes: leave one of them out")
	case !slices.Contains([]string{exportServices, identity.SlicesToo, identity.SlicesOnly}, c.serviceExport):
		return fmt.Errorf("--service-export %s: want %s, %s or %s", c.serviceExport, exportServices, identity.SlicesToo, identity.SlicesOnly)
	case c.serviceExport != exportServices && !c.kubernetes && c.servicesDir == "":
		return fmt.Errorf("--service-export %s: no services are published: give --kubernetes or --services-dir, too", c.serviceExport)
	case c.exportNodes && !c.kubernetes:
		return errors.New("--export-nodes: nodes come from the Kubernetes API: give --kubernetes, or --nodes-dir instead")
	case c.exportNodes && c.nodesDir != "":
		return errors.New("--nodes-dir: nodes come from there or with --export-nodes from Kubernetes: leave one of them out")
	case c.canaryDelay < 0:
		return fmt.Errorf("--canary-delay %s: want 0 or more", c.canaryDelay)
	case api.CheckMetricsAddress(c.metricsAddress) != nil:
		return fmt.Errorf("--metrics-address %w", api.CheckMetricsAddress(c.metricsAddress))
	}
	if err := c.elects("").Validate(); err != nil {
		return fmt.Errorf("--election, --leader-election-*: %w", err)
	}
	return c.gc.check()
}

// elects is the election with the namespace of its Lease, as the environment has it where no option names one.
func (c *operatorConfig) elects(namespace string) operator.Election {
	if c.namespace != "" {
		namespace = c.namespace
	}
	if namespace == "" {
		namespace = "default"
	}
	return operator.Election{
		By: operator.ElectionKind(c.election), LeaseDuration: c.leaseDuration, RenewDeadline: c.renewDeadline, RetryPeriod: c.retryPeriod,
		Kubeconfig: c.kubeconfig, Namespace: namespace,
	}
}

// operatorDaemon is everything that an operator is, assembled.
type operatorDaemon struct {
	cfg      operatorConfig
	log      *slog.Logger
	started  time.Time
	services source.Source     // nil: none
	nodes    source.NodeSource // nil: none
	operator *operator.Operator
	tasks    []task // in the order in which data flows
}

// newOperatorDaemon assembles an operator. Nothing runs before run.
func newOperatorDaemon(cfg operatorConfig, env environment) (*operatorDaemon, error) {
	d := &operatorDaemon{cfg: cfg, log: newLog(env, cfg.logLevel), started: time.Now()}
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name of this replica: %w", err)
	}
	duties, err := d.duties()
	if err != nil {
		return nil, err
	}
	namespace, _ := env.lookup("CILIUM_K8S_NAMESPACE")
	d.operator, err = operator.New(operator.Config{
		ClusterName: cfg.clusterName, ClusterID: identity.ClusterID(cfg.clusterID), Name: operator.NewName(host),
		Etcd: cfg.kvstore, LeaseTTL: cfg.kvstoreLeaseTTL, Election: cfg.elects(namespace), Duties: duties,
		Log: d.log.With("task", "operator"),
	})
	if err != nil {
		return nil, usagef("%w", err)
	}
	if d.services != nil {
		d.tasks = append(d.tasks, d.services)
	}
	if d.nodes != nil {
		d.tasks = append(d.tasks, d.nodes)
	}
	d.tasks = append(d.tasks, d.operator)
	view := d.view()
	server := api.NewOperatorServer(cfg.socket, view, d.log.With("task", "api"))
	d.tasks = append(d.tasks, server)
	if cfg.metricsAddress.IsValid() {
		d.tasks = append(d.tasks, api.NewOperatorMetricsServer(cfg.metricsAddress, view, d.log.With("task", "metrics")))
	}
	if notify := newNotifyTask(env.lookup, func() string { return operatorLine(view.Status()) }, d.log.With("task", "notify")); notify != nil {
		notify.after = []task{server} // a replica that stands by is as ready as one that leads
		d.tasks = append(d.tasks, notify)
	}
	d.tasks = append(d.tasks, &signalTask{signals: env.signals, log: d.log, ready: make(chan struct{})})
	return d, nil
}

// duties are what the leader does. A cluster that is in no mesh has nothing to tell others.
func (d *operatorDaemon) duties() ([]operator.Duty, error) {
	collect, err := d.cfg.gcDuties()
	if err != nil {
		return nil, usagef("%w", err)
	}
	duties := append([]operator.Duty{operator.NewHeartbeat(d.cfg.kvstoreLeaseTTL)}, collect...)
	if d.cfg.clusterID == 0 {
		return duties, nil
	}
	// What no operator publishes is complete when all who do had time to.
	canaries := []string{node.StatePrefix, identity.StatePrefix, ipcache.StatePrefix}
	exports, err := d.exports()
	if err != nil {
		return nil, err
	}
	if d.services == nil {
		canaries = append(canaries, service.StatePrefix)
	}
	duties = append(duties, exports...)
	config, err := operator.NewClusterConfig(operator.ClusterConfigConfig{
		ClusterName: d.cfg.clusterName, Canaries: canaries, CanaryDelay: d.cfg.canaryDelay,
		Config: identity.ClusterConfig{ID: uint32(d.cfg.clusterID), Capabilities: identity.Capabilities{
			SyncedCanaries: true, MaxConnectedClusters: uint32(d.cfg.maxConnectedClusters), EndpointSlicesExportMode: d.cfg.sliceMode(),
		}},
	})
	return append(duties, config), err
}

// sliceMode is what the cluster says of the form of its services.
func (c *operatorConfig) sliceMode() string {
	if c.serviceExport == exportServices {
		return ""
	}
	return c.serviceExport
}

// serviceForms say how the services of a source are published; forms that are not are withdrawn.
func (c *operatorConfig) serviceForms(from source.Source) ([]operator.ServicesConfig, error) {
	sliced, err := operator.NewServiceSlices()
	if err != nil {
		return nil, err
	}
	whole := operator.ServicesConfig{
		ClusterName: c.clusterName, ClusterID: uint32(c.clusterID), Source: from,
		Form: operator.WholeServices{}, Withdrawn: c.serviceExport == identity.SlicesOnly, WithdrawAfter: c.canaryDelay,
	}
	parts := whole
	parts.Form, parts.Withdrawn = sliced, c.serviceExport == exportServices
	return []operator.ServicesConfig{whole, parts}, nil
}

// exports publish what is read of Kubernetes, or of files.
func (d *operatorDaemon) exports() (duties []operator.Duty, err error) {
	if d.services, err = d.cfg.serviceSource(d.log); err != nil {
		return nil, err
	}
	if d.services != nil {
		forms, err := d.cfg.serviceForms(d.services)
		if err != nil {
			return nil, err
		}
		for _, form := range forms {
			services, err := operator.NewServices(form)
			if err != nil {
				return nil, err
			}
			duties = append(duties, services)
		}
	}
	switch {
	case d.cfg.nodesDir != "":
		d.nodes = source.NewNodeFiles(d.cfg.nodesDir)
	case d.cfg.exportNodes:
		if d.nodes, err = source.NewKubernetesNodes(d.cfg.kubernetesSource(d.log)); err != nil {
			return nil, usagef("--kubernetes: %w", err)
		}
	default:
		return duties, nil
	}
	nodes, err := operator.NewNodes(operator.NodesConfig{ClusterName: d.cfg.clusterName, ClusterID: uint32(d.cfg.clusterID), Source: d.nodes})
	return append(duties, nodes), err
}

// serviceSource is where services come from; nil: they do not.
func (c *operatorConfig) serviceSource(log *slog.Logger) (source.Source, error) {
	switch {
	case c.servicesDir != "":
		return source.NewFiles(c.servicesDir), nil
	case !c.kubernetes:
		return nil, nil
	}
	kubernetes, err := source.NewKubernetes(c.kubernetesSource(log))
	if err != nil {
		return nil, usagef("--kubernetes: %w", err)
	}
	return kubernetes, nil
}

func (c *operatorConfig) kubernetesSource(log *slog.Logger) source.KubernetesConfig {
	return source.KubernetesConfig{
		Kubeconfig: c.kubeconfig, Agent: "weft-operator", DefaultGlobal: c.globalNamespaces, Log: log.With("task", "kubernetes"),
	}
}

func (d *operatorDaemon) run(ctx context.Context) error {
	d.log.Info("operator starts", "version", versionInfo().Version, "cluster", d.cfg.clusterName, "clusterID", d.cfg.clusterID,
		"election", d.cfg.election, "etcd", strings.Join(d.cfg.kvstore.Endpoints, ","))
	if err := runTasks(ctx, d.tasks); err != nil {
		return err
	}
	d.log.Info("operator ends; what is in etcd stays")
	return nil
}
