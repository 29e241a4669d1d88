// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* How a packet of a flow is changed: its addresses, ports and checksums, and those of
 * the fragments that follow it. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>

#include <linux/in.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "answer.h"
#include "flow.h"

#define TCP_CHECKSUM_OFFSET 16
#define TCP_HEADER_BYTES 20
#define UDP_HEADER_BYTES 8

#define IPV4_CHECKSUM_OFFSET 10
#define IPV4_ID_OFFSET 4
#define IPV4_SRC_OFFSET 12
#define IPV4_DST_OFFSET 16
#define IPV4_MORE_FRAGMENTS 0x2000
#define IPV6_NEXT_OFFSET 6
#define IPV6_SRC_OFFSET 8
#define IPV6_DST_OFFSET 24
#define IPV6_HEADER_BYTES 40

/* Fills in which datagram the packet is a fragment of, if it is one. Behind other
 * extension headers, a fragment header of IPv6 is not looked for. */
__noinline bool weft_find_datagram(struct __sk_buff *skb, __u32 protocol)
{
	struct translation *t = translation();
	struct fragment_key *key;
	struct {
		__u8 next, reserved;
		__be16 offset;
		__be32 id;
	} fragment;
	struct {
		__be16 id, offset;
	} ip;
	__u8 next;

	if (!t)
		return false;
	key = &t->datagram;
	if (family_at(t) == FAMILY_IPV4) {
		if (bpf_skb_load_bytes(skb, t->network + IPV4_ID_OFFSET, &ip,
				       sizeof(ip)))
			return false;
		if (!(ip.offset &
		      bpf_htons(IPV4_MORE_FRAGMENTS | IPV4_FRAGMENT_OFFSET)))
			return false;
		key->id = ip.id;
		key->protocol = protocol;
	} else {
		if (bpf_skb_load_bytes(skb, t->network + IPV6_NEXT_OFFSET, &next,
				       sizeof(next)) ||
		    next != IPPROTO_FRAGMENT ||
		    bpf_skb_load_bytes(skb, t->network + IPV6_HEADER_BYTES,
				       &fragment, sizeof(fragment)))
			return false;
		key->id = fragment.id;
		key->protocol = 0;
	}
	key->src.d1 = t->key.src[0];
	key->src.d2 = t->key.src[1];
	key->dst.d1 = t->key.dst[0];
	key->dst.d2 = t->key.dst[1];
	key->family = family_at(t);
	key->kind = TO_CLIENT ? CONNTRACK_REPLY : 0;
	key->pad = 0;
	return true;
}

/* Where in an IP header the address is that is changed. */
static __always_inline __u32 address_offset(__u8 family, const bool source)
{
	if (family == FAMILY_IPV4)
		return source ? IPV4_SRC_OFFSET : IPV4_DST_OFFSET;
	return source ? IPV6_SRC_OFFSET : IPV6_DST_OFFSET;
}

/* Changes an address of an IP header at ip, and the checksum at sum, 0 for none,
 * whose pseudo header has it.
 *
 * What the kernel knows of the sum of all bytes stays true: in IPv4 the header's
 * own checksum makes up for the address, in IPv6 RECOMPUTE adds what PSEUDO takes
 * off. */
static __always_inline bool
change_address(struct __sk_buff *skb, __u8 family, __u32 ip, const bool source,
	       __u32 sum, __u64 flags, const __u64 *from, const __u64 *to)
{
	__u32 at = ip + address_offset(family, source);
	__s64 diff;

	if (family == FAMILY_IPV4) {
		if (bpf_l3_csum_replace(skb, ip + IPV4_CHECKSUM_OFFSET,
					(__u32)from[0], (__u32)to[0], 4))
			return false;
		if (sum && bpf_l4_csum_replace(skb, sum, (__u32)from[0],
					       (__u32)to[0],
					       flags | BPF_F_PSEUDO_HDR | 4))
			return false;
		return !bpf_skb_store_bytes(skb, at, to, 4, 0);
	}
	diff = bpf_csum_diff((__be32 *)from, 16, (__be32 *)to, 16, 0);
	if (sum && bpf_l4_csum_replace(skb, sum, 0, diff,
				       flags | BPF_F_PSEUDO_HDR))
		return false;
	return !bpf_skb_store_bytes(skb, at, to, 16, BPF_F_RECOMPUTE_CSUM);
}

/* Changes the packet from what t->key says to what t->entry says. */
__noinline bool weft_rewrite(struct __sk_buff *skb)
{
	struct translation *t = translation();
	__be16 from, to;
	__u64 flags;
	__u32 sum;

	if (!t)
		return false;
	sum = TCP_CHECKSUM_OFFSET;
	flags = 0;
	if (protocol_of(t) == PROTOCOL_UDP) {
		sum = UDP_CHECKSUM_OFFSET;
		flags = BPF_F_MARK_MANGLED_0;
	}
	sum += t->transport;
	from = TO_CLIENT ? t->key.rest : t->key.rest >> 16;
	to = t->entry.ends;
	if (!change_address(skb, family_at(t), t->network, TO_CLIENT, sum, flags,
			    TO_CLIENT ? t->key.src : t->key.dst, t->entry.addr))
		return false;
	if (from == to)
		return true;
	return !bpf_l4_csum_replace(skb, sum, from, to, flags | 2) &&
	       !bpf_skb_store_bytes(skb, t->transport + (TO_CLIENT ? 0 : 2), &to,
				    sizeof(to), 0);
}

/* A fragment that is not the first has no ports: it goes where that went, if it
 * came before. */
__noinline int weft_translate_fragment(struct __sk_buff *skb, __u32 protocol)
{
	struct translation *t = translation();
	const struct fragment *first;

	if (!t || !weft_find_datagram(skb, protocol))
		return TC_ACT_UNSPEC;
	first = bpf_map_lookup_elem(&weft_fragments, &t->datagram);
	if (!first || bpf_ktime_get_ns() - first->since_ns > FRAGMENTS_NS)
		return TC_ACT_UNSPEC;
	t->entry.addr[0] = first->addr.d1;
	t->entry.addr[1] = first->addr.d2;
	if (!change_address(skb, family_at(t), t->network, TO_CLIENT, 0, 0,
			    TO_CLIENT ? t->key.src : t->key.dst, t->entry.addr)) {
		COUNT(failed);
		return TC_ACT_SHOT;
	}
	COUNT(fragments);
	if (TO_CLIENT)
		COUNT(replies);
	else
		COUNT(requests);
	return TC_ACT_UNSPEC;
}

/* Notes where the fragments go that follow this one, if any do. */
static __always_inline void
remember_fragment(struct __sk_buff *skb, struct translation *t, __u8 protocol)
{
	if (!weft_find_datagram(skb, protocol))
		return;
	t->fragment.addr.d1 = t->entry.addr[0];
	t->fragment.addr.d2 = t->entry.addr[1];
	t->fragment.since_ns = bpf_ktime_get_ns();
	bpf_map_update_elem(&weft_fragments, &t->datagram, &t->fragment,
			    BPF_ANY);
}

/* Reads the ports, and the flags of TCP, if the whole header is there. */
static __always_inline bool
read_transport(struct __sk_buff *skb, const struct translation *t,
	       __u8 protocol, __u32 *ports, __u8 *flags)
{
	__u32 bytes = protocol == PROTOCOL_TCP ? TCP_HEADER_BYTES :
						 UDP_HEADER_BYTES;

	if (t->transport + bytes > t->end ||
	    bpf_skb_load_bytes(skb, t->transport, ports, sizeof(*ports)))
		return false;
	if (protocol == PROTOCOL_TCP &&
	    bpf_skb_load_bytes(skb, t->transport + TCP_FLAGS_OFFSET, flags,
			       sizeof(*flags)))
		return false;
	return true;
}

/* A packet of TCP or UDP, not a later fragment. */
__noinline int weft_translate_flow(struct __sk_buff *skb, __u32 protocol)
{
	struct translation *t = translation();
	__u32 ports = 0, service;
	__u8 flags = 0;

	if (!t || !read_transport(skb, t, protocol, &ports, &flags))
		return TC_ACT_UNSPEC;
	t->key.rest = conntrack_rest(ports & 0xffff, ports >> 16, protocol,
				     family_at(t), TO_CLIENT ? CONNTRACK_REPLY : 0);
	if (!weft_goes_on(flags)) {
		if (TO_CLIENT || flags & TCP_RST)
			return TC_ACT_UNSPEC;
		service = weft_find_service();
		if (!service) {
			if (protocol == PROTOCOL_UDP || flags & TCP_SYN)
				weft_make_way();
			return TC_ACT_UNSPEC;
		}
		switch (weft_begin_flow(service)) {
		case BEGUN:
			break;
		case BEGUN_REFUSED:
			return weft_answer(skb, protocol);
		default:
			return TC_ACT_SHOT;
		}
	}
	remember_fragment(skb, t, protocol);
	if (!weft_rewrite(skb)) {
		COUNT(failed);
		return TC_ACT_SHOT;
	}
	if (TO_CLIENT)
		COUNT(replies);
	else
		COUNT(requests);
	return TC_ACT_UNSPEC;
}
