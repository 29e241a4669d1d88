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
	const struct fast_head *head = fast_head(family);
	struct near_end *near = near_end_of(d1, d2);
	__u64 epoch;

	if (!head || !near)
		return 0;
	epoch = READ_ONCE(head->epoch);
	if (!epoch)
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

/* What the CPU is sure of about a near end; NULL if of nothing. */
static __always_inline const struct near_end *
known_near(const struct fast_head *head, __u32 family, __u64 d1, __u64 d2)
{
	const struct near_end *near = near_end_of(d1, d2);
	__u64 epoch = READ_ONCE(head->epoch);

	if (likely(near && epoch && near->state == NEAR_KNOWN &&
		   remembers(near, epoch, family, d1, d2)))
		return near;
	return NULL;
}

/* The identity of the near end, which a CPU remembers while weft_fast is right. */
static __always_inline __u32 near_identity(__u32 how, __u64 d1, __u64 d2)
{
	__u32 family = how & 0xff;
	const struct fast_head *head = fast_head(family);
	const struct near_end *known;
	__u32 identity;

	if (!(how & FIND_FAST) || !head)
		return weft_find_identity(how, d1, d2);
	known = known_near(head, family, d1, d2);
	if (known)
		return known->identity;
	identity = find_identity(how, d1, d2);
	weft_learn_near(family, d1, d2, identity);
	return identity;
}
