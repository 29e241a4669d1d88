// SPDX-License-Identifier: Apache-2.0

// Package service owns the services that clusters share: the value under which a cluster publishes one, the rules for
// accepting it, and the table of all that were accepted.
package service
