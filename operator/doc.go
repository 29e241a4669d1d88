// SPDX-License-Identifier: Apache-2.0

// Package operator owns what is done once per cluster: it takes part in the election among its replicas and, while it
// leads, runs duties that write to the cluster's own etcd. It hands on nothing but keys, and every one of its writes is a
// transaction that fails once another replica leads. No packet and no identity waits for it.
package operator
