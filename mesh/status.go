// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"time"

	"github.com/weftmesh/weft/kvstore"
)

// State is where the life of a remote stands.
type State string

// The states of a remote.
const (
	// Connecting: the first connection is being made.
	Connecting State = "connecting"
	// Syncing: connected, and the cluster has not been listed completely yet.
	Syncing State = "syncing"
	// Ready: connected, listed completely, and following.
	Ready State = "ready"
	// Stale: the cluster has been listed, but its etcd is not being followed now. What is known stays in use.
	Stale State = "stale"
	// Failed: the cluster has never been listed, and the last attempt to connect ended in an error.
	Failed State = "failed"
	// Draining: what the cluster has brought is being deleted, since its config is gone or its id is another one. The counts
	// say how much is left.
	Draining State = "draining"
	// Conflict: the cluster uses the id of another one, and waits until that is gone.
	Conflict State = "conflict"
)

// RemoteStatus is the state of one remote cluster, or of a config file that is none.
type RemoteStatus struct {
	Name      string `json:"name"`
	Own       bool   `json:"own,omitempty"` // our own cluster
	ClusterID uint32 `json:"clusterID"`     // 0: not known yet
	State     State  `json:"state"`
	// Since is when State began.
	Since      time.Time `json:"since"`
	ConfigFile string    `json:"configFile,omitempty"`
	// ConfigError is what is wrong with the file now. The config that was read before it stays in use.
	ConfigError string   `json:"configError,omitempty"`
	Endpoints   []string `json:"endpoints,omitempty"`

	// LastError is the last that went wrong; it stays after recovery.
	LastError   string    `json:"lastError,omitempty"`
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`
	// LastSuccess is when etcd last answered while the cluster was being followed.
	LastSuccess time.Time `json:"lastSuccess,omitzero"`
	// StaleSince is since when a stale cluster has not been followed. It is zero for one that is followed and stale for
	// another reason, such as a late heartbeat. Withdrawn: it has outlived [Config.CacheTTL].
	StaleSince time.Time `json:"staleSince,omitzero"`
	Withdrawn  bool      `json:"withdrawn,omitempty"`
	// ServicesLost: the cluster has been in doubt for [Config.LoseAfter], so that its backends are used only where there are
	// no others.
	ServicesLost bool `json:"servicesLost,omitempty"`
	// Certificates are those that the connection depends on; none without TLS. CertificateWarnings says of each that comes
	// near its end how near.
	Certificates        []kvstore.Certificate `json:"certificates,omitempty"`
	CertificateWarnings []string              `json:"certificateWarnings,omitempty"`
	// Failures counts attempts to connect and to join that came to nothing, and connections that were lost.
	Failures uint64 `json:"failures"`
	// Reconnects counts connections made after the first; LastReconnect is when the last of them was made.
	Reconnects    uint64    `json:"reconnects"`
	LastReconnect time.Time `json:"lastReconnect,omitzero"`

	// Objects whose present value is in use.
	Nodes      int `json:"nodes"`
	IPs        int `json:"ips"`
	Identities int `json:"identities"`
	Services   int `json:"services"`
	// Synced says which kinds have been listed completely over the present connection.
	Synced Synced `json:"synced"`
	// Canaries: the cluster says when a kind is complete. Cached: its data is a copy under cilium/cache.
	Canaries bool `json:"canaries"`
	Cached   bool `json:"cached"`

	EtcdClusterID uint64 `json:"etcdClusterID,omitempty"`
	ServerVersion string `json:"serverVersion,omitempty"`
	// Warning says what is wrong with a server of this version.
	Warning  string `json:"warning,omitempty"`
	Revision int64  `json:"revision,omitempty"`
	// Lag is by how many revisions what is known trails Revision.
	Lag int64 `json:"lag,omitempty"`

	// Waiting counts announcements of addresses that are not used yet because the node that they are behind is not known.
	Waiting int    `json:"waiting,omitempty"`
	Quotas  Quotas `json:"quotas,omitzero"`

	// Rejected counts refused values by "kind/reason".
	Rejected map[string]uint64 `json:"rejected,omitempty"`
	// LastRejections are the newest refusals, oldest first; at most 100.
	LastRejections []Rejection `json:"lastRejections,omitempty"`
}

// Synced has one flag for each kind of object.
type Synced struct {
	Nodes      bool `json:"nodes"`
	IPs        bool `json:"ips"`
	Identities bool `json:"identities"`
	Services   bool `json:"services"`
}

// Rejection is one refused value. Key and Reason come from the remote cluster: anything in them that does not print is
// escaped, as in a Go string literal, and they are cut to a bounded length.
type Rejection struct {
	Kind   string    `json:"kind"`
	Key    string    `json:"key"`
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
}

// DirStatus is the state of the directory of config files.
type DirStatus struct {
	Path string `json:"path"`
	// Watched: changes are noticed at once. Otherwise the directory is read again every few seconds.
	Watched   bool      `json:"watched"`
	ScannedAt time.Time `json:"scannedAt,omitzero"`
	Error     string    `json:"error,omitempty"`
}
