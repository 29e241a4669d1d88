// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Keys that every cluster's etcd holds.
const (
	statePrefix = "cilium/state/"
	cachePrefix = "cilium/cache/"

	// StatePrefix is where a cluster keeps its identities.
	StatePrefix = statePrefix + "identities/v1"
	// HeartbeatKey is rewritten by each cluster once a minute.
	HeartbeatKey = "cilium/.heartbeat"
	// ClusterConfigPrefix, joined with the name of a cluster, holds its [ClusterConfig].
	ClusterConfigPrefix = "cilium/cluster-config"
	// SyncedPrefix, joined with the name of a cluster and the prefix of a resource, holds that prefix's canary.
	SyncedPrefix = "cilium/synced"
)

// ErrEmpty indicates a value that says nothing and is to be passed over without complaint.
var ErrEmpty = errors.New("empty value")

// CachePrefix maps a prefix of the state tree to its copy in the cache tree.
func CachePrefix(state string) string {
	return cachePrefix + strings.TrimPrefix(state, statePrefix)
}

// MasterKey is the key that binds id to its labels.
func MasterKey(id ID) string { return StatePrefix + "/id/" + strconv.FormatUint(uint64(id), 10) }

// SlaveKey is the key by which the node with address nodeIP says that it uses the identity of labels. As in every key,
// runs of slashes in it are one.
func SlaveKey(labels Labels, nodeIP netip.Addr) string {
	return SlavePrefix(labels.String()) + nodeIP.String()
}

// SlavePrefix is what the keys begin with by which nodes say that they use the identity of labels, in their canonical
// form. Such a key has no slash after it.
func SlavePrefix(labels string) string { return join(StatePrefix + "/value/" + labels + "/") }

// LockKey is the path of the lock under which labels, in their canonical form, are given an identity.
func LockKey(labels string) string { return join(StatePrefix + "/locks/" + labels) }

func join(key string) string {
	for strings.Contains(key, "//") {
		key = strings.ReplaceAll(key, "//", "/")
	}
	return key
}

// ParseKey reads the last element of a master key.
func ParseKey(key string) (ID, error) {
	n, err := strconv.ParseUint(key, 10, 32)
	if err != nil {
		return Invalid, fmt.Errorf("identity key %q is not a decimal number", key)
	}
	return ID(n), nil
}

// ParseEntry decodes what cluster name (with id cluster) published under a master key, and checks that it may: the
// identity must lie in the cluster's own range and carry the cluster's own name. The error is [ErrEmpty] for an empty value.
func ParseEntry(l Layout, cluster ClusterID, name, key string, value []byte) (ID, Labels, error) {
	id, err := ParseKey(key)
	if err != nil {
		return Invalid, nil, err
	}
	if len(value) == 0 {
		return Invalid, nil, ErrEmpty
	}
	if !l.Contains(cluster, id) {
		lo, hi := l.Range(cluster)
		return Invalid, nil, fmt.Errorf("identity %d is outside the cluster's range %d to %d", uint32(id), uint32(lo), uint32(hi))
	}
	labels := ParseLabels(string(value))
	got, ok := labels.Get(SourceK8s, LabelCluster)
	switch {
	case !ok:
		return Invalid, nil, fmt.Errorf("label %s:%s is missing", SourceK8s, LabelCluster)
	case got != name:
		return Invalid, nil, fmt.Errorf("unexpected cluster name: got %q, expected %q", got, name)
	}
	return id, labels, nil
}
