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

/* struct bpf_tunnel_key in whole words, for the sake of verifiers that refuse to
 * have part of a stack word written over. It ends before the local address,
 * which 5.10 does not know yet. */
struct tunnel {
	__u64 id_remote;       /* tunnel_id, and remote_ipv4 in host order or
				* the first 4 bytes of remote_ipv6 */
	__u64 remote;          /* the next 8 of them */
	__u64 remote_tos_ttl;  /* the last 4; tos; ttl; ext */
	__u64 label;           /* and 4 bytes that the kernel is not shown */
};

#define TUNNEL_BYTES 28
_Static_assert(offsetof(struct bpf_tunnel_key, tunnel_ttl) == 21, "ttl");
_Static_assert(offsetof(struct bpf_tunnel_key, tunnel_label) == 24, "label");

/* The entry of the longest prefix: the fast path has identities alone. */
static __always_inline const struct ipcache_value *
find_entry(__u8 family, const __u64 *addr)
{
	struct {
		__u64 head, d1, d2;
	} key;
	__u32 bits = family == FAMILY_IPV4 ? 32 : 128;

	write_head(&key, IPCACHE_STATIC_BITS + bits | (__u64)family << 56);
	key.d1 = addr[0];
	key.d2 = addr[1];
	return bpf_map_lookup_elem(&ipcache, &key);
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
set_tunnel(struct __sk_buff *skb, const struct config *config,
	   const union v6addr *endpoint, __u32 identity)
{
	struct tunnel tunnel;
	__u64 flags = BPF_F_ZERO_CSUM_TX;

	tunnel.label = 0;
	if (config->underlay6) {
		flags = BPF_F_TUNINFO_IPV6;
		tunnel.id_remote = identity | (__u64)endpoint->p1 << 32;
		tunnel.remote = endpoint->p2 | (__u64)endpoint->p3 << 32;
		tunnel.remote_tos_ttl = endpoint->p4 |
					(__u64)OVERLAY_TTL << 40;
	} else {
		tunnel.id_remote = identity |
				   (__u64)bpf_ntohl(endpoint->p1) << 32;
		tunnel.remote = 0;
		tunnel.remote_tos_ttl = (__u64)OVERLAY_TTL << 40;
	}
	return !bpf_skb_set_tunnel_key(skb, (struct bpf_tunnel_key *)&tunnel,
				       TUNNEL_BYTES, flags);
}

static __always_inline void
encapsulate(struct __sk_buff *skb, const struct config *config, __u8 family,
	    const struct addresses *addresses, struct finding *found)
{
	const struct ipcache_value *entry;

	identify_ends(config, DIRECTION_EGRESS, family, addresses, found);
	found->verdict = VERDICT_NO_ENDPOINT;
	entry = find_entry(family, addresses->dst);
	if (!entry || !has_endpoint(config, entry))
		return;
	if (set_tunnel(skb, config, &entry->tunnel_endpoint.ip6,
		       wire_identity(found->src_identity)))
		found->verdict = VERDICT_IDENTIFIED;
}

/* Whether the packet came from the node behind which its source is; an address
 * that is behind no node is a node's own. */
static __always_inline bool
came_from(const struct config *config, const struct tunnel *tunnel, __u8 family,
	  const __u64 *src, const struct ipcache_value *entry)
{
	__u64 first = tunnel->id_remote >> 32;
	__u64 d1, d2;

	if (!config->underlay6) {
		first = bpf_htonl(first);
		if (has_endpoint(config, entry))
			return first == entry->tunnel_endpoint.ip4.be32;
		return family == FAMILY_IPV4 && first == src[0];
	}
	d1 = first | tunnel->remote << 32;
	d2 = tunnel->remote >> 32 | tunnel->remote_tos_ttl << 32;
	if (has_endpoint(config, entry))
		return d1 == entry->tunnel_endpoint.ip6.d1 &&
		       d2 == entry->tunnel_endpoint.ip6.d2;
	return family == FAMILY_IPV6 && d1 == src[0] && d2 == src[1];
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

static __always_inline void
decapsulated(struct __sk_buff *skb, const struct config *config, __u8 family,
	     const struct addresses *addresses, struct finding *found)
{
	__u64 flags = config->underlay6 ? BPF_F_TUNINFO_IPV6 : 0;
	const struct ipcache_value *entry;
	struct tunnel tunnel;

	identify_ends(config, DIRECTION_INGRESS, family, addresses, found);
	found->verdict = VERDICT_WRONG_NODE;
	/* fails, too, where the outer header is of the other family */
	if (bpf_skb_get_tunnel_key(skb, (struct bpf_tunnel_key *)&tunnel,
				   TUNNEL_BYTES, flags))
		return;
	entry = find_entry(family, addresses->src);
	if (!entry || !came_from(config, &tunnel, family, addresses->src, entry))
		return;
	found->verdict = may_claim(tunnel.id_remote, entry) ?
				 VERDICT_IDENTIFIED :
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
	__u32 zero = 0;

	config = bpf_map_lookup_elem(&weft_config, &zero);
	if (!config)
		return TC_ACT_SHOT;
	found.verdict = parse_network(skb, &packet, &addresses);
	if (found.verdict == VERDICT_NONE) {
		if (direction == DIRECTION_EGRESS)
			encapsulate(skb, config, packet.family, &addresses,
				    &found);
		else
			decapsulated(skb, config, packet.family, &addresses,
				     &found);
	}
	count(&found, direction, skb->len);
	if (sampled(config->flow_sample))
		emit(skb, direction, &packet, &addresses, &found);
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
