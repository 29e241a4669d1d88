// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* ICMP errors about packets of a flow: they quote the packet as one side knows it, and
 * must quote it as the other one does. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>

#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "flow.h"
#include "rewrite.h"

#define ICMP_CHECKSUM_OFFSET 2
#define ICMP_HEADER_BYTES 8

#define ICMP4_TIME_EXCEEDED 11
#define ICMP4_PARAMETER 12
#define ICMP6_FIRST_INFORMATIONAL 128

/* A 16-bit checksum over what had one word and has another, or whose pseudo header
 * had: RFC 1624, equation 3. */
static __always_inline __u16 new_checksum(__u16 sum, __s64 diff)
{
	__u64 folded = (__u16)~sum + (__u64)(__u32)diff;

	folded = (folded & 0xffff) + (folded >> 16);
	folded = (folded & 0xffff) + (folded >> 16);
	folded = (folded & 0xffff) + (folded >> 16);
	return ~folded;
}

/* Changes the two bytes at off of an ICMP message, and its checksum at sum. */
static __always_inline bool
change_quoted(struct __sk_buff *skb, __u32 off, __u32 sum, __u16 from, __u16 to)
{
	return !bpf_l4_csum_replace(skb, sum, from, to, 2) &&
	       !bpf_skb_store_bytes(skb, off, &to, sizeof(to), 0);
}

/* What follows changes the packet that an ICMP message quotes, from what t->other
 * says to what t->entry says. The quoted packet went the other way: what is a source
 * in t->other is its destination.
 */

static __always_inline const __u64 *quoted_server(const struct translation *t)
{
	return TO_CLIENT ? t->other.src : t->other.dst;
}

/* Its address, at inner. Its own checksum makes up for that in IPv4, the message's has
 * to in IPv6, and takes off again what the kernel was told of the sum of all bytes. */
__noinline bool weft_rewrite_quoted_address(struct __sk_buff *skb, __u32 inner)
{
	struct translation *t = translation();
	const __u64 *from;
	__s64 diff;

	if (!t)
		return false;
	from = quoted_server(t);
	if (!change_address(skb, family_at(t), inner, !TO_CLIENT, 0, 0, from,
			    t->entry.addr))
		return false;
	if (family_at(t) == FAMILY_IPV4)
		return true;
	diff = bpf_csum_diff((__be32 *)from, 16, (__be32 *)t->entry.addr, 16, 0);
	return !bpf_l4_csum_replace(skb, t->transport + ICMP_CHECKSUM_OFFSET, 0,
				    diff, BPF_F_PSEUDO_HDR);
}

/* Its port, and its checksum as far as that is there. */
__noinline bool weft_rewrite_quoted_port(struct __sk_buff *skb, __u32 transport)
{
	struct translation *t = translation();
	__u16 port, to, sum = 0;
	__u32 icmp, sum_at;
	bool udp;
	__s64 diff;

	if (!t)
		return false;
	udp = (__u8)(t->other.rest >> 32) == PROTOCOL_UDP;
	icmp = t->transport + ICMP_CHECKSUM_OFFSET;
	port = TO_CLIENT ? t->other.rest : t->other.rest >> 16;
	to = t->entry.ends;
	if (port != to &&
	    !change_quoted(skb, transport + (TO_CLIENT ? 2 : 0), icmp, port, to))
		return false;
	sum_at = transport + (udp ? UDP_CHECKSUM_OFFSET : TCP_CHECKSUM_OFFSET);
	if (sum_at + sizeof(sum) > t->end ||
	    bpf_skb_load_bytes(skb, sum_at, &sum, sizeof(sum)))
		return true; /* it is not quoted */
	if (!sum && udp)
		return true; /* it has none */
	diff = bpf_csum_diff((__be32 *)quoted_server(t), 16,
			     (__be32 *)t->entry.addr, 16,
			     (__u16)~port + (__u32)to);
	to = new_checksum(sum, diff);
	if (!to && udp)
		to = 0xffff;
	return to == sum || change_quoted(skb, sum_at, icmp, sum, to);
}

/* Finds the flow of the packet that an ICMP error quotes at inner: its key becomes
 * t->other, its entry t->entry. 0: it is of none; else where its ports are. */
__noinline __u32 weft_find_quoted(struct __sk_buff *skb, __u32 inner)
{
	struct translation *t = translation();
	void *flows = conntrack_at(CONNTRACK_NOW);
	const struct conntrack *entry;
	__u32 transport, ports;
	union scratch *ip;
	__u8 protocol;

	if (!t || !flows)
		return 0;
	ip = &t->ip;
	if (family_at(t) == FAMILY_IPV4) {
		if (!load(skb, inner, t->end, &ip->ip4, sizeof(ip->ip4)) ||
		    ip->ip4.version != 4 || ip->ip4.ihl < 5 ||
		    ip->ip4.frag_off & bpf_htons(IPV4_FRAGMENT_OFFSET))
			return 0;
		transport = inner + ip->ip4.ihl * 4;
		protocol = ip->ip4.protocol;
		t->other.src[0] = ip->ip4.daddr;
		t->other.src[1] = 0;
		t->other.dst[0] = ip->ip4.saddr;
		t->other.dst[1] = 0;
	} else {
		if (!load(skb, inner, t->end, &ip->ip6, sizeof(ip->ip6)) ||
		    ip->ip6.version != 6)
			return 0;
		transport = inner + sizeof(ip->ip6);
		protocol = ip->ip6.nexthdr;
		/* words 1 and 2 are the source, 3 and 4 the destination */
		t->other.src[0] = ip->words[3];
		t->other.src[1] = ip->words[4];
		t->other.dst[0] = ip->words[1];
		t->other.dst[1] = ip->words[2];
	}
	if (protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP)
		return 0;
	if (!load(skb, transport, t->end, &ports, sizeof(ports)))
		return 0;
	t->other.rest = conntrack_rest(ports >> 16, ports & 0xffff, protocol,
				       family_at(t), TO_CLIENT ? CONNTRACK_REPLY : 0);
	entry = bpf_map_lookup_elem(flows, &t->other);
	if (!entry && take_over(t, &t->other))
		entry = bpf_map_lookup_elem(flows, &t->other);
	if (!entry || is_over(entry, protocol, bpf_ktime_get_ns()))
		return 0;
	t->entry = *(struct entry_words *)entry;
	return transport;
}

static __always_inline bool is_icmp_error(__u8 family, __u8 type)
{
	if (family == FAMILY_IPV6)
		return type < ICMP6_FIRST_INFORMATIONAL;
	return type == ICMP4_UNREACHABLE || type == ICMP4_TIME_EXCEEDED ||
	       type == ICMP4_PARAMETER;
}

/* The address of the ICMP message itself. */
__noinline bool weft_rewrite_message(struct __sk_buff *skb)
{
	struct translation *t = translation();

	if (!t)
		return false;
	return change_address(skb, family_at(t), t->network, TO_CLIENT,
			      family_at(t) == FAMILY_IPV6 ?
				      t->transport + ICMP_CHECKSUM_OFFSET :
				      0,
			      0, TO_CLIENT ? t->key.src : t->key.dst,
			      t->entry.addr);
}

/* An ICMP message: errors say what packet they are about, and those that senders
 * need most (a packet is too big) are sent by routers that have seen it translated. */
__noinline int weft_translate_error(struct __sk_buff *skb)
{
	struct translation *t = translation();
	const __u64 *end, *server;
	__u32 inner, transport;
	bool from_end;
	__u8 type;

	if (!t || !load(skb, t->transport, t->end, &type, sizeof(type)) ||
	    !is_icmp_error(family_at(t), type))
		return TC_ACT_UNSPEC;
	inner = t->transport + ICMP_HEADER_BYTES;
	transport = weft_find_quoted(skb, inner);
	if (!transport)
		return TC_ACT_UNSPEC;
	/* A backend's own message comes from the service. To a backend, only those
	 * go that are to the service. */
	end = TO_CLIENT ? t->key.src : t->key.dst;
	server = quoted_server(t);
	from_end = end[0] == server[0] && end[1] == server[1];
	if (!TO_CLIENT && !from_end)
		return TC_ACT_UNSPEC;
	if (!weft_rewrite_quoted_address(skb, inner) ||
	    !weft_rewrite_quoted_port(skb, transport) ||
	    (from_end && !weft_rewrite_message(skb))) {
		COUNT(failed);
		return TC_ACT_SHOT;
	}
	COUNT(errors);
	return TC_ACT_UNSPEC;
}
