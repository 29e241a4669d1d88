// SPDX-License-Identifier: Apache-2.0

// Package api owns what the agent shows of itself: the JSON objects, the HTTP server that offers them on a unix socket, and
// the client with which the command line asks for them.
//
// Every answer is an object with apiVersion and kind. A list has its elements in items. An error is an object of kind Error.
package api
