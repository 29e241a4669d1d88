// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

#pragma once

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "structs.h"

/* Prefix to identity. Programs only read it. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__uint(max_entries, 512000);
	__type(key, struct ipcache_key);
	__type(value, struct ipcache_value);
} ipcache SEC(".maps");

/* The tables of IPv4 and of IPv6 hosts in other networks (hosts.h), each in an array
 * of the size that it happens to need. No table: ipcache is asked. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
		__uint(max_entries, 1);
		__uint(key_size, sizeof(__u32));
		__uint(value_size, sizeof(struct hosts_line));
	});
} weft_hosts SEC(".maps");

/* Where the search for an IPv4 host, and for an IPv6 host, begins. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct fast_head);
} weft_fast SEC(".maps");

/* The networks that are full of hosts (networks.h): words, in tables of one size. Of
 * such, the kernel makes a few instructions of a lookup; where sizes may
 * differ, it makes a call. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, NETWORKS_CHUNKS);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_ARRAY);
		__uint(map_flags, BPF_F_MMAPABLE);
		__uint(max_entries, NETWORKS_CHUNK_WORDS);
		__uint(key_size, sizeof(__u32));
		__uint(value_size, sizeof(__u64));
	});
} weft_networks SEC(".maps");

/* The ends of packets that are not the peer, see near.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NEAR_ENDS);
	__type(key, __u32);
	__type(value, struct near_end);
} weft_near SEC(".maps");

/* Without preallocation, which would take 1 MiB a CPU for a map that is
 * mostly empty. Once full, it keeps counting the keys that it has; packets
 * with a new key are counted in weft_missed. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, COUNTERS_MAX_ENTRIES);
	__type(key, struct counter_key);
	__type(value, struct counter_value);
} weft_counters SEC(".maps");

/* Counters in front of weft_counters, one line of memory away where those are
 * three: a key has one of the two places of its line if it came in time, on each
 * CPU by itself, and never leaves it. What a key was counted is the sum of both
 * maps; whoever reads need not stop anybody. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FRONT_LINES);
	__type(key, __u32);
	__type(value, struct front_line);
} weft_front SEC(".maps");

/* The sum of weft_front, weft_counters and weft_missed.counts is every packet
 * seen. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct missed);
} weft_missed SEC(".maps");

/* Records are struct event. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, EVENTS_BYTES);
} weft_events SEC(".maps");

/* The addresses of this node's own pods at the devices that lead to them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__uint(max_entries, PODS_MAX_ENTRIES);
	__type(key, struct pod_key);
	__type(value, __u32); /* 1 */
} weft_pods SEC(".maps");

/* Settings are read for each packet, not patched into the programs, so that a
 * program's tag tells its code alone. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_RDONLY_PROG);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct config);
} weft_config SEC(".maps");
