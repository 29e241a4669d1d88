// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// DefaultMaxEntries is the size of the ipcache map unless configured otherwise.
const DefaultMaxEntries = 512000

// Config says what the datapath of a node is made of.
type Config struct {
	// BPFFS is the mount point of a BPF file system, as a rule /sys/fs/bpf. Agents on one machine need one each.
	BPFFS string
	// Devices get the programs. Empty: the devices of the default routes and those with one of NodeIPs; a device that has
	// the programs then keeps them as long as it exists, so that a default route which goes and comes opens no gap.
	Devices     []string
	RoutingMode RoutingMode
	// ClusterRouting is the mode for clusters, by name, that are not reached as RoutingMode says.
	ClusterRouting map[string]RoutingMode
	// TunnelPort is the UDP port of the overlay; 0: DefaultTunnelPort.
	TunnelPort uint16
	// OverlayLax: packets from the overlay that are not from where or whose they say are counted, and not dropped.
	OverlayLax bool
	// Pods tells of this node's own pods, whose devices get programs too. Nil: it knows of none.
	Pods Pods
	// PodCheck says what becomes of packets from a pod's device that have another's address; "": PodCheckCount.
	PodCheck PodCheck
	// Mark says whether and how packets that come in are marked.
	Mark Mark
	// MaxEntries is the size of the ipcache map; 0: DefaultMaxEntries. A map of another size that is pinned already is
	// replaced by one of this size with its content.
	MaxEntries uint32
	// ClusterName and NodeName name this node among those of Nodes.
	ClusterName, NodeName string
	// NodeIPs are this node's own addresses.
	NodeIPs []netip.Addr
	// LocalPodCIDRs are this node's own pod CIDRs: no route to another node may overlap one.
	LocalPodCIDRs []netip.Prefix
	// DualStack: the world of unknown addresses is told apart by family.
	DualStack bool
	// Underlay6: nodes reach each other over IPv6; else over IPv4.
	Underlay6 bool
	// VerifyInterval is how often, at about and at least, the whole map is compared with the table; 0: DefaultVerifyInterval.
	// As long as that takes less than a tenth of the time it is done within half a minute.
	VerifyInterval time.Duration
	// FlowSample: one in so many packets becomes a [Flow]; 0: none.
	FlowSample uint32
	// Layout tells to which cluster an identity belongs.
	Layout identity.Layout
	IPs    *ipcache.Table
	Nodes  *node.Table
	// Listed reports whether all that the cluster with this id claims is in IPs and Nodes, so that entries which nobody
	// claims may be pruned; for id 0, whether that holds for every cluster. It is called from several goroutines.
	Listed func(identity.ClusterID) bool
	// Services says what services lead to; nil: sockets are given no backends.
	Services ServiceSource
	// ServicesListed reports whether all services and backends that there are have been heard, so that those in the kernel
	// which nobody claims may be pruned. It is called from several goroutines.
	ServicesListed func() bool
	// ServiceCgroup is the directory of the cgroup whose sockets reach services; "": see [DefaultCgroup].
	ServiceCgroup string
	// ServiceNetNSDir is a directory of names of network namespaces, such as /run/netns, in which connected UDP sockets end, too,
	// when their backend goes; "": in the own one alone. To enter them takes CAP_SYS_ADMIN.
	ServiceNetNSDir string
	// ServiceAlgorithm is that of services that ask for none.
	ServiceAlgorithm service.Algorithm
	// ServiceTC: packets that come from no local socket reach services, too, at the devices of Pods and at ServiceTCDevices.
	ServiceTC        bool
	ServiceTCDevices []string
	// ServiceTCFlows is for how many flows of such packets there is room; 0: [DefaultServiceTCFlows]. One that differs from that of
	// an earlier agent keeps the flows that there are.
	ServiceTCFlows uint32
	Log            *slog.Logger

	withoutTCX   bool                     // as on a kernel that has none
	compareEvery time.Duration            // 0: compareInterval
	refuseRoute  func(netip.Prefix) error // nil, or says what keeps the kernel from taking a route
}

// validate fills in the defaults.
func (c *Config) validate() error {
	switch {
	case c.BPFFS == "":
		return errors.New("datapath: no BPF file system is named")
	case !c.RoutingMode.Valid():
		return fmt.Errorf("datapath: routing mode %q: want %s, %s or %s", c.RoutingMode, RoutingNone, RoutingNative, RoutingTunnel)
	case c.Layout.MaxCluster() == 0:
		return errors.New("datapath: no identity layout")
	case c.IPs == nil || c.Nodes == nil || c.Listed == nil || c.Log == nil:
		return errors.New("datapath: IPs, Nodes, Listed and Log are required")
	case c.Services != nil && c.ServicesListed == nil:
		return errors.New("datapath: Services need ServicesListed")
	case c.Services == nil && c.ServiceTC:
		return errors.New("datapath: ServiceTC needs Services")
	case !c.ServiceTC && len(c.ServiceTCDevices) > 0:
		return errors.New("datapath: ServiceTCDevices need ServiceTC")
	}
	for cluster, mode := range c.ClusterRouting {
		if !mode.Valid() {
			return fmt.Errorf("datapath: routing mode %q of cluster %s: want %s, %s or %s", mode, cluster, RoutingNone, RoutingNative, RoutingTunnel)
		}
	}
	if err := c.Mark.Validate(); err != nil {
		return fmt.Errorf("datapath: %w", err)
	}
	if c.PodCheck == "" {
		c.PodCheck = PodCheckCount
	}
	if !c.PodCheck.Valid() {
		return fmt.Errorf("datapath: pod check %q: want %s, %s or %s", c.PodCheck, PodCheckOff, PodCheckCount, PodCheckDrop)
	}
	if c.TunnelPort == 0 {
		c.TunnelPort = DefaultTunnelPort
	}
	if c.VerifyInterval == 0 {
		c.VerifyInterval = DefaultVerifyInterval
	}
	if c.MaxEntries == 0 {
		c.MaxEntries = DefaultMaxEntries
	}
	return nil
}

func (c *Config) comparePace() comparePace {
	return comparePace{cmp.Or(c.compareEvery, compareInterval), c.VerifyInterval}
}

// mode is how the nodes of a cluster are reached.
func (c *Config) mode(cluster string) RoutingMode {
	if mode, ok := c.ClusterRouting[cluster]; ok {
		return mode
	}
	return c.RoutingMode
}

// uses reports whether any cluster may be reached in a mode.
func (c *Config) uses(mode RoutingMode) bool {
	if c.RoutingMode == mode {
		return true
	}
	for _, m := range c.ClusterRouting {
		if m == mode {
			return true
		}
	}
	return false
}

// routeless: no routes are ours to set.
func (c *Config) routeless() bool { return !c.uses(RoutingNative) && !c.uses(RoutingTunnel) }

// roles are those of the devices that get programs.
func (c *Config) roles() []role {
	roles := []role{roleUplink}
	if c.uses(RoutingTunnel) {
		roles = append(roles, roleOverlay)
	}
	if c.Pods != nil {
		roles = append(roles, rolePod)
	}
	return roles
}

// settings is what the programs are told.
func (c *Config) settings() bpf.Config {
	s := bpf.MakeConfig(c.FlowSample, c.DualStack)
	s.Mark, s.MarkMask, s.MarkShift = c.Mark.Kind, c.Mark.Mask, c.Mark.Shift
	if c.Underlay6 {
		s.Underlay6 = 1
	}
	if c.OverlayLax {
		s.OverlayLax = 1
	}
	s.PodCheck = c.PodCheck.setting()
	return s
}

// Datapath is the task that keeps a node's kernel equal to the tables.
type Datapath struct {
	cfg   Config
	flows *flows

	// compareMap and compareHost reach those who own the map, and devices and routes.
	compareMap, compareHost chan comparison
	compareServices         chan comparison // nil without services

	ready   chan struct{}
	unready atomic.Int32 // how many of the conditions of ready do not hold yet

	mu         sync.Mutex
	state      Status             // but for the parts that others keep
	reconciler *reconciler        // nil before Run
	fast       *fastPath          // nil before Run
	services   *serviceReconciler // nil before Run, and without services
	translate  *translation       // nil but in Run, and without ServiceTC

	carriedNodes node.Revision // of which the routes are there, or the status says why not
}

// New checks cfg. It touches nothing; Run does.
func New(cfg Config) (*Datapath, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	d := &Datapath{
		cfg:   cfg,
		flows: newFlows(),
		ready: make(chan struct{}),

		compareMap: make(chan comparison), compareHost: make(chan comparison),

		state: Status{PinDir: filepath.Join(cfg.BPFFS, pinDirName), RoutingMode: cfg.RoutingMode},
	}
	d.state.IPCache.MaxEntries = cfg.MaxEntries
	d.unready.Store(2)
	if cfg.Services != nil {
		d.compareServices = make(chan comparison)
		d.unready.Store(3)
	}
	return d, nil
}

// String names the task.
func (d *Datapath) String() string { return "datapath" }

// Ready is closed when, for the first time, the devices that exist have their programs, the map equals the tables, and the
// cgroup, where services are wanted, has its programs and the kernel all services. A
// configured device that does not exist does not hold it up; having no device at all does.
func (d *Datapath) Ready() <-chan struct{} { return d.ready }

// Run takes over or makes all kernel objects and keeps them right until ctx ends; then it returns nil and leaves them as
// they are, at work. Errors of its beginning wrap [ErrPrivileges], [ErrKernel], [ErrBPFFS], [ErrInUse] or
// [ErrIncompatible]. It can be called once.
//
// It works in the network namespace of the calling thread, and does all that depends on it on that thread: a caller that
// has changed the namespace of its thread only needs to have locked it.
func (d *Datapath) Run(ctx context.Context) error {
	if err := checkPrivileges(); err != nil {
		return err
	}
	raiseMemlock()
	dir, err := openPinDir(d.cfg.BPFFS)
	if err != nil {
		return err
	}
	defer dir.Close()
	maps, programs, err := d.load(dir)
	if err != nil {
		return err
	}
	defer maps.Close()
	defer closePrograms(programs)
	h, err := openHost()
	if err != nil {
		return err
	}
	defer h.Close()
	fastMaps, err := openFastMaps(maps)
	if err != nil {
		return err
	}
	defer fastMaps.Close()
	fast := newFastPath(&kernelMap{m: maps[bpf.MapIPCache]}, fastMaps, d.cfg.MaxEntries, d.cfg.IPs.Len)
	defer fast.Close()
	reconciler := newReconciler(&d.cfg, fast)
	reconciler.requests = d.compareMap
	d.mu.Lock()
	d.reconciler, d.fast = reconciler, fast
	d.mu.Unlock()
	services, err := d.openServices(dir)
	if err != nil {
		return err
	}
	defer services.Close()
	translation, err := d.openTranslation(dir, services)
	if err != nil {
		return err
	}
	defer d.closeTranslation(translation)
	programs = translation.with(programs)
	attacher := d.attacher(dir, programs, h)
	defer attacher.Close()
	events, err := ringbuf.NewReader(maps[bpf.MapEvents])
	if err != nil {
		return explain("read events", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer events.Close()
	defer cancel()
	tasks.Go(func() { d.flows.read(events) })
	services.start(ctx, &tasks, d)
	translation.start(ctx, &tasks)
	defer services.stopReading()
	tasks.Go(func() { reconciler.run(ctx, sync.OnceFunc(d.achieved)) })
	k := &keeper{
		datapath: d,
		dir:      dir,
		maps:     maps,
		host:     h,
		programs: programs,
		attacher: attacher,
		achieved: sync.OnceFunc(d.achieved),
		changed:  make(chan struct{}, 1),
	}
	if d.cfg.Pods != nil {
		k.neighbours = &neighbourNews{}
	}
	return k.run(ctx)
}

// attacher is the one that the kernel has the hooks for.
func (d *Datapath) attacher(dir *pinDir, programs []program, h *host) attacher {
	if d.cfg.withoutTCX || !hasTCX() {
		return &filterAttacher{dir: dir, programs: programs, host: h}
	}
	return &tcxAttacher{dir: dir, programs: programs}
}

// load opens or makes the maps and programs, and tells the programs their settings before any of them runs.
func (d *Datapath) load(dir *pinDir) (mapSet, []program, error) {
	spec, err := bpf.Load()
	if err != nil {
		return nil, nil, fmt.Errorf("read embedded programs: %w", err)
	}
	spec.Maps[bpf.MapIPCache].MaxEntries = d.cfg.MaxEntries
	maps, err := openMaps(dir, spec.Maps, d.cfg.Log)
	if err != nil {
		return nil, nil, err
	}
	if err := forgetForeign(maps); err != nil {
		maps.Close()
		return nil, nil, err
	}
	settings := d.cfg.settings()
	if err := maps[bpf.MapConfig].Update(uint32(0), &settings, ebpf.UpdateAny); err != nil {
		maps.Close()
		return nil, nil, explain("write settings of the programs", err)
	}
	programs, err := openPrograms(dir, wantedPrograms(d.cfg.roles()...), spec, maps)
	if err != nil {
		maps.Close()
		return nil, nil, err
	}
	return maps, programs, nil
}

// achieved counts the conditions of ready.
func (d *Datapath) achieved() {
	if d.unready.Add(-1) == 0 {
		close(d.ready)
	}
}

// local is what routes must not run over.
func (d *Datapath) local() localNode {
	return localNode{
		Cluster: d.cfg.ClusterName, Node: d.cfg.NodeName, IPs: slices.Clone(d.cfg.NodeIPs), PodCIDRs: d.cfg.LocalPodCIDRs,
		Mode: d.cfg.mode, Underlay6: d.cfg.Underlay6,
	}
}
