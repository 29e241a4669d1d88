// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* The overlay: VXLAN whose VNI is the identity of the source. A packet goes to
 * the node that ipcache has for its destination, and is taken from the node that
 * ipcache has for its source, under the identity that ipcache has. */
#pragma once

#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "identify.h"
#include "lookup.h"
#include "maps.h"
#include "parse.h"
#include "structs.h"

/* struct bpf_tunnel_key is written and read in whole words, for the sake of
 * verifiers that refuse to have part of a stack word written over: the first is
 * tunnel_id, and remote_ipv4 in host order or the first 4 bytes of remote_ipv6;
 * the second the next 8 of them; the third the last 4, tos and ttl. What stands
 * behind tunnel_label, 5.10 does not know yet. */
#define TUNNEL_BYTES 28
_Static_assert(offsetof(struct bpf_tunnel_key, remote_ipv4) == 4, "remote");
_Static_assert(offsetof(struct bpf_tunnel_key, tunnel_ttl) == 21, "ttl");
_Static_assert(offsetof(struct bpf_tunnel_key, tunnel_label) == 24, "label");

/* The entry of the longest prefix: the fast path has identities alone. */
static __always_inline const struct ipcache_value *
find_entry(__u8 family, const __u64 *addr, union scratch *key)
{
	__u32 bits = family == FAMILY_IPV4 ? 32 : 128;

	key->words[0] = IPCACHE_STATIC_BITS + bits | (__u64)family << 56;
	key->words[1] = addr[0];
	key->words[2] = addr[1];
	return bpf_map_lookup_elem(&ipcache, key);
}

/* What the VNI says of an identity: those that mean something to one node alone
 * go as what they are to others. */
static __always_inline __u32 wire_identity(__u32 identity)
{
	if (identity == IDENTITY_HOST)
		return IDENTITY_REMOTE_NODE;
	if (identity == IDENTITY_WORLD_IPV4 ||
	    identity == IDENTITY_WORLD_IPV6 || identity >> 24)
		return IDENTITY_WORLD;
	return identity;
}

/* Where an entry's addresses live has the family of the underlay. */
static __always_inline bool
has_endpoint(const struct config *config, const struct ipcache_value *entry)
{
	return entry->flag_has_tunnel_ep && !entry->flag_skip_tunnel &&
	       entry->flag_ipv6_tunnel_ep == config->underlay6;
}

/* Addresses the packet to a node. */
static __always_inline bool
set_tunnel(struct __sk_buff *skb, const union v6addr *endpoint, bool v6,
	   __u32 identity, union scratch *tunnel)
{
	__u64 *words = tunnel->words;

	words[2] = (__u64)OVERLAY_TTL << 40;
	words[3] = 0;
	if (v6) {
		words[0] = identity | (__u64)endpoint->p1 << 32;
		words[1] = endpoint->p2 | (__u64)endpoint->p3 << 32;
		words[2] |= endpoint->p4;
	} else {
		words[0] = identity | (__u64)bpf_ntohl(endpoint->p1) << 32;
		words[1] = 0;
	}
	return !bpf_skb_set_tunnel_key(skb, (struct bpf_tunnel_key *)tunnel,
				       TUNNEL_BYTES,
				       v6 ? BPF_F_TUNINFO_IPV6 :
					    BPF_F_ZERO_CSUM_TX);
}

/* Sends the packet to the node behind which its destination is. */
static __always_inline enum verdict
address_tunnel(struct __sk_buff *skb, const struct config *config, __u8 family,
	       const __u64 *dst, __u32 src_identity, union scratch *scratch)
{
	const struct ipcache_value *entry;

	entry = find_entry(family, dst, scratch);
	if (!entry || !has_endpoint(config, entry) ||
	    !set_tunnel(skb, &entry->tunnel_endpoint.ip6, config->underlay6,
			wire_identity(src_identity), scratch))
		return VERDICT_NO_ENDPOINT;
	return VERDICT_IDENTIFIED;
}

/* Whether the packet came from the node behind which its source is; an address
 * that is behind no node is a node's own. */
static __always_inline bool
came_from(const struct config *config, const __u64 *tunnel, __u8 family,
	  const __u64 *src, const struct ipcache_value *entry)
{
	bool behind = has_endpoint(config, entry);
	__u32 first = tunnel[0] >> 32;

	if (!behind && config->underlay6 != (family == FAMILY_IPV6))
		return false;
	if (!config->underlay6)
		return bpf_htonl(first) ==
		       (behind ? entry->tunnel_endpoint.ip4.be32 : src[0]);
	return (first | tunnel[1] << 32) ==
		       (behind ? entry->tunnel_endpoint.ip6.d1 : src[0]) &&
	       (tunnel[1] >> 32 | tunnel[2] << 32) ==
		       (behind ? entry->tunnel_endpoint.ip6.d2 : src[1]);
}

/* Whether a VNI may go with an entry. That of a whole network says nothing of
 * the workloads in it: their own entries may be on their way yet. */
static __always_inline bool
may_claim(__u32 claimed, const struct ipcache_value *entry)
{
	__u32 identity = wire_identity(entry->sec_identity);

	if (claimed == IDENTITY_HOST)
		return false;
	return identity == IDENTITY_NONE || identity == IDENTITY_WORLD ||
	       claimed == identity;
}

/* Whether the packet is from where and whose it says. */
static __always_inline enum verdict
check_origin(struct __sk_buff *skb, const struct config *config, __u8 family,
	     const __u64 *src, union scratch *scratch)
{
	__u64 flags = config->underlay6 ? BPF_F_TUNINFO_IPV6 : 0;
	const struct ipcache_value *entry;

	entry = find_entry(family, src, scratch);
	/* fails, too, where the outer header is of the other family */
	if (!entry ||
	    bpf_skb_get_tunnel_key(skb, (struct bpf_tunnel_key *)scratch,
				   TUNNEL_BYTES, flags) ||
	    !came_from(config, scratch->words, family, src, entry))
		return VERDICT_WRONG_NODE;
	return may_claim(scratch->words[0], entry) ? VERDICT_IDENTIFIED :
						     VERDICT_WRONG_IDENTITY;
}

/* Drops all that is not to be carried: what has no addresses, what has nowhere
 * to go, and what is not from where it says, unless that is to be counted
 * alone. Each is counted under its verdict. */
static __always_inline int
overlay(struct __sk_buff *skb, const enum direction direction)
{
	struct finding found = { .mode = MODE_OVERLAY };
	struct addresses addresses = {};
	struct packet packet = {};
	const struct config *config;
	union scratch scratch;

	scratch.words[0] = 0; /* the key */
	config = bpf_map_lookup_elem(&weft_config, &scratch);
	if (!config)
		return TC_ACT_SHOT;
	found.verdict = parse_network(skb, &packet, &addresses, &scratch);
	if (found.verdict == VERDICT_NONE) {
		identify_ends(config, direction, packet.family, &addresses,
			      &found);
		found.verdict = direction == DIRECTION_EGRESS ?
			address_tunnel(skb, config, packet.family,
				       addresses.dst, found.src_identity,
				       &scratch) :
			check_origin(skb, config, packet.family, addresses.src,
				     &scratch);
	}
	report(skb, config, direction, &found);
	if (found.verdict != VERDICT_IDENTIFIED &&
	    !(config->overlay_lax && found.verdict >= VERDICT_WRONG_NODE))
		return TC_ACT_SHOT;
	if (direction == DIRECTION_INGRESS) {
		/* The inner Ethernet header is the sender's own affair: without
		 * this, the kernel would take the packet for somebody else's. */
		bpf_skb_change_type(skb, PACKET_HOST);
		set_mark(skb, config, found.src_identity);
	}
	return TC_ACT_UNSPEC;
}
