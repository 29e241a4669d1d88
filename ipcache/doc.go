// SPDX-License-Identifier: Apache-2.0

// Package ipcache owns the table of who is behind which address: for every prefix the claims that clusters and this node
// make about it, the one that wins, and the order in which winners changed, from which the datapath reads. It is pure: no
// goroutines, no I/O, no clock.
//
// The winner for a prefix is a function of its claims alone, whatever order they came in: see [Claim.Compare].
package ipcache
