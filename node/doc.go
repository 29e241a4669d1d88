// SPDX-License-Identifier: Apache-2.0

// Package node owns what is known of the machines of every cluster: the value that each publishes of itself, and the
// table of all of them, from which mesh's writers and the datapath's reader work without knowing each other.
package node
