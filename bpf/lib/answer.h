// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* What a client is told for whose packet there is no backend, by the service, as it
 * seems: a reset of TCP, or that the port cannot be reached. The client's own packet
 * is made into that, and leaves by the device that it came in by.
 *
 * The kernel may have to fill in a checksum when it sends a packet (CHECKSUM_PARTIAL:
 * that of whatever was sent by a socket of this machine, or of a virtual one on it),
 * and there is no telling. Hence the checksums below have the value that is right if so, and are
 * then changed by what makes up for it if not, which bpf_l4_csum_replace leaves
 * undone for such packets. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "flow.h"

#define ANSWER_TTL 64
#define UDP_CHECKSUM_OFFSET 6
#define ICMP4_UNREACHABLE 3
#define ICMP4_PORT_UNREACHABLE 3
#define ICMP6_UNREACHABLE 1
#define ICMP6_PORT_UNREACHABLE 4
#define IPV4_DONT_FRAGMENT 0x4000

/* An ICMP error has at most so many bytes, from the IP header on: RFC 1812 and 4443. */
#define ICMP4_ERROR_BYTES 576
#define ICMP6_ERROR_BYTES 1280

/* At most so many ICMP errors in so long a time from each CPU: RFC 1812 and 4443 want
 * a bound, and these are the kernel's own numbers. Resets are smaller than what they
 * answer, and need none. */
#define ICMP_ANSWERS 50
#define ICMP_ANSWERS_NS 50000000ULL

/* 16 bits of the one's complement sum of RFC 1071. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* The sum of len bytes at off, of at most ANSWER_CHUNK; ~0: they are not there. Of
 * both parts the verifier of 6.1 must see that they are not empty. */
__noinline __u64 weft_sum(struct __sk_buff *skb, __u32 off, __u32 len)
{
	struct translation *t = translation();
	__u64 words, rest;
	__u32 last = 0;
	__s64 sum = 0;

	if (!len)
		return 0;
	words = (len - 1) & ~3U;
	rest = (len - 1) & 3;
	/* Compilers know more of what they have bounded than verifiers do. */
	asm volatile("%1 &= 3" : "+r"(words), "+r"(rest));
	if (!t || words > ANSWER_CHUNK ||
	    bpf_skb_load_bytes(skb, off + words, &last, rest + 1))
		return ~0ULL;
	if (words > 3) {
		if (bpf_skb_load_bytes(skb, off, t->chunk, words))
			return ~0ULL;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)t->chunk, words, 0);
		if (sum < 0)
			return ~0ULL;
	}
	return (__u64)sum + last;
}

/* The sum of all bytes of a packet that is quoted, cut to len; ~0: they are not there. */
static __always_inline __u64
sum_of_quote(struct __sk_buff *skb, __u32 off, __u32 len)
{
	__u64 sum = 0, part;
	__u32 some;

#pragma unroll
	for (int i = 0; i * ANSWER_CHUNK < ICMP6_ERROR_BYTES; i++) {
		some = len > ANSWER_CHUNK ? ANSWER_CHUNK : len;
		part = weft_sum(skb, off, some);
		if (part == ~0ULL)
			return part;
		sum += part;
		off += some;
		len -= some;
	}
	return sum;
}

/* The sum of the pseudo header of an answer with so many bytes behind its IP header. */
static __always_inline __u64
pseudo_sum(struct translation *t, __u32 bytes, __u8 protocol)
{
	/* Of IPv4, what is behind the addresses is 0. */
	return (__u64)bpf_csum_diff(NULL, 0, (__be32 *)t->key.src,
				    sizeof(t->key.src) + sizeof(t->key.dst),
				    0) +
	       bpf_htons(bytes) + bpf_htons(protocol);
}

/* Whether an address is one host's, who may be answered. */
static __always_inline bool is_host(const struct translation *t)
{
	const __u8 *src = (const __u8 *)t->key.src;

	if (family_at(t) == FAMILY_IPV4)
		return src[0] && src[0] != 127 && src[0] < 224;
	return src[0] != 0xff && (t->key.src[0] || t->key.src[1]);
}

/* Whether one more ICMP error may be sent. */
static __always_inline bool take_turn(struct translation *t)
{
	__u64 now = bpf_ktime_get_ns();

	if (now - t->answers_since_ns >= ICMP_ANSWERS_NS) {
		t->answers_since_ns = now;
		t->answers = 0;
	}
	if (t->answers >= ICMP_ANSWERS)
		return false;
	t->answers++;
	return true;
}

/* Makes a packet end at len. What the kernel knew of the sum of its bytes it forgets
 * when one is made longer. */
static __always_inline bool cut(struct __sk_buff *skb, __u32 len)
{
	return !bpf_skb_change_tail(skb, len, 0) &&
	       !bpf_skb_change_tail(skb, len + 1, 0) &&
	       !bpf_skb_change_tail(skb, len, 0);
}

/* Sends a frame back: to the address that it came from. */
static __always_inline bool turn_frame(struct __sk_buff *skb)
{
	__u8 ends[2][ETH_ALEN];

	return !bpf_skb_load_bytes(skb, 0, ends, sizeof(ends)) &&
	       !bpf_skb_store_bytes(skb, 0, ends[1], ETH_ALEN, 0) &&
	       !bpf_skb_store_bytes(skb, ETH_ALEN, ends[0], ETH_ALEN, 0);
}

/* Writes the IP header of an answer with so many bytes behind it. */
static __always_inline bool
put_header(struct __sk_buff *skb, struct translation *t, __u32 bytes, __u8 protocol)
{
	struct ipv6hdr *ip6 = &t->ip.ip6;
	struct iphdr *ip4 = &t->ip.ip4;

#pragma unroll
	for (int i = 0; i < 5; i++)
		t->ip.words[i] = 0;
	if (family_at(t) == FAMILY_IPV4) {
		ip4->version = 4;
		ip4->ihl = sizeof(*ip4) / 4;
		ip4->tot_len = bpf_htons(sizeof(*ip4) + bytes);
		ip4->frag_off = bpf_htons(IPV4_DONT_FRAGMENT);
		ip4->ttl = ANSWER_TTL;
		ip4->protocol = protocol;
		ip4->saddr = t->key.dst[0];
		ip4->daddr = t->key.src[0];
		ip4->check = ~fold(bpf_csum_diff(NULL, 0, (__be32 *)ip4,
						 sizeof(*ip4), 0));
		return !bpf_skb_store_bytes(skb, t->network, ip4, sizeof(*ip4), 0);
	}
	ip6->version = 6;
	ip6->payload_len = bpf_htons(bytes);
	ip6->nexthdr = protocol;
	ip6->hop_limit = ANSWER_TTL;
	/* words 1 and 2 are the source, 3 and 4 the destination */
	t->ip.words[1] = t->key.dst[0];
	t->ip.words[2] = t->key.dst[1];
	t->ip.words[3] = t->key.src[0];
	t->ip.words[4] = t->key.src[1];
	return !bpf_skb_store_bytes(skb, t->network, ip6, sizeof(*ip6), 0);
}

/* Makes a segment into the reset that answers it: RFC 9293, 3.5.2. */
__noinline bool weft_make_reset(struct __sk_buff *skb)
{
	struct translation *t = translation();
	struct tcp_header *tcp;
	__u32 bytes, pseudo;
	__be32 seq, ack;
	__u8 flags;

	if (!t)
		return false;
	tcp = &t->answer.tcp;
	if (bpf_skb_load_bytes(skb, t->transport, tcp, sizeof(*tcp)))
		return false;
	flags = tcp->flags;
	bytes = (tcp->offset >> 4) * 4;
	if (bytes < sizeof(*tcp) || t->transport + bytes > t->end)
		return false;
	bytes = t->end - t->transport - bytes;
	if (flags & TCP_SYN)
		bytes++;
	if (flags & TCP_FIN)
		bytes++;
	tcp->src_port = t->key.rest >> 16;
	tcp->dst_port = t->key.rest;
	seq = tcp->ack;
	ack = 0;
	if (!(flags & TCP_ACK)) {
		seq = 0;
		ack = bpf_htonl(bpf_ntohl(tcp->seq) + bytes);
	}
	tcp->seq = seq;
	tcp->ack = ack;
	tcp->flags = TCP_RST | (~flags & TCP_ACK);
	tcp->offset = sizeof(*tcp) / 4 << 4;
	tcp->window = 0;
	tcp->check = 0;
	tcp->urgent = 0;
	pseudo = fold(pseudo_sum(t, sizeof(*tcp), PROTOCOL_TCP));
	bytes = fold((__u64)bpf_csum_diff(NULL, 0, (__be32 *)tcp, sizeof(*tcp), 0) +
		     2 * pseudo);
	tcp->check = pseudo;
	return cut(skb, t->transport + sizeof(*tcp)) &&
	       put_header(skb, t, sizeof(*tcp), PROTOCOL_TCP) &&
	       !bpf_skb_store_bytes(skb, t->transport, tcp, sizeof(*tcp), 0) &&
	       !bpf_l4_csum_replace(skb, t->transport +
					    offsetof(struct tcp_header, check),
				    0, bytes, 0);
}

/* Puts the message that a port cannot be reached in front of a packet, cut to what the
 * message may quote. */
__noinline bool weft_make_unreachable(struct __sk_buff *skb)
{
	struct translation *t = translation();
	struct icmp_header *icmp;
	__u64 sum, whole, header;
	__u32 quote, most;
	__u16 checksum;
	bool v4;

	if (!t || t->network != ETH_HLEN)
		return false;
	v4 = family_at(t) == FAMILY_IPV4;
	icmp = &t->answer.icmp;
	icmp->type = v4 ? ICMP4_UNREACHABLE : ICMP6_UNREACHABLE;
	icmp->code = v4 ? ICMP4_PORT_UNREACHABLE : ICMP6_PORT_UNREACHABLE;
	icmp->check = 0;
	icmp->unused = 0;
	most = v4 ? ICMP4_ERROR_BYTES - sizeof(struct iphdr) :
		    ICMP6_ERROR_BYTES - sizeof(struct ipv6hdr);
	quote = t->end - t->network;
	if (quote > most - sizeof(*icmp))
		quote = most - sizeof(*icmp);
	if (!cut(skb, t->network + quote) ||
	    bpf_skb_load_bytes(skb, t->transport + UDP_CHECKSUM_OFFSET, &checksum,
			       sizeof(checksum)))
		return false;
	header = weft_sum(skb, t->network, t->transport - t->network);
	whole = sum_of_quote(skb, t->network, quote);
	if (header == ~0ULL || whole == ~0ULL)
		return false;
	sum = (__u64)bpf_csum_diff(NULL, 0, (__be32 *)icmp, sizeof(*icmp), 0);
	if (!v4)
		sum += pseudo_sum(t, sizeof(*icmp) + quote, IPPROTO_ICMPV6);
	/* With a checksum that is yet to be filled in, all that it is over comes to
	 * the complement of what is in its place now. */
	icmp->check = ~fold(sum + header + (__u16)~checksum);
	whole = fold(sum + whole + icmp->check);
	most = v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	return !bpf_skb_adjust_room(skb, most + sizeof(*icmp), BPF_ADJ_ROOM_MAC, 0) &&
	       put_header(skb, t, sizeof(*icmp) + quote,
			  v4 ? IPPROTO_ICMP : IPPROTO_ICMPV6) &&
	       !bpf_skb_store_bytes(skb, t->network + most, icmp, sizeof(*icmp), 0) &&
	       !bpf_l4_csum_replace(skb, t->network + most +
					    offsetof(struct icmp_header, check),
				    0, whole, 0);
}

/* Answers a packet, of t->key, for which there is no backend, and returns what is to
 * become of it. It is dropped without an answer if none is due (to or from more than
 * one host), if there were too many, and if none can be made: for a packet with
 * options or extension headers, or a datagram with a VLAN tag within another, which
 * bpf_skb_adjust_room knows nothing of. */
__noinline int weft_answer(struct __sk_buff *skb, __u32 protocol)
{
	struct translation *t = translation();
	__u8 group;
	bool made;

	if (!t)
		return TC_ACT_SHOT;
	if (bpf_skb_load_bytes(skb, 0, &group, sizeof(group)) || group & 1 ||
	    !is_host(t) ||
	    t->transport - t->network != (family_at(t) == FAMILY_IPV4 ?
						  sizeof(struct iphdr) :
						  sizeof(struct ipv6hdr)))
		return TC_ACT_SHOT;
	if (protocol == PROTOCOL_TCP)
		made = weft_make_reset(skb);
	else
		made = take_turn(t) && weft_make_unreachable(skb);
	if (!made || !turn_frame(skb))
		return TC_ACT_SHOT;
	COUNT(answered);
	return bpf_redirect(skb->ifindex, 0);
}
