// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Status is the state of an agent.
type Status struct {
	Meta
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	// Healthy is true if there are no problems. See [Status.Assess].
	Healthy  bool     `json:"healthy"`
	Problems []string `json:"problems"`

	Cluster   LocalCluster  `json:"cluster"`
	Node      LocalNode     `json:"node"`
	KVStore   *KVStore      `json:"kvstore,omitempty"` // nil: no etcd of its own, nothing is published
	Clusters  []Cluster     `json:"clusters"`
	Tables    Tables        `json:"tables"`
	Endpoints Endpoints     `json:"endpoints"`
	Allocator *Allocator    `json:"allocator,omitempty"` // nil: no etcd of its own, nothing is allocated
	Datapath  Datapath      `json:"datapath"`
	Config    []ConfigError `json:"configErrors"`
	Tasks     []Task        `json:"tasks"`
}

// LocalCluster is the cluster that the agent belongs to.
type LocalCluster struct {
	Name                 string `json:"name"`
	ID                   uint16 `json:"id"`
	MaxConnectedClusters uint16 `json:"maxConnectedClusters"`
}

// LocalNode is the node that the agent runs on.
type LocalNode struct {
	Name     string         `json:"name"`
	IPs      []netip.Addr   `json:"ips"`
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
}

// KVStore is the etcd of the agent's own cluster, and what the agent publishes in it.
type KVStore struct {
	Endpoints           []string          `json:"endpoints"`
	Endpoint            string            `json:"endpoint,omitempty"` // the one that answered last
	State               string            `json:"state"`              // of the connection: connecting, syncing, ready, stale or failed
	Since               time.Time         `json:"since"`              // of the state
	Connected           bool              `json:"connected"`
	ServerVersion       string            `json:"serverVersion,omitempty"`
	Warning             string            `json:"warning,omitempty"` // what is wrong with a server of this version
	EtcdClusterID       string            `json:"etcdClusterID,omitempty"`
	Revision            int64             `json:"revision,omitempty"`
	Ready               bool              `json:"ready"` // all that was to be published has been, once
	Keys                int               `json:"keys"`
	Pending             int               `json:"pending"` // changes that etcd does not have yet
	Leases              []string          `json:"leases"`
	LastError           string            `json:"lastError,omitempty"` // it stays after recovery
	LastErrorAt         time.Time         `json:"lastErrorAt,omitzero"`
	LastContact         time.Time         `json:"lastContact,omitzero"`          // of the last answer
	Certificates        []Certificate     `json:"certificates,omitempty"`        // none without TLS
	CertificateWarnings []string          `json:"certificateWarnings,omitempty"` // of those that come near their end
	KeyErrors           map[string]string `json:"keyErrors,omitempty"`           // by key, what keeps it from being in etcd
}

// Cluster is a cluster that the agent follows.
type Cluster struct {
	Name string `json:"name"`
	ID   uint32 `json:"id"`
	// Own: it is the agent's own cluster, followed for its other nodes.
	Own                 bool              `json:"own"`
	State               string            `json:"state"` // connecting, syncing, ready, stale, failed, conflict or draining
	Ready               bool              `json:"ready"`
	Since               time.Time         `json:"since"` // of the state
	ConfigFile          string            `json:"configFile,omitempty"`
	ConfigError         string            `json:"configError,omitempty"` // of the file; what it last held stays in use
	Endpoints           []string          `json:"endpoints"`
	ServerVersion       string            `json:"serverVersion,omitempty"`
	Warning             string            `json:"warning,omitempty"` // what is wrong with a server of this version
	EtcdClusterID       string            `json:"etcdClusterID,omitempty"`
	Revision            int64             `json:"revision,omitempty"`
	Lag                 int64             `json:"lag,omitempty"` // revisions by which what is known trails Revision
	Canaries            bool              `json:"canaries"`      // the cluster says when its data is complete
	Cached              bool              `json:"cached"`        // the data comes from a copy
	Counts              Counts            `json:"counts"`
	Synced              map[string]bool   `json:"synced"`                 // by resource: listed completely at least once
	LastSuccess         time.Time         `json:"lastSuccess,omitzero"`   // when etcd last answered while the cluster was followed
	StaleSince          time.Time         `json:"staleSince,omitzero"`    // since when a stale cluster has not been followed
	Withdrawn           bool              `json:"withdrawn,omitempty"`    // its data has outlived its time
	ServicesLost        bool              `json:"servicesLost,omitempty"` // its backends are used only where there are no others
	Failures            uint64            `json:"failures"`               // attempts to connect and to join, and connections lost
	Reconnects          uint64            `json:"reconnects"`             // connections after the first
	LastReconnect       time.Time         `json:"lastReconnect,omitzero"` // when the last of them was made
	LastError           string            `json:"lastError,omitempty"`
	LastErrorAt         time.Time         `json:"lastErrorAt,omitzero"`
	Certificates        []Certificate     `json:"certificates,omitempty"`        // none without TLS
	CertificateWarnings []string          `json:"certificateWarnings,omitempty"` // of those that come near their end
	Waiting             int               `json:"waiting,omitempty"`             // announcements whose node is not known
	Conflicts           int               `json:"conflicts,omitempty"`           // prefixes of which it and others say different things
	Quotas              Quotas            `json:"quotas,omitzero"`
	Rejected            map[string]uint64 `json:"rejected,omitempty"` // by kind and reason
	Rejections          []Rejection       `json:"lastRejections,omitempty"`
}

// Certificate is one of those that a connection depends on.
type Certificate struct {
	Role     string    `json:"role"`              // client, server or ca
	Of       string    `json:"of"`                // the file; for a server its endpoint
	Subject  string    `json:"subject,omitempty"` // what it says of itself
	NotAfter time.Time `json:"notAfter"`
}

// Counts is what a cluster has published and this node has accepted.
type Counts struct {
	Nodes      int `json:"nodes"`
	IPs        int `json:"ips"`
	Identities int `json:"identities"`
	Services   int `json:"services"`
}

// Quotas are how much a cluster has, and how much it may have; a limit of 0 is none.
type Quotas struct {
	Entries         Quota  `json:"entries"`
	Bytes           Quota  `json:"bytes"`
	EventsPerSecond int64  `json:"eventsPerSecond,omitempty"`
	HeldBack        uint64 `json:"heldBack,omitempty"` // how often its changes came too fast
	Full            bool   `json:"full,omitempty"`     // something of it is refused for a quota
}

// Quota is a part of [Quotas].
type Quota struct {
	Used  int64 `json:"used"`
	Limit int64 `json:"limit"`
}

// Exceeded names the quota, as the limits do, for which something of the cluster is refused, or of which it has more than it may
// since that was lowered; "" for none.
func (q *Quotas) Exceeded() (name string, of Quota) {
	switch {
	case q.Entries.full() && (q.Full || q.Entries.Used > q.Entries.Limit):
		return "max-entries", q.Entries
	case q.Full, q.Bytes.full() && q.Bytes.Used > q.Bytes.Limit:
		return "max-bytes", q.Bytes
	}
	return "", Quota{}
}

func (q Quota) full() bool { return q.Limit > 0 && q.Used >= q.Limit }

// Rejection is a statement of a cluster that was not accepted.
type Rejection struct {
	Kind   string    `json:"kind"`
	Key    string    `json:"key"`
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
}

// Tables counts what is known of all clusters together.
type Tables struct {
	IPs        int `json:"ips"`
	Identities int `json:"identities"`
	Nodes      int `json:"nodes"`
	Services   int `json:"services"`
	Conflicts  int `json:"conflicts"` // prefixes of which several clusters or sources say different things
}

// Endpoints are the workloads of the node.
type Endpoints struct {
	Items  []Endpoint    `json:"items"`
	Errors []ConfigError `json:"errors"`
}

// Endpoint is a workload of the node.
type Endpoint struct {
	Namespace string       `json:"namespace"`
	Name      string       `json:"name"`
	IPs       []netip.Addr `json:"ips"`
	Identity  uint32       `json:"identity"`
	Labels    []string     `json:"labels"`
	Source    string       `json:"source"` // kubernetes, api or file
	Origin    string       `json:"origin"` // where in the source: file:line, the UID of a pod
	State     string       `json:"state"`
	Reason    string       `json:"reason,omitempty"` // why it is not ready
	Since     time.Time    `json:"since"`            // it has been in this state, with this identity
}

// Allocator is what finds the identities of the node's workloads.
type Allocator struct {
	Listed    bool  `json:"listed"`    // all identities of the cluster are known
	LabelSets int   `json:"labelSets"` // that workloads of this node have
	Waiting   int   `json:"waiting"`   // of those without an identity
	Restored  int   `json:"restored"`  // of those with the identity of before the restart, not confirmed by etcd
	Free      int   `json:"free"`      // identities of the cluster's range
	Allocated int64 `json:"allocated"` // since the start
	Failed    int64 `json:"failed"`    // attempts that came to nothing, since the start
}

// EndpointDetail is an endpoint as the answer to a question for one.
type EndpointDetail struct {
	Meta
	Endpoint Endpoint `json:"endpoint"`
}

// ConfigError is what is wrong with a file that an operator of the node wrote.
type ConfigError struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"`
	Message string `json:"message"`
}

func (e ConfigError) String() string {
	switch {
	case e.File == "":
		return e.Message
	case e.Line == 0:
		return e.File + ": " + e.Message
	}
	return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Message)
}

// Datapath is what the agent keeps in the kernel.
type Datapath struct {
	Ready       bool     `json:"ready"`
	RoutingMode string   `json:"routingMode"`
	Map         Map      `json:"map"`
	Devices     []Device `json:"devices"`
	// Overlay is nil where nothing is reached through it.
	Overlay *Overlay `json:"overlay,omitempty"`
	Routes  int      `json:"routes"` // to the pods of other nodes
	Flows   FlowStat `json:"flows"`
	Errors  []string `json:"errors"`
	// Drift is what somebody else changed in the kernel and was put right, by kind: map, route, link and so on.
	Drift map[string]uint64 `json:"drift"`
	Pods  PodDevices        `json:"pods"`
	// Services is nil where sockets are given no backends.
	Services *ServiceTable `json:"services,omitempty"`
}

// ServiceTable is the kernel's table of services.
type ServiceTable struct {
	Cgroup       string `json:"cgroup"` // whose sockets reach them
	Frontends    int    `json:"frontends"`
	MaxFrontends int    `json:"maxFrontends"`
	Backends     int    `json:"backends"` // one counts once for each frontend
	MaxBackends  int    `json:"maxBackends"`
	Slots        int    `json:"slots"` // what backends are chosen from, with the room to grow
	MaxSlots     int    `json:"maxSlots"`
	// Affinities is how many clients keep a backend, at most ten seconds ago. Where there is no room, the oldest go.
	Affinities    int    `json:"affinities"`
	MaxAffinities int    `json:"maxAffinities"`
	Pending       int    `json:"pending"`   // frontends that are not as they should be
	Unclaimed     int    `json:"unclaimed"` // found in the kernel, and nobody's yet
	Full          bool   `json:"full"`
	Chosen        uint64 `json:"chosen"`     // flows that got a backend
	Refused       uint64 `json:"refused"`    // flows for which there was none
	Destroyed     uint64 `json:"destroyed"`  // connected UDP sockets whose backend was gone
	Namespaces    int    `json:"namespaces"` // network namespaces in which those are looked for, the agent's own included
	Written       uint64 `json:"written"`    // words of memory that programs read
	Calls         uint64 `json:"calls"`      // to the kernel, for frontends
	Rebuilds      uint64 `json:"rebuilds"`   // changes of several backends of a service at once, or by Maglev
	Failures      uint64 `json:"failures"`   // changes that could not be made
	// VerifiedAt is when all of it was last compared with what is wanted.
	VerifiedAt time.Time `json:"verifiedAt,omitzero"`
	// Translation is nil where packets that come from no local socket do not reach services.
	Translation *Translation `json:"translation,omitempty"`
}

// Translation is what programs at devices do with packets to services. Its counts outlive the agent.
type Translation struct {
	Devices  []Device `json:"devices"`
	Flows    int      `json:"flows"`    // as last counted
	MaxFlows int      `json:"maxFlows"` // beyond which those that were silent for longest are forgotten
	Begun    uint64   `json:"begun"`    // flows that got a backend
	Requests uint64   `json:"requests"` // packets to backends
	Replies  uint64   `json:"replies"`  // packets back to clients
	Errors   uint64   `json:"icmpErrors"`
	// Packets that were dropped: the service has no backend; its only one is the client itself; the client's port talks to each
	// already, by another service; the kernel had no memory.
	Refused uint64 `json:"refused"`
	Hairpin uint64 `json:"hairpin"`
	Clashes uint64 `json:"clashes"`
	Failed  uint64 `json:"failed"`
	// Answered is how many of the packets that are Refused or Hairpin were answered, by a reset or as unreachable.
	Answered uint64 `json:"answered"`
}

// PodDevices is what there is at the devices of this node's own pods.
type PodDevices struct {
	Check     string       `json:"check"` // "off", "count" or "drop": what becomes of packets with another's address
	Addresses int          `json:"addresses"`
	Devices   []Device     `json:"devices"`
	Missing   []MissingPod `json:"missing"`
}

// MissingPod is an address of a pod whose device is not found.
type MissingPod struct {
	Address netip.Addr `json:"address"`
	Reason  string     `json:"reason"`
}

// FlowStat counts the flows that the kernel reported since the agent started.
type FlowStat struct {
	Received uint64 `json:"received"`
	Lost     uint64 `json:"lost"`
}

// Map is the ipcache map.
type Map struct {
	Pin        string `json:"pin"`
	Entries    int    `json:"entries"`
	MaxEntries uint32 `json:"maxEntries"`
	Pending    int    `json:"pending"` // changes that are not in the map yet
	Full       bool   `json:"full"`
	// Unclaimed entries were found in the map and are kept until those who would claim them have been heard.
	Unclaimed  int       `json:"unclaimed"`
	Failures   uint64    `json:"failures"` // writes that the kernel refused, since the agent started
	Adopted    uint64    `json:"adopted"`  // entries found as they are wanted, and so not written
	Written    uint64    `json:"written"`
	Deleted    uint64    `json:"deleted"`             // those pruned included
	Drift      uint64    `json:"drift"`               // entries that somebody else changed in the map, and that were put right
	Pruned     uint64    `json:"pruned"`              // deleted because nobody claims them
	VerifiedAt time.Time `json:"verifiedAt,omitzero"` // when the whole map was last compared with the table
	Error      string    `json:"error,omitempty"`
}

// Overlay is the device that leads to the pods of other nodes.
type Overlay struct {
	Device string `json:"device"`
	Port   uint16 `json:"port"`            // UDP
	MTU    int    `json:"mtu,omitempty"`   // of packets inside; 0 while there is no device
	Error  string `json:"error,omitempty"` // why it is not as it should be
}

// Device is a network device with the programs of the agent.
type Device struct {
	Name     string          `json:"name"`
	Index    int             `json:"index"`
	Programs []DeviceProgram `json:"programs"`
	Error    string          `json:"error,omitempty"` // why it has no programs
}

// DeviceProgram is one program at one device.
type DeviceProgram struct {
	Name     string `json:"name"`
	Attached bool   `json:"attached"`
	Error    string `json:"error,omitempty"`
}

// Task is a part of the agent that runs by itself.
type Task struct {
	Name   string `json:"name"`
	Ready  bool   `json:"ready"`
	Detail string `json:"detail,omitempty"`
}

// States of a cluster that mean more than whether it is followed.
const (
	// StateConflict: it has the id of another cluster, and nothing of it is used.
	StateConflict = "conflict"
	// StateDraining: somebody has removed its config. It is on its way out, and not ill.
	StateDraining = "draining"
)

// Advice is what to do about a cluster that is not ready; "" if that is to wait.
func (c *Cluster) Advice() string {
	switch {
	case c.Ready, c.State == StateDraining:
		return ""
	case c.ConfigError != "":
		return "correct the file"
	case c.State == StateConflict:
		return "give one of the two clusters another id"
	case c.LastError == "":
		return ""
	}
	return "see `weft troubleshoot kvstore " + c.Name + "`"
}

// Assess sets Healthy and Problems from all the rest. What other clusters publish wrongly is their problem, not this
// node's: it is shown, but is none here. That a quota keeps out what may be right is one: somebody must raise the quota, or ask the
// cluster.
func (s *Status) Assess() {
	s.Problems = []string{}
	add := func(format string, args ...any) { s.Problems = append(s.Problems, fmt.Sprintf(format, args...)) }
	for _, e := range s.Config {
		add("configuration: %s", e)
	}
	if s.KVStore != nil {
		s.assessKVStore(add)
	}
	for _, c := range s.Clusters {
		if c.ConfigError != "" {
			add("cluster %s: %s", c.Name, c.ConfigError+because(c.Advice()))
		} else if !c.Ready && c.State != StateDraining {
			add("cluster %s is %s%s", c.Name, c.State, because(c.LastError)+because(c.Advice()))
		}
		if name, of := c.Quotas.Exceeded(); name != "" {
			add("cluster %s: quota %s: %d of %d: what goes beyond is refused: raise it in --mesh-limits if it should have more", c.Name, name, of.Used, of.Limit)
		}
	}
	for _, e := range s.Endpoints.Errors {
		add("endpoints: %s", e)
	}
	if a := s.Allocator; a != nil && a.Listed && a.Free == 0 {
		add("identities: the cluster's range has no free one: workloads with new labels wait until the operator deletes what nobody uses")
	}
	s.assessDatapath(add)
	s.Healthy = len(s.Problems) == 0
}

// Unready says what keeps the node from serving: the kernel is not what the agent knows. A cluster that cannot be reached
// does not: what is known of it stays in force.
func (s *Status) Unready() []string {
	var why []string
	if !s.Datapath.Ready {
		why = append(why, "datapath: the kernel has not been brought in line yet")
	}
	if s.Datapath.Map.Pending > 0 {
		why = append(why, fmt.Sprintf("datapath: %d changes are not in the map%s", s.Datapath.Map.Pending, because(s.Datapath.Map.Error)))
	}
	return why
}

func (s *Status) assessKVStore(add func(string, ...any)) {
	k := s.KVStore
	if !k.Ready || (k.Pending > 0 && !k.Connected) {
		add("kvstore: %d changes are not published yet%s: see `weft troubleshoot kvstore`", k.Pending, because(k.LastError))
	}
	for _, key := range slices.Sorted(maps.Keys(k.KeyErrors)) {
		add("kvstore: key %s: %s", key, k.KeyErrors[key])
	}
}

func (s *Status) assessDatapath(add func(string, ...any)) {
	unattached := func(device string, p *DeviceProgram) {
		add("datapath: %s: %s is not attached%s: it is tried again at once; `weft diagnose` names what is in its way", device, p.Name, because(p.Error))
	}
	d := &s.Datapath
	if !d.Ready {
		add("datapath: the kernel has not been brought in line yet")
	}
	if d.Map.Full {
		add("datapath: the ipcache map is full (%d entries) and %d changes wait: restart with a larger --max-ipcache-entries",
			d.Map.MaxEntries, d.Map.Pending)
	} else if d.Map.Error != "" {
		add("datapath: ipcache map: %d changes wait: %s", d.Map.Pending, d.Map.Error)
	}
	if d.Ready && len(d.Devices) == 0 {
		add("datapath: no device: name some with --devices")
	}
	for _, device := range d.Devices {
		if device.Error != "" {
			add("datapath: device %s: %s", device.Name, device.Error)
		}
		for _, p := range device.Programs {
			if !p.Attached {
				unattached("device "+device.Name, &p)
			}
		}
	}
	for _, device := range d.Pods.Devices {
		for _, p := range device.Programs {
			if !p.Attached {
				unattached("pod device "+device.Name, &p)
			}
		}
	}
	if d.Services != nil && d.Services.Translation != nil {
		for _, device := range d.Services.Translation.Devices {
			if device.Error != "" {
				add("datapath: device %s: %s", device.Name, device.Error)
			}
			for _, p := range device.Programs {
				if !p.Attached {
					unattached("device "+device.Name, &p)
				}
			}
		}
	}
	for _, err := range d.Errors {
		add("datapath: %s", err)
	}
}

func because(err string) string {
	if err == "" {
		return ""
	}
	return ": " + err
}
