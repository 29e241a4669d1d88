// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"cmp"
	"net/netip"
	"strings"

	"github.com/weftmesh/weft/identity"
)

// Owner is who makes a claim. Two claims of one owner for one prefix are one claim, updated; a deletion removes the
// claim of its own owner only.
type Owner struct {
	Cluster identity.ClusterID
	Source  Source
	// Object names the object of the cluster that makes the claim: "ip" for an announced address, "node/<name>".
	Object string
}

// Flags qualify an entry, with the kernel's bit values.
type Flags uint8

const (
	FlagSkipTunnel    Flags = 1 << 0 // never encapsulate towards the entry
	FlagRemoteCluster Flags = 1 << 3 // the entry is a node of another cluster
)

// Entry is what is claimed of a prefix.
type Entry struct {
	Identity identity.ID
	// Host is the address of the node behind which the prefix lives; the zero Addr if it is not known.
	Host netip.Addr
	// EncryptKey is 0 for none, an IPsec SPI, or 255 for WireGuard.
	EncryptKey uint8
	Flags      Flags
	// Namespace, Pod and ServiceAccount name the workload, if it is one of Kubernetes; NamedPorts are ports that it names.
	Namespace, Pod, ServiceAccount string
	NamedPorts                     NamedPorts
}

// Claim is one owner's statement about one prefix.
type Claim struct {
	// Prefix is masked. A single address is a prefix of full length.
	Prefix netip.Prefix
	// CIDR tells, at full length, a prefix that happens to hold one address from that address as a host: the host wins.
	CIDR  bool
	Owner Owner
	// Revision is the etcd ModRevision of the statement, 0 for what did not come from an etcd.
	Revision int64
	Entry    Entry
}

// Compare orders the claims of one prefix, the winner first: a host before an equal CIDR, then the stronger source, then
// the lowest cluster id, then, within one cluster, the later statement, then the object's name. No two claims of
// different owners are equal, so the order does not depend on who came first.
func (c Claim) Compare(d Claim) int {
	if c.CIDR != d.CIDR {
		if d.CIDR {
			return -1
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(c.Owner.Source, d.Owner.Source),
		cmp.Compare(c.Owner.Cluster, d.Owner.Cluster),
		cmp.Compare(d.Revision, c.Revision),
		strings.Compare(c.Owner.Object, d.Owner.Object),
	)
}
