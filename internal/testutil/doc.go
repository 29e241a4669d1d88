// SPDX-License-Identifier: Apache-2.0

// Package testutil owns what tests need of the machine: a network namespace, a BPF file system, an etcd, and patience
// with a deadline. Everything that it makes belongs to one test and is gone when that test ends, also when it fails.
package testutil
