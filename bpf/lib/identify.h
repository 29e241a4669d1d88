// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* What a hook does with a packet: find the identities of both ends,
 * count it, and now and then tell user space about it. */
#pragma once

#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "lookup.h"
#include "maps.h"
#include "near.h"
#include "parse.h"
#include "structs.h"

static __always_inline __u32 world_of(const struct config *config, __u8 family)
{
	if (!config->dual_stack)
		return IDENTITY_WORLD;
	return family == FAMILY_IPV4 ? IDENTITY_WORLD_IPV4 : IDENTITY_WORLD_IPV6;
}

/* What a hook has found out about a packet. */
struct finding {
	__u32 src_identity, dst_identity;
	enum verdict verdict;
	enum mode mode;
};

/* Of the first argument of the functions for both ends, beside the family. */
#define ENDS_SRC_NEAR 0x100 /* else it is the destination */
#define ENDS_FAST FIND_FAST

/* The identities of both ends of a packet, the source's in the lower half, if the
 * near one is remembered and the far one in a network full of hosts; else 0.
 * That is the way of nearly all packets, and so in one piece, without a call. */
static __always_inline __u64
recognize_ends(__u32 ends, __u64 s1, __u64 s2, __u64 d1, __u64 d2)
{
	bool src_near = ends & ENDS_SRC_NEAR;
	const struct near_end *known;
	const struct fast_head *head;
	__u32 family = ends & 0xff;
	__u64 near, far;

	head = fast_head(family);
	if (unlikely(!head || !(ends & ENDS_FAST)))
		return 0;
	far = find_in_network(head, family, src_near ? d1 : s1,
			      src_near ? d2 : s2);
	if (unlikely(!far))
		return 0;
	known = known_near(head, family, src_near ? s1 : d1, src_near ? s2 : d2);
	if (unlikely(!known))
		return 0;
	near = known->identity;
	return src_near ? near | far << 32 : far | near << 32;
}

/* The same where the programs have no stack to spare.
 *
 * Not static: verified once, by itself. What such functions decide are no ways
 * through the programs, of which the verifier of 6.1 would follow each to the
 * end. */
__noinline __u64
weft_recognize_ends(__u32 ends, __u64 s1, __u64 s2, __u64 d1, __u64 d2)
{
	return recognize_ends(ends, s1, s2, d1, d2);
}

/* The identities of both ends of any packet, as above. */
__noinline __u64
weft_identify_ends(__u32 ends, __u64 s1, __u64 s2, __u64 d1, __u64 d2)
{
	bool src_near = ends & ENDS_SRC_NEAR;
	__u32 how = ends & ~ENDS_SRC_NEAR;
	__u64 near, far;

	near = near_identity(how, src_near ? s1 : d1, src_near ? s2 : d2);
	far = find_identity(how, src_near ? d1 : s1, src_near ? d2 : s2);
	return src_near ? near | far << 32 : far | near << 32;
}

/* 1 if there is no identity, else 0. Compilers are kept from a branch: it would be a
 * way of its own through the program, and CPUs guess it wrong. */
static __always_inline __u32 is_none(__u64 identity)
{
	identity = (identity - 1) >> 63;
	asm volatile("" : "+r"(identity));
	return identity;
}

/* Looks both ends up; the verdict is that of the peer, and an end without entry is
 * the world's. The node's own end is the other one, but at pods' devices. */
static __always_inline void
identify_ends(const struct config *config, const enum direction direction,
	      __u8 family, const struct addresses *addresses,
	      struct finding *found)
{
	bool src_near = (direction == DIRECTION_EGRESS) !=
			(found->mode == MODE_POD);
	__u32 ends = family | (src_near ? ENDS_SRC_NEAR : 0);
	__u32 world = world_of(config, family);
	__u64 both;
	__u32 src, dst;

	if (likely(config->fast_layout == FAST_LAYOUT))
		ends |= ENDS_FAST;
	both = found->mode == MODE_NATIVE ?
		recognize_ends(ends, addresses->src[0], addresses->src[1],
			       addresses->dst[0], addresses->dst[1]) :
		weft_recognize_ends(ends, addresses->src[0],
				    addresses->src[1], addresses->dst[0],
				    addresses->dst[1]);
	if (unlikely(!both))
		both = weft_identify_ends(ends, addresses->src[0],
					  addresses->src[1], addresses->dst[0],
					  addresses->dst[1]);
	src = is_none((__u32)both);
	dst = is_none(both >> 32);
	found->verdict = VERDICT_IDENTIFIED +
			 (direction == DIRECTION_INGRESS ? src : dst);
	found->src_identity = (__u32)both + src * world;
	found->dst_identity = (both >> 32) + dst * world;
}

_Static_assert(VERDICT_IDENTIFIED == VERDICT_WORLD - 1, "verdicts");

/* Direction, verdict and mode in one number, as struct counter_key has them. */
#define SUMMARY_VERDICT_SHIFT 8
#define SUMMARY_MODE_SHIFT 16

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

/* Counts in a place of weft_front, if it is that of the key, or can be: its words
 * are the first two of a struct front_counter. */
static __always_inline bool
count_at(struct front_counter *at, __u64 identities, __u64 rest, __u64 bytes)
{
	__u64 *words = (__u64 *)at;

	if (!words[1]) {
		words[0] = identities;
		words[1] = rest;
	} else if (words[0] != identities || words[1] != rest) {
		return false;
	}
	add(&at->value, bytes);
	return true;
}

/* Counts in weft_front; false if there is no place for the key. */
static __always_inline bool
count_in_front(__u64 identities, __u32 summary, __u64 bytes)
{
	__u64 hash = (identities ^ summary * HOSTS_MULTIPLIER) * HOSTS_MULTIPLIER;
	__u64 rest = summary | (hash >> 32 << 32);
	struct front_counter *first, *second;
	__u32 index = hash >> 32 >> FRONT_SHIFT;

	first = bpf_map_lookup_elem(&weft_front, &index);
	if (!first)
		return false;
	/* Kept from the compiler, which else makes one piece of code for both, and
	 * adds to a pointer what verifiers do not want added without CAP_PERFMON. */
	second = first + 1;
	asm volatile("" : "+r"(second));
	return count_at(first, identities, rest, bytes) ||
	       count_at(second, identities, rest, bytes);
}

/* Counts a packet. Not static: verified once, by itself, and its stack is not that
 * of the programs. It returns 0, since such functions must return something. */
__noinline int weft_count(__u64 identities, __u32 summary, __u32 bytes)
{
	const __u8 direction = summary & 1;
	struct {
		__u64 identities;
		__u32 rest;
	} key; /* a struct counter_key of which pad is 0 */
	struct counter_value first = { .packets = 1, .bytes = bytes };
	struct counter_value *value;
	struct missed *lost;

	if (count_in_front(identities, summary, bytes))
		return 0;
	write_head(&key, identities);
	key.rest = summary;
	value = bpf_map_lookup_elem(&weft_counters, &key);
	if (value) {
		add(value, bytes);
		return 0;
	}
	/* Another CPU may have added the key meanwhile; this writes the value
	 * of this CPU alone, which nothing has counted into yet. */
	if (!bpf_map_update_elem(&weft_counters, &key, &first, BPF_ANY))
		return 0;
	lost = missed();
	if (!lost)
		return 0;
	if (direction == DIRECTION_INGRESS)
		add(&lost->counts[DIRECTION_INGRESS], bytes);
	else
		add(&lost->counts[DIRECTION_EGRESS], bytes);
	return 0;
}

/* At random, not every n-th: flows that take turns must all be seen. */
static __always_inline bool sampled(__u32 n)
{
	return n && (__u64)bpf_get_prandom_u32() * n >> 32 == 0;
}

/* Tells user space of a packet whose identities, the source's in the lower half,
 * and summary are known: direction, verdict and mode.
 *
 * It is not static, and so verified once, by itself: the verifier of 6.1, where
 * it has to think of speculation (without CAP_PERFMON), prunes so little that
 * what comes before would be walked through once for each way through this. For
 * the same reason it parses the packet anew, which costs the few that are sampled
 * a little and spares the others. It returns 0, since such functions must
 * return something. */
__noinline int
weft_emit(struct __sk_buff *skb, __u64 identities, __u32 summary)
{
	const __u8 direction = summary & 1;
	struct addresses addresses = {};
	struct packet packet = {};
	union scratch scratch;
	struct event *event;
	struct missed *lost;

	event = bpf_ringbuf_reserve(&weft_events, sizeof(*event), 0);
	if (!event) {
		lost = missed();
		if (!lost)
			return 0;
		if (direction == DIRECTION_INGRESS)
			add(&lost->events[DIRECTION_INGRESS], skb->len);
		else
			add(&lost->events[DIRECTION_EGRESS], skb->len);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	parse_network(skb, &packet, &addresses, &scratch);
	event->ktime_ns = bpf_ktime_get_ns();
	event->ifindex = skb->ifindex;
	event->length = skb->len;
	event->src_identity = identities;
	event->dst_identity = identities >> 32;
	event->eth_type = packet.eth_type;
	event->family = packet.family;
	event->protocol = packet.protocol;
	event->direction = direction;
	event->verdict = summary >> SUMMARY_VERDICT_SHIFT;
	event->mode = summary >> SUMMARY_MODE_SHIFT;
	event->saddr.d1 = addresses.src[0];
	event->saddr.d2 = addresses.src[1];
	event->daddr.d1 = addresses.dst[0];
	event->daddr.d2 = addresses.dst[1];
	describe_transport(skb, packet.transport, packet.end, event);
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/* Counts the packet, and now and then tells user space of it. */
static __always_inline void
report(struct __sk_buff *skb, const struct config *config,
       const enum direction direction, const struct finding *found)
{
	__u64 identities = found->src_identity | (__u64)found->dst_identity << 32;
	__u32 summary = direction | found->verdict << SUMMARY_VERDICT_SHIFT |
			found->mode << SUMMARY_MODE_SHIFT;

	weft_count(identities, summary, skb->len);
	if (unlikely(sampled(config->flow_sample)))
		weft_emit(skb, identities, summary);
}

/* Tells the kernel and other programs whose the packet is, as far as they asked
 * for it. Bits outside the mask are never written. */
static __always_inline void
set_mark(struct __sk_buff *skb, const struct config *config, __u32 identity)
{
	__u32 mask, mark;

	switch (config->mark) {
	case MARK_SHIFTED:
		mask = config->mark_mask;
		mark = identity << (config->mark_shift & 31);
		break;
	case MARK_CILIUM:
		if (identity >> 16 & CILIUM_MARK_TAKEN)
			return;
		mask = CILIUM_MARK_MASK;
		mark = identity << 16 | CILIUM_MARK_IDENTITY |
		       (identity >> 16 & 0xff);
		break;
	default:
		return;
	}
	skb->mark = (skb->mark & ~mask) | (mark & mask);
}

/* Leaves the packet's bytes as they are, and its fate to the next program. */
static __always_inline int
identify(struct __sk_buff *skb, const enum direction direction)
{
	struct addresses addresses = {};
	struct finding found = {};
	struct packet packet = {};
	const struct config *config;
	union scratch scratch;

	scratch.words[0] = 0; /* the key */
	config = bpf_map_lookup_elem(&weft_config, &scratch);
	if (!config)
		return TC_ACT_UNSPEC;
	found.verdict = parse_network(skb, &packet, &addresses, &scratch);
	if (likely(found.verdict == VERDICT_NONE)) {
		identify_ends(config, direction, packet.family, &addresses,
			      &found);
		if (direction == DIRECTION_INGRESS)
			set_mark(skb, config, found.src_identity);
	}
	report(skb, config, direction, &found);
	return TC_ACT_UNSPEC;
}
