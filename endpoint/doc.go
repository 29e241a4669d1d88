// SPDX-License-Identifier: Apache-2.0

// Package endpoint owns the workloads of this node: where they are declared, which identity each has, and what of them is
// handed on - claims to the table of addresses, announcements to the cluster's etcd.
package endpoint
