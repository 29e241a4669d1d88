// SPDX-License-Identifier: Apache-2.0

// Package identity owns the values that name a workload across clusters: numeric identities, the labels that they stand
// for, the clusters that own them, and what a cluster says of itself. It hands on values only: nothing here does I/O.
//
// Numbers, ranges, label strings and keys are those of Cilium Cluster Mesh, so that both can share one etcd.
package identity
