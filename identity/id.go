// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"fmt"
	"net/netip"
	"strconv"
)

// ID is a numeric security identity: 32 bits, of which the top byte is the scope (0 global, 1 local to a node, 2 remote
// node). Global identities carry the id of the cluster that allocated them in their upper bits, see [Layout].
type ID uint32

// The reserved identities, equal in every cluster.
const (
	Invalid       ID = 0
	Host          ID = 1
	World         ID = 2
	Unmanaged     ID = 3
	Health        ID = 4
	Init          ID = 5
	RemoteNode    ID = 6
	KubeAPIServer ID = 7
	Ingress       ID = 8
	WorldIPv4     ID = 9
	WorldIPv6     ID = 10
)

// minAllocated is the first identity that is not reserved.
const minAllocated ID = 256

// scopeGlobal bounds the identities that a cluster allocates: 24 bits.
const scopeGlobal ID = 1<<24 - 1

var reservedNames = map[ID]string{
	Host: "host", World: "world", Unmanaged: "unmanaged", Health: "health", Init: "init", RemoteNode: "remote-node",
	KubeAPIServer: "kube-apiserver", Ingress: "ingress", WorldIPv4: "world-ipv4", WorldIPv6: "world-ipv6",
	11: "aggregate-cluster", 12: "aggregate-cluster-mesh", 13: "aggregate-world", 14: "aggregate-remote-node",
}

// String is the name of a reserved identity, else the number in decimal.
func (id ID) String() string {
	if name, ok := reservedNames[id]; ok {
		return name
	}
	return strconv.FormatUint(uint64(id), 10)
}

// Reserved reports whether id is below the numbers that allocators hand out.
func (id ID) Reserved() bool { return id < minAllocated }

// ParseID reads what [ID.String] writes: a decimal number or the name of a reserved identity.
func ParseID(s string) (ID, error) {
	for id, name := range reservedNames {
		if s == name {
			return id, nil
		}
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return Invalid, fmt.Errorf("identity %q: want a number below 2^32 or the name of a reserved identity", s)
	}
	return ID(n), nil
}

// WorldOf is the identity of an address about which nothing is known. Nodes that use one family only know one world;
// dual-stack nodes tell the two families apart.
func WorldOf(addr netip.Addr, dualStack bool) ID {
	switch {
	case !dualStack:
		return World
	case addr.Unmap().Is4():
		return WorldIPv4
	default:
		return WorldIPv6
	}
}
