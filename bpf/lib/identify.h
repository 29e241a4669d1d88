// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* What a hook does with a packet: find the identity of its peer, count it,
 * and now and then tell user space about it. */
#pragma once

#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "lookup.h"
#include "maps.h"
#include "parse.h"
#include "structs.h"

static __always_inline __u32 world_of(const struct config *config, __u8 family)
{
	if (!config->dual_stack)
		return IDENTITY_WORLD;
	return family == FAMILY_IPV4 ? IDENTITY_WORLD_IPV4 : IDENTITY_WORLD_IPV6;
}

/* Looks up the peer, of which the address is filled in, and sets its identity. */
static __always_inline enum verdict
identify_peer(const struct config *config, __u8 family,
	      struct ipcache_key *peer, __u32 *identity)
{
	*identity = find_identity(family, &peer->ip6);
	if (*identity)
		return VERDICT_IDENTIFIED;
	*identity = world_of(config, family);
	return VERDICT_WORLD;
}

/* The per-CPU values are not shared: tc programs run with softirqs off. */
static __always_inline void add(struct counter_value *value, __u64 bytes)
{
	value->packets++;
	value->bytes += bytes;
}

static __always_inline struct missed *missed(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&weft_missed, &zero);
}

static __always_inline void
count(__u32 identity, const enum direction direction, enum verdict verdict,
      __u64 bytes)
{
	struct counter_key key __attribute__((aligned(8)));
	struct counter_value first = { .packets = 1, .bytes = bytes };
	struct counter_value *value;
	struct missed *lost;

	/* identity, direction and verdict; pad is 0 */
	write_head(&key, identity | (__u64)direction << 32 |
			 (__u64)verdict << 40);
	value = bpf_map_lookup_elem(&weft_counters, &key);
	if (value) {
		add(value, bytes);
		return;
	}
	/* Another CPU may have added the key meanwhile; this writes the value
	 * of this CPU alone, which nothing has counted into yet. */
	if (!bpf_map_update_elem(&weft_counters, &key, &first, BPF_ANY))
		return;
	lost = missed();
	if (lost)
		add(&lost->counts[direction], bytes);
}

/* At random, not every n-th: flows that take turns must all be seen. */
static __always_inline bool sampled(__u32 n)
{
	return n && (__u64)bpf_get_prandom_u32() * n >> 32 == 0;
}

static __always_inline void
emit(struct __sk_buff *skb, const enum direction direction,
     const struct packet *packet, __u32 identity, enum verdict verdict)
{
	struct event *event;
	struct missed *lost;

	event = bpf_ringbuf_reserve(&weft_events, sizeof(*event), 0);
	if (!event) {
		lost = missed();
		if (lost)
			add(&lost->events[direction], skb->len);
		return;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->ktime_ns = bpf_ktime_get_ns();
	event->ifindex = skb->ifindex;
	event->length = skb->len;
	event->identity = identity;
	event->eth_type = packet->eth_type;
	event->family = packet->family;
	event->protocol = packet->protocol;
	event->direction = direction;
	event->verdict = verdict;
	describe_network(skb, packet->network, event);
	describe_transport(skb, packet->transport, packet->end, event);
	bpf_ringbuf_submit(event, 0);
}

/* Leaves the packet as it is, and its fate to the next program. */
static __always_inline int
identify(struct __sk_buff *skb, const enum direction direction)
{
	struct ipcache_key peer __attribute__((aligned(8))) = {};
	struct packet packet = {};
	const struct config *config;
	enum verdict verdict;
	__u32 identity = IDENTITY_NONE;
	__u32 zero = 0;

	config = bpf_map_lookup_elem(&weft_config, &zero);
	if (!config)
		return TC_ACT_UNSPEC;
	verdict = parse_network(skb, direction, &packet, &peer.ip6);
	if (verdict == VERDICT_NONE)
		verdict = identify_peer(config, packet.family, &peer, &identity);
	count(identity, direction, verdict, skb->len);
	if (sampled(config->flow_sample))
		emit(skb, direction, &packet, identity, verdict);
	return TC_ACT_UNSPEC;
}
