// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* From the bytes of an Ethernet frame to addresses, protocol and ports. What
 * the bytes say is believed only as far as the frame reaches: trailing padding
 * is not taken for a header, and a packet that claims more bytes than there
 * are is malformed, as it is for the kernel's own IP layer. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "structs.h"

#define ETH_TYPE_OFFSET 12
#define VLAN_TCI_BYTES 2
#define EXTENSION_UNIT 8
#define IPV4_FRAGMENT_OFFSET 0x1fff
#define IPV6_FRAGMENT_OFFSET 0xfff8
#define TCP_FLAGS_OFFSET 13

/* Both ends of a packet, in network order; IPv4 in the first four bytes. */
struct addresses {
	__u64 src[2], dst[2];
};

/* Memory for what is needed for a moment, such as an IP header that is not in
 * place: slots of the stack do not serve twice by themselves (../gen.go). */
union scratch {
	struct iphdr ip4;
	struct ipv6hdr ip6;
	__u64 words[5];
};

/* What the programs know of a frame besides its addresses. Offsets
 * count from the start of the frame. */
struct packet {
	__u32 network;   /* where the IP header is */
	__u32 transport; /* where the transport header is */
	__u32 end;       /* where the IP packet ends; 0: transport unknown */
	__u16 eth_type;  /* host order */
	__u8 family;     /* enum family; FAMILY_NONE: no IP header to rely on */
	__u8 protocol;
};

/* The first 4 bytes of every extension header looked through. */
struct extension {
	__u8 nexthdr;
	__u8 len;     /* in units less the first; reserved in the fragment header */
	__be16 frag;  /* of the fragment header alone */
};

/* Points at len bytes at off of the frame: in place where off is usual and they
 * are in the skb's linear part, as is nearly always so, else copied into buf.
 * NULL if the frame ends before.
 *
 * Without CAP_PERFMON the verifier allows neither a variable offset from the
 * start of the packet nor a packet pointer compared with NULL. Hence usual, a
 * constant, and the assumption, which decides a caller's comparison early. */
static __always_inline const void *
header_at(struct __sk_buff *skb, __u32 off, const __u32 usual, void *buf,
	  __u32 len)
{
	void *header = (void *)(long)skb->data + usual;
	void *end = (void *)(long)skb->data_end;

	if (likely(off == usual && header + len <= end)) {
		__builtin_assume(header != NULL);
		return header;
	}
	if (bpf_skb_load_bytes(skb, off, buf, len))
		return NULL;
	return buf;
}

static __always_inline enum verdict
parse_ipv4(struct __sk_buff *skb, struct packet *packet,
	   struct addresses *addresses, union scratch *buf)
{
	const __u32 off = packet->network;
	const struct iphdr *ip = header_at(skb, off, ETH_HLEN, buf, sizeof(*ip));
	__u32 room = skb->len - off;
	__u32 header, total;

	if (unlikely(!ip))
		return VERDICT_MALFORMED;
	header = ip->ihl * 4;
	total = bpf_ntohs(ip->tot_len);
	/* A super-packet of more than 64 KiB (BIG TCP) has no length. */
	if (unlikely(!total && skb->gso_size))
		total = room;
	if (unlikely(ip->version != 4 || header < sizeof(*ip) ||
		     total < header || total > room))
		return VERDICT_MALFORMED;

	packet->family = FAMILY_IPV4;
	packet->protocol = ip->protocol;
	addresses->src[0] = ip->saddr;
	addresses->dst[0] = ip->daddr;
	if (!(ip->frag_off & bpf_htons(IPV4_FRAGMENT_OFFSET))) {
		packet->transport = off + header;
		packet->end = off + total;
	}
	return VERDICT_NONE;
}

static __always_inline bool is_extension(__u32 nexthdr)
{
	const __u64 extensions = 1ULL << IPPROTO_HOPOPTS |
				 1ULL << IPPROTO_ROUTING |
				 1ULL << IPPROTO_FRAGMENT | 1ULL << IPPROTO_AH |
				 1ULL << IPPROTO_DSTOPTS;

	return nexthdr < 64 && extensions >> nexthdr & 1;
}

/* Bytes of the extension header of type nexthdr. */
static __always_inline __u32
extension_bytes(__u32 nexthdr, const struct extension *ext)
{
	switch (nexthdr) {
	case IPPROTO_FRAGMENT:
		return EXTENSION_UNIT;
	case IPPROTO_AH:
		return (ext->len + 2) * 4;
	default:
		return (ext->len + 1) * EXTENSION_UNIT;
	}
}

/* Walks the extension headers in [off, end), of which the first is of type
 * nexthdr: EXTENSIONS_MALFORMED, or the type of the header at which it stops and
 * where that is (0: not known, or in another fragment).
 *
 * Not static, and so verified once, by itself: eight rounds of it in each way
 * through a program are more than the verifier of 6.1 has patience for. Hence
 * also numbers alone, since 5.10 lets no such function have a pointer. */
#define EXTENSIONS_MALFORMED (~0ULL)
#define EXTENSIONS_TYPE_SHIFT 32

__noinline __u64
weft_skip_extensions(struct __sk_buff *skb, __u32 off, __u32 end, __u32 nexthdr)
{
	struct extension ext;

#pragma unroll
	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		if (off + EXTENSION_UNIT > end ||
		    bpf_skb_load_bytes(skb, off, &ext, sizeof(ext)))
			return EXTENSIONS_MALFORMED;
		off += extension_bytes(nexthdr, &ext);
		if (off > end)
			return EXTENSIONS_MALFORMED;
		if (nexthdr == IPPROTO_FRAGMENT &&
		    ext.frag & bpf_htons(IPV6_FRAGMENT_OFFSET))
			return (__u64)ext.nexthdr << EXTENSIONS_TYPE_SHIFT;
		nexthdr = ext.nexthdr;
		if (!is_extension(nexthdr))
			return off | (__u64)nexthdr << EXTENSIONS_TYPE_SHIFT;
	}
	return (__u64)nexthdr << EXTENSIONS_TYPE_SHIFT;
}

static __always_inline enum verdict
parse_ipv6(struct __sk_buff *skb, struct packet *packet,
	   struct addresses *addresses, union scratch *buf)
{
	const __u32 off = packet->network;
	const struct ipv6hdr *ip = header_at(skb, off, ETH_HLEN, buf, sizeof(*ip));
	__u32 first = off + sizeof(*ip);
	__u32 room = skb->len - first;
	__u32 payload;
	const __u64 *addr;
	__u64 behind;

	if (unlikely(!ip))
		return VERDICT_MALFORMED;
	payload = bpf_ntohs(ip->payload_len);
	/* A jumbogram's length is in its hop-by-hop options; a super-packet of
	 * more than 64 KiB (BIG TCP) may have none at all. */
	if (!payload && (ip->nexthdr == IPPROTO_HOPOPTS || skb->gso_size))
		payload = room;
	if (ip->version != 6 || payload > room)
		return VERDICT_MALFORMED;

	packet->family = FAMILY_IPV6;
	addr = (const __u64 *)&ip->saddr;
	addresses->src[0] = addr[0];
	addresses->src[1] = addr[1];
	addresses->dst[0] = addr[2];
	addresses->dst[1] = addr[3];
	behind = first | (__u64)ip->nexthdr << EXTENSIONS_TYPE_SHIFT;
	if (is_extension(ip->nexthdr))
		behind = weft_skip_extensions(skb, first, first + payload,
					      ip->nexthdr);
	if (behind == EXTENSIONS_MALFORMED)
		return VERDICT_MALFORMED;
	packet->protocol = behind >> EXTENSIONS_TYPE_SHIFT;
	packet->transport = behind;
	packet->end = packet->transport ? first + payload : 0;
	return VERDICT_NONE;
}

static __always_inline bool is_vlan(__be16 eth_type)
{
	return eth_type == bpf_htons(ETH_P_8021Q) ||
	       eth_type == bpf_htons(ETH_P_8021AD);
}

/* Fills in the packet and its addresses. VERDICT_NONE: they are there to look
 * up. */
static __always_inline enum verdict
parse_network(struct __sk_buff *skb, struct packet *packet,
	      struct addresses *addresses, union scratch *scratch)
{
	__u32 off = ETH_TYPE_OFFSET;
	const __be16 *type;
	__be16 buf;

#pragma unroll
	for (int tags = 0; tags <= MAX_VLAN_TAGS; tags++) {
		type = header_at(skb, off, ETH_TYPE_OFFSET, &buf, sizeof(buf));
		if (unlikely(!type))
			return VERDICT_MALFORMED;
		off += sizeof(*type);
		if (likely(!is_vlan(*type)))
			break;
		off += VLAN_TCI_BYTES;
	}
	packet->eth_type = bpf_ntohs(*type);
	packet->network = off;
	switch (packet->eth_type) {
	case ETH_P_IP:
		return parse_ipv4(skb, packet, addresses, scratch);
	case ETH_P_IPV6:
		return parse_ipv6(skb, packet, addresses, scratch);
	default:
		return VERDICT_NOT_IP;
	}
}

/* Copies len bytes at off, if they end before end; false otherwise. */
static __always_inline bool
load(struct __sk_buff *skb, __u32 off, __u32 end, void *to, __u32 len)
{
	return off + len <= end && !bpf_skb_load_bytes(skb, off, to, len);
}

/* Fills in ports, or type and code, and TCP flags, as far as they are there:
 * the transport header is in [off, end). */
static __noinline __attribute__((unused)) void
describe_transport(struct __sk_buff *skb, __u32 off, __u32 end,
		   struct event *event)
{
	__u8 icmp = event->family == FAMILY_IPV4 ? IPPROTO_ICMP :
						   IPPROTO_ICMPV6;
	__be16 ports[2];
	__u8 kind[2];

	if (event->protocol == icmp) {
		if (load(skb, off, end, kind, sizeof(kind))) {
			event->src_port = kind[0];
			event->dst_port = kind[1];
		}
		return;
	}
	switch (event->protocol) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
	case IPPROTO_SCTP:
		if (load(skb, off, end, ports, sizeof(ports))) {
			event->src_port = bpf_ntohs(ports[0]);
			event->dst_port = bpf_ntohs(ports[1]);
		}
	}
	if (event->protocol == IPPROTO_TCP)
		load(skb, off + TCP_FLAGS_OFFSET, end, &event->tcp_flags,
		     sizeof(event->tcp_flags));
}
