// SPDX-License-Identifier: Apache-2.0

// Package bpf owns the programs that run in the kernel and the layout of the maps that they share with user space; it
// hands on their specs, ready to load, and the exact Go mirrors of every key, value and record.
//
// The C sources are in from_netdev.c, to_netdev.c and lib; their compiled form is committed, so that building weft needs
// no clang. `go generate ./bpf` compiles them anew. All types here are values, all functions safe for concurrent use.
package bpf
