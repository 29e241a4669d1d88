// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"time"
)

// Explanation is all that an agent knows of one address, and why it stands as it does.
type Explanation struct {
	Meta
	Address netip.Addr `json:"address"`
	// Identity is what the address counts as; that of the world if nobody claims it.
	Identity Identity `json:"identity"`
	// LabelsKnown: the cluster has said what the identity stands for. Until then the number is used without.
	LabelsKnown bool   `json:"labelsKnown"`
	Why         string `json:"why"`
	// Claims are those for all prefixes that contain the address: the longest prefix first, and of each the winner first.
	Claims []Claim `json:"claims"`
	// Waiting are announcements for it that are not used, because no node of the cluster is known to be their host.
	Waiting []Claim `json:"waiting,omitempty"`
	// Refused are the last announcements for it, and for prefixes around it, that were not accepted, newest first.
	Refused []Refused `json:"refused,omitempty"`
	// Services are those whose frontends have the address: who connects to it gets a backend's in its place.
	Services []ExplainedService `json:"services,omitempty"`
	// Node is the machine behind which the address is, or which it belongs to; nil if that is not known.
	Node *ExplainedNode `json:"node,omitempty"`
	// Cluster is the state of the cluster that makes the winning claim; nil if there is none, or it is not followed.
	Cluster *Cluster `json:"cluster,omitempty"`
	Kernel  Kernel   `json:"kernel"`
	// Advice says what to do about all of it that is not as it should be, each with what that is; none if all is well.
	Advice []string `json:"advice,omitempty"`
}

// Refused is a Rejection and whose it is.
type Refused struct {
	Cluster string `json:"cluster"`
	Rejection
}

// Claim is what somebody says of a prefix, and where it says so.
type Claim struct {
	IP
	// CIDR tells a prefix that happens to hold one address from that address.
	CIDR bool `json:"cidr"`
	// Wins: the strongest claim for its prefix.
	Wins bool `json:"wins"`
	// Key is the key in the etcd of the cluster; File declares what does not come from an etcd.
	Key  string `json:"key,omitempty"`
	File string `json:"file,omitempty"`
	// Since is when the claim was first seen as it is; it may be older if Exactly is false. Zero if that is not known.
	Since   time.Time `json:"since,omitzero"`
	Exactly bool      `json:"exactly,omitempty"`
}

// ExplainedService is a frontend with the service that it is of, without its backends.
type ExplainedService struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	ServiceFrontend
}

// ExplainedNode is a node in few words.
type ExplainedNode struct {
	Name      string `json:"name"`
	Cluster   string `json:"cluster"`
	ClusterID uint32 `json:"clusterID"`
	// Via is the node's address by which the workload is reached: the end of the tunnel, if there is one.
	Via netip.Addr `json:"via"`
}

// Kernel is what the kernel of the node does with an address.
type Kernel struct {
	Pin   string       `json:"pin"`
	Entry *KernelEntry `json:"entry,omitempty"` // nil: none, or not to be read
	Error string       `json:"error,omitempty"` // why the map cannot be read
	// Equal: the map says what the agent wants it to. False without an agent.
	Equal bool `json:"equal"`
	// Kept: the entry is from before the agent's start, and its cluster has not been heard completely since. Until it is, the entry
	// stays as it is.
	Kept bool `json:"kept,omitempty"`
	// Wanted is what the map should say, if it does not; "nothing" if there should be no entry.
	Wanted     string       `json:"wanted,omitempty"`
	Route      *KernelRoute `json:"route,omitempty"`
	RouteError string       `json:"routeError,omitempty"`
}

// KernelEntry is what the programs find in the map.
type KernelEntry struct {
	Identity       uint32     `json:"identity"`
	TunnelEndpoint netip.Addr `json:"tunnelEndpoint"`
	EncryptKey     uint8      `json:"encryptKey"`
	Flags          []string   `json:"flags"`
}

// KernelRoute is where the kernel would send a packet to the address.
type KernelRoute struct {
	Type     string     `json:"type"` // unicast, local, blackhole…
	Device   string     `json:"device,omitempty"`
	Gateway  netip.Addr `json:"gateway"`
	Source   netip.Addr `json:"source"`
	Table    int        `json:"table,omitempty"`
	Protocol string     `json:"protocol,omitempty"` // who made the route: weft for ours
}

// Conflict is a prefix of which several clusters or sources say different things.
type Conflict struct {
	Prefix   netip.Prefix `json:"prefix"`
	Winner   IP           `json:"winner"`
	Shadowed []IP         `json:"shadowed"` // the next in line first
	Why      string       `json:"why"`
}
