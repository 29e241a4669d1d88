// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"time"
)

// Version is the apiVersion of every object. Within it, fields are added but never changed or removed.
const Version = "weft/v1"

// Kinds of objects.
const (
	KindStatus       = "Status"
	KindIP           = "IP"
	KindIPList       = "IPList"
	KindNodeList     = "NodeList"
	KindIdentity     = "Identity"
	KindEndpoint     = "Endpoint"
	KindEndpointList = "EndpointList"
	KindIdentityList = "IdentityList"
	KindServiceList  = "ServiceList"
	KindService      = "Service"
	KindFlow         = "Flow"
	KindFlowsLost    = "FlowsLost"
	KindVersion      = "Version"
	KindExplanation  = "Explanation"
	KindConflictList = "ConflictList"
	KindCluster      = "Cluster"
	KindClusterList  = "ClusterList"
	KindRejections   = "Rejections"
	KindMetricList   = "MetricList"
	KindError        = "Error"
)

// Meta says what an object is.
type Meta struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

// MetaOf is the Meta of objects of one kind.
func MetaOf(kind string) Meta { return Meta{APIVersion: Version, Kind: kind} }

// List is a list of objects.
type List[T any] struct {
	Meta
	Items []T `json:"items"`
}

// IP is what is known of one prefix.
type IP struct {
	Prefix   netip.Prefix `json:"prefix"`
	Identity uint32       `json:"identity"`
	// Labels are given for a single prefix, not in lists.
	Labels []string `json:"labels,omitempty"`
	// Cluster is who claims the prefix; ClusterName is empty if the cluster is not known any more.
	Cluster     uint16 `json:"cluster"`
	ClusterName string `json:"clusterName,omitempty"`
	Source      string `json:"source"`
	Owner       string `json:"owner,omitempty"` // the object of the cluster that claims it
	Revision    int64  `json:"revision,omitempty"`
	// Host is the node behind which the prefix is; the zero Addr if unknown.
	Host       netip.Addr `json:"host"`
	EncryptKey uint8      `json:"encryptKey"`
	Flags      []string   `json:"flags,omitempty"`
	Namespace  string     `json:"namespace,omitempty"`
	Pod        string     `json:"pod,omitempty"`
}

// IPDetail is the answer to what an address is.
type IPDetail struct {
	Meta
	Address netip.Addr `json:"address"`
	// IP is the claim in force for the longest prefix that contains the address.
	IP IP `json:"ip"`
	// Shadowed are the claims for the same prefix that are not in force, the next in line first.
	Shadowed []IP `json:"shadowed,omitempty"`
}

// Node is a machine of a cluster.
type Node struct {
	Name       string            `json:"name"`
	Cluster    string            `json:"cluster"`
	ClusterID  uint32            `json:"clusterID"`
	Local      bool              `json:"local"` // the node that answers
	Addresses  []NodeAddress     `json:"addresses"`
	PodCIDRs   []netip.Prefix    `json:"podCIDRs"`
	EncryptKey uint8             `json:"encryptKey"`
	Labels     map[string]string `json:"labels,omitempty"`
}

// NodeAddress is one address of a node.
type NodeAddress struct {
	Type string     `json:"type"`
	IP   netip.Addr `json:"ip"`
}

// Identity is a number with what it stands for.
type Identity struct {
	ID          uint32   `json:"id"`
	Name        string   `json:"name,omitempty"` // of a reserved identity
	Cluster     uint16   `json:"cluster"`        // 0 for reserved identities
	ClusterName string   `json:"clusterName,omitempty"`
	Labels      []string `json:"labels"`
	References  *int     `json:"references,omitempty"` // workloads of this node; nil for identities of others, which are not counted
}

// IdentityDetail is a single identity as an answer.
type IdentityDetail struct {
	Meta
	Identity
}

// Flow is one packet that the kernel was asked to report.
type Flow struct {
	Time        time.Time `json:"time"`
	Device      string    `json:"device"`
	Direction   string    `json:"direction"` // ingress or egress, as the device sees it
	Verdict     string    `json:"verdict"`
	Mode        string    `json:"mode"` // native or overlay
	Source      Peer      `json:"source"`
	Destination Peer      `json:"destination"`
	Protocol    string    `json:"protocol"`
	TCPFlags    string    `json:"tcpFlags,omitempty"`
	ICMP        string    `json:"icmp,omitempty"` // type/code
	Length      uint32    `json:"length"`         // of the frame, in bytes
}

// Peer is one side of a flow.
type Peer struct {
	IP   netip.Addr `json:"ip"`
	Port uint16     `json:"port,omitempty"`
	// Identity is what the kernel found.
	Identity    uint32   `json:"identity"`
	Name        string   `json:"name,omitempty"` // of a reserved identity
	Labels      []string `json:"labels,omitempty"`
	Cluster     uint16   `json:"cluster,omitempty"`
	ClusterName string   `json:"clusterName,omitempty"`
}

// FlowEvent is a line of a stream of flows: a flow, or, with kind FlowsLost, how many the reader was too slow for.
type FlowEvent struct {
	Meta
	*Flow
	Lost uint64 `json:"lost,omitempty"`
}

// VersionInfo says which build answers.
type VersionInfo struct {
	Meta
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"` // of the source
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// Error is the answer to a request that has no other.
type Error struct {
	Meta
	Code    int    `json:"code"` // the HTTP status
	Message string `json:"message"`
}
