// SPDX-License-Identifier: Apache-2.0

// Package mesh owns the connections to other clusters: a directory of config files becomes a set of remotes, and each
// remote carries what its cluster publishes, checked, into the tables of nodes, services, addresses and identities.
//
// What a reader of those tables can rely on:
//
//   - Losing a connection, replacing a config and stopping the agent delete nothing. Objects that are gone when the
//     cluster has been listed again are deleted then.
//   - Removing the config of a cluster deletes exactly what that cluster claimed: nodes, services, addresses, identities,
//     in this order.
//   - A value that breaks a rule is refused, counted and shown; the last good value of its key stays in use for
//     [Config.KeepInvalid] and is then deleted, unless the key has got a good value or has been deleted before.
//   - A cluster touches nothing but its own claims, under the one id that it holds.
package mesh
