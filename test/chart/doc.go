// SPDX-License-Identifier: Apache-2.0

// Package chart tests the Helm chart with Helm's own engine. It is a Go module of its own, so that nothing that ships
// depends on Helm.
package chart
