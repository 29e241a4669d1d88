// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* The near end of a packet, which is not the peer: nearly always one of some
 * hundred addresses of the node and its pods. Each CPU remembers their
 * identities, those that have no entry included, for an epoch: the time between
 * two writes to ipcache or the tables in front of it, in which every answer is
 * the same. While they are written there is no epoch, and where the writer is
 * killed there is none until the next one has made new tables.
 *
 * An answer is good if the epoch was read before it was asked for and the same was
 * read after. BPF of these kernels has no barrier that would keep a CPU to this
 * order, so each step is that of another packet: one sees the address, a later
 * one asks, and a third one, if the epoch is still the same, believes. Between two
 * packets the kernel takes and releases locks enough. */
#pragma once

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "hosts.h"
#include "lookup.h"
#include "maps.h"
#include "structs.h"

/* 0: there is none, and nothing is remembered. */
static __always_inline __u64 current_epoch(__u32 family)
{
	__u32 which = family == FAMILY_IPV4 ? 0 : 1;
	const struct hosts_head *head;
	void *table;

	table = bpf_map_lookup_elem(&weft_hosts, &which);
	if (!table)
		return 0;
	head = (const struct hosts_head *)hosts_line(table, 0);
	if (!head || head->layout != HOSTS_LAYOUT)
		return 0;
	return READ_ONCE(head->epoch);
}

static __always_inline struct near_end *near_end_of(__u64 d1, __u64 d2)
{
	__u32 index = (d1 ^ d2 * HOSTS_MULTIPLIER) * HOSTS_MULTIPLIER >> NEAR_SHIFT;

	return bpf_map_lookup_elem(&weft_near, &index);
}

static __always_inline bool
remembers(const struct near_end *near, __u64 epoch, __u32 family, __u64 d1, __u64 d2)
{
	return near->d1 == d1 && near->d2 == d2 && near->epoch == epoch &&
	       near->family == family;
}

/* Goes one step towards remembering an address, whose identity this packet has
 * asked for. Not static: verified once, by itself. It returns 0, since such
 * functions must return something. */
__noinline int weft_learn_near(__u32 family, __u64 d1, __u64 d2, __u32 identity)
{
	__u64 epoch = current_epoch(family);
	struct near_end *near = near_end_of(d1, d2);

	if (!near || !epoch)
		return 0;
	if (!remembers(near, epoch, family, d1, d2)) {
		near->d1 = d1;
		near->d2 = d2;
		near->epoch = epoch;
		near->family = family;
		near->state = NEAR_SEEN;
	} else if (near->state == NEAR_SEEN) {
		near->identity = identity;
		near->state = NEAR_ASKED;
	} else {
		near->state = NEAR_KNOWN;
	}
	return 0;
}

/* As weft_find_identity, of a near end. */
static __always_inline __u32 near_identity(__u32 family, __u64 d1, __u64 d2)
{
	__u64 epoch = current_epoch(family);
	const struct near_end *near = near_end_of(d1, d2);
	__u32 identity;

	if (near && epoch && near->state == NEAR_KNOWN &&
	    remembers(near, epoch, family, d1, d2))
		return near->identity;
	identity = weft_find_identity(family, d1, d2);
	weft_learn_near(family, d1, d2, identity);
	return identity;
}
