// SPDX-License-Identifier: Apache-2.0

// Package datapath owns every kernel object of a node - pinned maps, programs, their links, routes - and makes the kernel
// equal the tables of addresses and nodes; what the programs see it hands on as flows and counters.
//
// The kernel is a cache that outlives the agent. Maps, programs and links are pinned below <bpffs>/weft, a restarted
// agent takes over what it finds there and changes nothing that is right, and what it finds but nobody claims it removes
// only once the source that would claim it has been heard completely.
//
//	<bpffs>/weft/                    mode 0700, locked by the running agent
//	<bpffs>/weft/ipcache             prefix → identity, see bpf.IPCacheKey
//	<bpffs>/weft/counters            packets and bytes by identity and verdict
//	<bpffs>/weft/missed              what counters and events had no room for
//	<bpffs>/weft/events              ring buffer of sampled packets
//	<bpffs>/weft/config              what the programs are told at run time
//	<bpffs>/weft/programs/<program>  the programs that the links run
//	<bpffs>/weft/links/<device>-<program>
//
// Routes carry protocol 119 and stand in the main table; routes of other protocols are never touched.
package datapath
