// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// Where things are unless an option says otherwise.
const (
	defaultSocket = "/run/weft/weft.sock"
	defaultBPFFS  = "/sys/fs/bpf"
	// defaultStateDir is what systemd makes of StateDirectory=weft.
	defaultStateDir = "/var/lib/weft"
)

// Bounds of --kvstore-lease-ttl: shorter, and a slow etcd withdraws a node that is well; longer, and a dead one stays.
const (
	minLeaseTTL = 25 * time.Second
	maxLeaseTTL = 24 * time.Hour
)

// minVerifyInterval keeps the comparison of a large map from being all that the agent does.
const minVerifyInterval = 10 * time.Second

// defaultCluster is the name of a cluster that is in no mesh.
const defaultCluster = "default"

// clientOptions are the options of all commands.
type clientOptions struct {
	socket string
	bpffs  string
}

func newClientOptions(flags *pflag.FlagSet) *clientOptions {
	c := new(clientOptions)
	flags.StringVar(&c.socket, "api-socket", defaultSocket, "unix socket of the agent, a `path`")
	flags.StringVar(&c.bpffs, "bpffs", defaultBPFFS, "mount point of the BPF file system that holds the agent's pins, a `directory`")
	return c
}

// agentOptions are the options of the agent alone, as given.
type agentOptions struct {
	serviceOptions
	config               string
	clusterName          string
	clusterID            uint16
	maxConnectedClusters int
	nodeName             string
	nodeIPs              []netip.Addr
	podCIDRs             []netip.Prefix
	clustermeshConfig    string
	cacheTTL             time.Duration
	cacheTTLAll          bool
	nodeIPPreference     []nodeIPChoice
	meshLimits           string
	kvstoreConfig        string
	kvstoreOpts          []kvstoreOption
	kvstoreLeaseTTL      time.Duration
	kubernetes           bool
	kubeconfig           string
	endpointsDir         string
	labels               []string
	stateDir             string
	devices              []string
	routingMode          string
	clusterRoutingMode   []clusterRouting
	tunnelPort           uint16
	overlayCheck         string
	podCheck             string
	mark                 string
	markMask             markMask
	markShift            uint8
	maxEntries           uint32
	verifyInterval       time.Duration
	flowSample           uint32
	serviceLB            bool
	serviceCgroup        string
	serviceNetNSDir      string
	serviceTC            bool
	serviceTCDevices     []string
	serviceTCFlows       uint32
	serviceAlgorithm     string
	metricsAddress       netip.AddrPort
	pageAddress          netip.AddrPort
	logLevel             slog.Level
}

func newAgentOptions(flags *pflag.FlagSet) *agentOptions {
	o := new(agentOptions)
	flags.StringVar(&o.config, "config", "", "YAML `file` of options, by their names without dashes")
	flags.StringVar(&o.clusterName, "cluster-name", defaultCluster, "`name` of the cluster of this node")
	flags.Uint16Var(&o.clusterID, "cluster-id", 0, "`number` of the cluster of this node, from 1 on; 0 if it is in no mesh")
	flags.IntVar(&o.maxConnectedClusters, "max-connected-clusters", 255, "255 or 511, the same `number` in all clusters of the mesh")
	flags.StringVar(&o.nodeName, "node-name", "", "`name` of this node (default: the host's name)")
	flags.Var(&list[netip.Addr]{&o.nodeIPs, parseNodeIP, netip.Addr.String, "addresses", false}, "node-ip",
		"address of this node, one of each family at most (default: the first global addresses of its devices)")
	flags.Var(&list[netip.Prefix]{&o.podCIDRs, parsePodCIDR, netip.Prefix.String, "prefixes", false}, "pod-cidr",
		"prefix of this node's pods, of each family the primary one first")
	flags.StringVar(&o.clustermeshConfig, "clustermesh-config", "", "`directory` with an etcd client config for each remote cluster")
	flags.DurationVar(&o.cacheTTL, "clustermesh-cache-ttl", 0,
		"how long the services of a remote cluster that cannot be followed stay in use, a `duration`; 0: for ever")
	flags.BoolVar(&o.cacheTTLAll, "clustermesh-cache-ttl-all", false,
		"the same for the nodes, addresses and identities of such a cluster")
	flags.Var(&list[nodeIPChoice]{&o.nodeIPPreference, parseNodeIPChoice, nodeIPChoice.String, "choices", false}, "node-ip-preference",
		"address by which nodes are reached, best first: a type such as ExternalIP or a prefix, after CLUSTER= for that cluster alone "+
			"(default: InternalIP,ExternalIP)")
	flags.StringVar(&o.meshLimits, "mesh-limits", "",
		"YAML `file` that says what remote clusters may claim; it is read again when it changes")
	flags.StringVar(&o.kvstoreConfig, "kvstore-config", "",
		"etcd client config of the cluster's own etcd, a `file`; without it, nothing is published")
	flags.Var(&list[kvstoreOption]{&o.kvstoreOpts, parseKVStoreOption, kvstoreOption.String, "options", false}, "kvstore-opt",
		"how every etcd is used, one `option`, such as etcd.qps=100")
	flags.DurationVar(&o.kvstoreLeaseTTL, "kvstore-lease-ttl", 15*time.Minute,
		"how long what this node publishes outlives its agent, a `duration`")
	flags.BoolVar(&o.kubernetes, "kubernetes", false, "take the pods of this node from the Kubernetes API, where the node has the name --node-name")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "",
		"`file` that says where the Kubernetes API is (default: the service account of the agent's own pod)")
	o.serviceOptions.declare(flags)
	flags.StringVar(&o.stateDir, "state-dir", defaultStateDir, "`directory` of what is to be known after a restart: endpoints that were added, identities that were allocated")
	flags.Var(&list[string]{&o.labels, parseLabelPattern, func(s string) string { return s }, "labels", false}, "labels",
		"`patterns` of labels that make an identity, in addition to the defaults: k8s:key to take labels so named alone, k8s:!key to leave them out")
	flags.StringVar(&o.endpointsDir, "endpoints-dir", "", "`directory` of YAML files that declare the workloads of this node")
	flags.Var(&list[string]{&o.devices, parseDevice, func(s string) string { return s }, "devices", false}, "devices",
		"`names` of network devices to identify packets on (default: those of the default routes and of the node's addresses)")
	flags.StringVar(&o.routingMode, "routing-mode", "none", "`mode`: none; native: route the pods of remote nodes through their addresses; "+
		"or tunnel: through an overlay")
	flags.Var(&list[clusterRouting]{&o.clusterRoutingMode, parseClusterRouting, clusterRouting.String, "modes", false}, "cluster-routing-mode",
		"routing mode of one cluster, as CLUSTER=MODE, where it is not that of --routing-mode")
	flags.Uint16Var(&o.tunnelPort, "tunnel-port", datapath.DefaultTunnelPort, "UDP port of the overlay, the same `number` on all nodes")
	flags.StringVar(&o.overlayCheck, "overlay-check", "drop",
		"drop or count: what to do with packets of the overlay that are not from the node or not of the identity that they claim, a `word`")
	flags.StringVar(&o.podCheck, "pod-check", string(datapath.PodCheckCount),
		"off, count or drop: what to do with packets that come from the device of a pod of this node and have another's address, a `word`")
	flags.StringVar(&o.mark, "mark", "none",
		"`layout` of the mark that tells the identity of incoming packets: none, cilium, or custom, with --mark-mask and --mark-shift")
	flags.Var(&o.markMask, "mark-mask", "bits of the mark that --mark custom may write, a `number` such as 0xffff0000")
	flags.Uint8Var(&o.markShift, "mark-shift", 0, "bit of the mark where --mark custom puts the identity's lowest, a `number`")
	flags.Uint32Var(&o.maxEntries, "max-ipcache-entries", 512000, "size of the kernel's map of addresses, a `number`")
	flags.DurationVar(&o.verifyInterval, "verify-interval", datapath.DefaultVerifyInterval,
		"how often, at about and at least, the kernel's map is compared as a whole with what is known, a `duration`")
	flags.Uint32Var(&o.flowSample, "flow-sample", 100, "report one in this `number` of packets as a flow; 0: none")
	flags.BoolVar(&o.serviceLB, "service-lb", false,
		"give sockets that ask for a service one of its backends, in whatever cluster it is")
	flags.StringVar(&o.serviceCgroup, "service-cgroup", "",
		"`directory` of the cgroup whose sockets reach services (default: the root of the unified hierarchy)")
	flags.StringVar(&o.serviceNetNSDir, "service-netns-dir", "",
		"`directory` with the network namespaces of pods, such as /run/netns, whose connected UDP sockets end, too, when their backend goes; needs CAP_SYS_ADMIN (default: those of the agent's own namespace only)")
	flags.BoolVar(&o.serviceTC, "service-tc", false,
		"let packets of pods reach services, too, that come from no socket of the cgroup, by programs at the pods' devices")
	flags.StringSliceVar(&o.serviceTCDevices, "service-tc-devices", nil,
		"`device` behind which there are more clients of services, such as machines that this node routes for; may be repeated")
	flags.Uint32Var(&o.serviceTCFlows, "service-tc-flows", datapath.DefaultServiceTCFlows,
		"for how many flows of such packets there is room, a `number`")
	flags.StringVar(&o.serviceAlgorithm, "service-algorithm", service.Random.String(),
		"how a backend is chosen where a service does not say it, a `word`: random or maglev")
	flags.TextVar(&o.metricsAddress, "metrics-address", netip.AddrPort{},
		"`address` of the loopback device, such as 127.0.0.1:9879, that answers /metrics and health probes, too (default: the socket only)")
	flags.TextVar(&o.pageAddress, "page-address", netip.AddrPort{},
		"`address` of the loopback device, such as 127.0.0.1:9880, that shows the mesh as a page in a browser, too, to those who know what `weft page` prints (default: the socket only)")
	flags.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "least `level` of what is logged: debug, info, warn or error")
	return o
}

func parseNodeIP(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", text)
	}
	if addr = addr.Unmap(); addr.Zone() != "" || !addr.IsGlobalUnicast() {
		return netip.Addr{}, fmt.Errorf("%s cannot be a node's address: want a global unicast one", addr)
	}
	return addr, nil
}

func parsePodCIDR(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a prefix such as 10.1.1.0/24", text)
	}
	if p != p.Masked() {
		return netip.Prefix{}, fmt.Errorf("%s has bits beyond its length: did you mean %s?", p, p.Masked())
	}
	return p, nil
}

// kvstoreOption is one name=value of --kvstore-opt.
type kvstoreOption struct{ name, value string }

func (o kvstoreOption) String() string { return o.name + "=" + o.value }

func parseKVStoreOption(text string) (kvstoreOption, error) {
	name, value, ok := strings.Cut(text, "=")
	if !ok {
		return kvstoreOption{}, fmt.Errorf("%q: want name=value, such as etcd.qps=100", text)
	}
	return kvstoreOption{name, value}, new(kvstore.Config).SetOption(name, value)
}

// nodeIPChoice is one choice of --node-ip-preference.
type nodeIPChoice struct {
	cluster string // empty: for all that have none of their own
	node.Choice
}

func (c nodeIPChoice) String() string {
	if c.cluster == "" {
		return c.Choice.String()
	}
	return c.cluster + "=" + c.Choice.String()
}

func parseNodeIPChoice(text string) (c nodeIPChoice, err error) {
	if cluster, choice, ok := strings.Cut(text, "="); ok {
		if err := identity.ValidateClusterName(cluster); err != nil {
			return nodeIPChoice{}, err
		}
		c.cluster, text = cluster, choice
	}
	c.Choice, err = node.ParseChoice(text)
	return c, err
}

func parseDevice(text string) (string, error) {
	const longest = 15 // IFNAMSIZ without its zero
	if text == "" || len(text) > longest {
		return "", fmt.Errorf("%q is not the name of a device: want 1 to %d characters", text, longest)
	}
	return text, nil
}

func parseLabelPattern(text string) (string, error) {
	_, err := identity.NewFilter(text)
	return text, err
}

// agentConfig is what the agent is made from: every option checked, every default in place.
type agentConfig struct {
	agentOptions
	clientOptions
	layout  identity.Layout
	kvstore *kvstore.Config    // nil: none
	options []api.ConfigOption // as they were given
}

// load completes the options from the file, if one is named, and checks them.
func (o *agentOptions) load(flags *pflag.FlagSet, c *clientOptions) (agentConfig, error) {
	if o.config != "" {
		if err := fromFile(flags, o.config, "config"); err != nil {
			return agentConfig{}, err
		}
	}
	if o.nodeName == "" {
		host, err := os.Hostname()
		if err != nil {
			return agentConfig{}, fmt.Errorf("name of this node: %w: give one with --node-name", err)
		}
		o.nodeName = host
	}
	cfg := agentConfig{agentOptions: *o, clientOptions: *c}
	if err := cfg.check(); err != nil {
		return agentConfig{}, &usageError{cause: err}
	}
	if o.kvstoreConfig != "" {
		k, err := kvstore.LoadConfig(o.kvstoreConfig)
		if err != nil {
			return agentConfig{}, usagef("--kvstore-config: %w", err)
		}
		o.tune(&k)
		cfg.kvstore = &k
	}
	cfg.options = listOptions(flags)
	return cfg, nil
}

// check refuses what cannot work, whatever the machine is like.
func (c *agentConfig) check() (err error) {
	if c.layout, err = identity.NewLayout(c.maxConnectedClusters); err != nil {
		return fmt.Errorf("--max-connected-clusters: %w", err)
	}
	if err := identity.ValidateClusterName(c.clusterName); err != nil {
		return fmt.Errorf("--cluster-name: %w", err)
	}
	id := identity.ClusterID(c.clusterID)
	switch {
	case id > c.layout.MaxCluster():
		return fmt.Errorf("--cluster-id %d: want at most %d", id, c.layout.MaxCluster())
	case id != 0 && c.clusterName == defaultCluster:
		return fmt.Errorf("--cluster-id %d: a cluster of a mesh needs a name of its own: give one with --cluster-name", id)
	case id == 0 && c.clustermeshConfig != "":
		return errors.New("--clustermesh-config: a cluster of a mesh needs a number of its own: give one with --cluster-id")
	case c.cacheTTL < 0 || c.cacheTTL > 0 && c.cacheTTL < time.Second:
		return fmt.Errorf("--clustermesh-cache-ttl %s: want 0 or at least 1s", c.cacheTTL)
	case c.cacheTTLAll && c.cacheTTL == 0:
		return errors.New("--clustermesh-cache-ttl-all: give the time with --clustermesh-cache-ttl")
	case api.CheckMetricsAddress(c.metricsAddress) != nil:
		return fmt.Errorf("--metrics-address %w", api.CheckMetricsAddress(c.metricsAddress))
	case api.CheckPageAddress(c.pageAddress) != nil:
		return fmt.Errorf("--page-address %w", api.CheckPageAddress(c.pageAddress))
	case c.verifyInterval < minVerifyInterval:
		return fmt.Errorf("--verify-interval %s: want at least %s", c.verifyInterval, minVerifyInterval)
	case c.kubeconfig != "" && !c.kubernetes && !c.kubernetesServices:
		return errors.New("--kubeconfig: it is read with --kubernetes or --kubernetes-services alone: give one of them, too")
	case c.maxEntries == 0:
		return errors.New("--max-ipcache-entries: want at least 1")
	case c.serviceCgroup != "" && !c.serviceLB:
		return errors.New("--service-cgroup: it is used with --service-lb alone: give that, too")
	case c.serviceCgroup != "" && !filepath.IsAbs(c.serviceCgroup):
		return fmt.Errorf("--service-cgroup %q: want an absolute path", c.serviceCgroup)
	case c.serviceNetNSDir != "" && !c.serviceLB:
		return errors.New("--service-netns-dir: it is used with --service-lb alone: give that, too")
	case c.serviceNetNSDir != "" && !filepath.IsAbs(c.serviceNetNSDir):
		return fmt.Errorf("--service-netns-dir %q: want an absolute path", c.serviceNetNSDir)
	case c.serviceTC && !c.serviceLB:
		return errors.New("--service-tc: it is used with --service-lb alone: give that, too")
	case len(c.serviceTCDevices) > 0 && !c.serviceTC:
		return errors.New("--service-tc-devices: they are used with --service-tc alone: give that, too")
	case c.serviceTCFlows < datapath.LeastServiceTCFlows || c.serviceTCFlows > datapath.MostServiceTCFlows:
		return fmt.Errorf("--service-tc-flows %d: want %d to %d", c.serviceTCFlows, datapath.LeastServiceTCFlows, datapath.MostServiceTCFlows)
	case c.tunnelPort == 0:
		return errors.New("--tunnel-port: want at least 1")
	case c.overlayCheck != "drop" && c.overlayCheck != "count":
		return fmt.Errorf("--overlay-check %q: want drop or count", c.overlayCheck)
	case !datapath.PodCheck(c.podCheck).Valid():
		return fmt.Errorf("--pod-check %q: want off, count or drop", c.podCheck)
	case c.kvstoreLeaseTTL < minLeaseTTL || c.kvstoreLeaseTTL > maxLeaseTTL:
		return fmt.Errorf("--kvstore-lease-ttl %s: want %s to %s", c.kvstoreLeaseTTL, minLeaseTTL, maxLeaseTTL)
	}
	if err := c.serviceOptions.check(); err != nil {
		return err
	}
	if err := checkNodeName(c.nodeName); err != nil {
		return err
	}
	if _, err := service.ParseAlgorithm(c.serviceAlgorithm); err != nil {
		return fmt.Errorf("--service-algorithm: %w", err)
	}
	if !datapath.RoutingMode(c.routingMode).Valid() {
		return fmt.Errorf("--routing-mode %q: want none, native or tunnel", c.routingMode)
	}
	if err := c.checkMark(); err != nil {
		return err
	}
	if len(familyOf(c.nodeIPs, false)) > 1 || len(familyOf(c.nodeIPs, true)) > 1 {
		return fmt.Errorf("--node-ip: several addresses of one family: %v", c.nodeIPs)
	}
	if !filepath.IsAbs(c.stateDir) {
		return fmt.Errorf("--state-dir %q: want an absolute path", c.stateDir)
	}
	if !filepath.IsAbs(c.bpffs) {
		return fmt.Errorf("--bpffs %q: want an absolute path", c.bpffs)
	}
	return nil
}

// checkNodeName holds the name to what can stand in an etcd key.
func checkNodeName(name string) error {
	const longest = 253
	for i := range len(name) {
		b := name[i]
		if (b < 'a' || b > 'z') && (b < 'A' || b > 'Z') && (b < '0' || b > '9') && b != '-' && b != '.' && b != '_' {
			return fmt.Errorf("--node-name %q: want letters, digits, '-', '_' and '.'", name)
		}
	}
	if name == "" || len(name) > longest {
		return fmt.Errorf("--node-name %q: want 1 to %d characters", name, longest)
	}
	return nil
}

// familyOf returns those of addrs that are IPv6, or those that are IPv4.
func familyOf(addrs []netip.Addr, v6 bool) []netip.Addr {
	var of []netip.Addr
	for _, a := range addrs {
		if a.Is6() == v6 {
			of = append(of, a)
		}
	}
	return of
}
