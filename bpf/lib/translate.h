// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Services for packets that come from no local socket: the destination of what a
 * client sends becomes a backend, and the source of what that answers the service
 * again. The client's address stays, so that a backend knows whom it talks to, and
 * answers must come back through this node. TO_CLIENT says of which of the two this
 * is compiled for: a constant, since without CAP_PERFMON the verifier refuses code
 * that two constants reach.
 *
 * Both happen at the device that leads to the client: what it sends comes in there
 * whatever it is for, and answers go out there wherever they come from, a backend
 * on this very node, another device or the overlay. The IP layer between sees the
 * client and the backend only, in both directions. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "conntrack.h"
#include "consts.h"
#include "parse.h"
#include "service.h"
#include "structs.h"

/* How many slots are looked into for a backend that can be had: not the client
 * itself, and not one that the client's port talks to already. */
#define BACKEND_TRIES 8

#define TCP_CHECKSUM_OFFSET 16
#define TCP_HEADER_BYTES 20
#define UDP_CHECKSUM_OFFSET 6
#define UDP_HEADER_BYTES 8
#define ICMP_CHECKSUM_OFFSET 2
#define ICMP_HEADER_BYTES 8

#define IPV4_CHECKSUM_OFFSET 10
#define IPV4_ID_OFFSET 4
#define IPV4_SRC_OFFSET 12
#define IPV4_DST_OFFSET 16
#define IPV4_MORE_FRAGMENTS 0x2000
#define IPV6_NEXT_OFFSET 6
#define IPV6_SRC_OFFSET 8
#define IPV6_DST_OFFSET 24
#define IPV6_HEADER_BYTES 40

#define ICMP4_UNREACHABLE 3
#define ICMP4_TIME_EXCEEDED 11
#define ICMP4_PARAMETER 12
#define ICMP6_FIRST_INFORMATIONAL 128

/* What became of packets, by CPU. */
struct translated {
	__u64 requests;  /* packets to a backend */
	__u64 replies;   /* packets back to a client */
	__u64 errors;    /* ICMP errors about either */
	__u64 fragments; /* of the packets, those behind the first of a datagram */
	__u64 begun;     /* flows that were given a backend */
	/* dropped: */
	__u64 refused;   /* the service has no backend */
	__u64 hairpin;   /* the only backend is the client itself */
	__u64 clashes;   /* the client's port talks to each backend already */
	__u64 failed;    /* the kernel had no memory for it */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translated);
} weft_translated SEC(".maps");

/* What is known of the packet at hand, where all functions find it: it is too much
 * for the stack, and no pointer may be given to those that are verified by
 * themselves. Those are all that have more than a few ways through: without
 * CAP_PERFMON, the verifier of 6.1 walks through every combination of them. A CPU
 * has one packet at hand at a time. */
struct translation {
	struct conntrack_words key;   /* of the packet */
	struct conntrack_words other; /* of those of the other direction */
	struct entry_words entry;     /* of key */
	struct entry_words back;      /* of other */
	struct words frontend; /* of key */
	struct fragment_key datagram;
	struct fragment fragment;
	__u32 network, transport, end; /* as in struct packet */
	__u32 pad;
	union scratch ip; /* of a quoted packet */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translation);
} weft_translation SEC(".maps");

static __always_inline struct translation *translation(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&weft_translation, &zero);
}

/* Not static: the number of the field is then a number like any other to the
 * verifier, which without CAP_PERFMON wants no code that two constants reach. */
__noinline int weft_count(__u64 field)
{
	__u32 zero = 0;
	__u64 *counts = bpf_map_lookup_elem(&weft_translated, &zero);

	if (counts && field < sizeof(struct translated) / sizeof(*counts))
		counts[field]++;
	return 0;
}

#define COUNT(what) \
	weft_count(offsetof(struct translated, what) / sizeof(__u64))

static __always_inline __u8 protocol_of(const struct translation *t)
{
	return t->key.rest >> 32;
}

static __always_inline __u8 family_at(const struct translation *t)
{
	return t->key.rest >> 40;
}

/* The key and the entry of the other direction, from those of this one. */
static __always_inline void turn(struct translation *t)
{
	__u64 src_port = t->key.rest & 0xffff;
	__u64 dst_port = t->key.rest >> 16 & 0xffff;
	__u64 new_port = t->entry.ends & 0xffff;

	if (TO_CLIENT) {
		t->other.src[0] = t->key.dst[0];
		t->other.src[1] = t->key.dst[1];
		t->other.dst[0] = t->entry.addr[0];
		t->other.dst[1] = t->entry.addr[1];
		t->other.rest = conntrack_rest(dst_port, new_port,
					       protocol_of(t), family_at(t), 0);
		t->back.addr[0] = t->key.src[0];
		t->back.addr[1] = t->key.src[1];
		t->back.ends = (t->entry.ends & ~0xffffULL) | src_port;
	} else {
		t->other.src[0] = t->entry.addr[0];
		t->other.src[1] = t->entry.addr[1];
		t->other.dst[0] = t->key.src[0];
		t->other.dst[1] = t->key.src[1];
		t->other.rest = conntrack_rest(new_port, src_port,
					       protocol_of(t), family_at(t),
					       CONNTRACK_REPLY);
		t->back.addr[0] = t->key.dst[0];
		t->back.addr[1] = t->key.dst[1];
		t->back.ends = (t->entry.ends & ~0xffffULL) | dst_port;
	}
	t->back.backend = t->entry.backend;
	t->back.used_ns = t->entry.used_ns;
	t->back.since_ns = t->entry.since_ns;
}

enum take {
	TAKE_DONE = 0,
	TAKE_ITSELF = 1, /* the backend is the client itself */
	TAKE_CLASH = 2,  /* another flow has what answers would be known by */
	TAKE_OTHER = 3,  /* it has just become something else */
	TAKE_FAILED = 4, /* there is no memory */
};

/* Takes what answers of the backend in t->entry will be known by. */
static __always_inline enum take claim(struct translation *t)
{
	const struct conntrack *has;
	long err;

	turn(t);
	err = bpf_map_update_elem(&weft_conntrack, &t->other, &t->back,
				  BPF_NOEXIST);
	if (!err)
		return TAKE_DONE;
	has = bpf_map_lookup_elem(&weft_conntrack, &t->other);
	if (!has)
		return TAKE_FAILED;
	if ((has->addr.d1 != t->back.addr[0] || has->addr.d2 != t->back.addr[1] ||
	     has->port != (__u16)t->back.ends) &&
	    !is_closed(has) &&
	    !is_over(has, protocol_of(t), t->back.used_ns))
		return TAKE_CLASH;
	err = bpf_map_update_elem(&weft_conntrack, &t->other, &t->back, BPF_ANY);
	return err ? TAKE_FAILED : TAKE_DONE;
}

/* The number of the service that t->key is to; 0: to none. */
__noinline __u32 weft_find_service(void)
{
	struct translation *t = translation();

	if (!t)
		return 0;
	t->frontend.w[0] = t->key.dst[0];
	t->frontend.w[1] = t->key.dst[1];
	t->frontend.w[2] = transport_word(t->key.rest >> 16, t->key.rest >> 32,
					  family_at(t));
	return find_service(&t->frontend);
}

/* Tells of a flow that is to a service without backends. */
__noinline int weft_refuse_flow(__u32 number)
{
	struct translation *t = translation();
	struct service *service = service_of(number);

	if (t && service)
		note_refusal(service, &t->frontend);
	COUNT(refused);
	return 0;
}

/* The number of a backend for a new flow, of t->key: the one that its hash comes to,
 * or so many slots behind that. 0: the service has none. */
__noinline __u32 weft_choose_backend(__u32 number, __u32 further)
{
	struct translation *t = translation();
	struct service *service = service_of(number);
	__u64 client, hash;

	if (!t || !service)
		return 0;
	/* The number of no network namespace has its highest bit set. */
	client = mix(t->key.src[0] ^ mix(t->key.src[1])) | 1ULL << 63;
	if (!further && READ_ONCE(service->affinity))
		return affine_backend(service, number, client);
	hash = mix(client ^ (t->key.rest & 0xffffffffffff) ^
		   mix(t->key.dst[0] ^ mix(t->key.dst[1])));
	return backend_at(READ_ONCE(service->choice), hash >> 32, further);
}

/* Gives a new flow, of t->key, a backend, and fills in t->entry. */
__noinline int weft_take_backend(__u32 number, __u32 chosen)
{
	struct translation *t = translation();
	const struct backend *backend = backend_of(chosen);
	struct service *service = service_of(number);
	enum take took;

	if (!t || !service || !backend || backend->at.family != family_at(t))
		return TAKE_OTHER;
	if (backend->at.addr.d1 == t->key.src[0] &&
	    backend->at.addr.d2 == t->key.src[1])
		return TAKE_ITSELF;
	t->entry.addr[0] = backend->at.addr.d1;
	t->entry.addr[1] = backend->at.addr.d2;
	t->entry.ends = backend->at.port | SEEN_PACKET << 16 |
			(__u64)number << 32;
	t->entry.backend = chosen | (__u64)READ_ONCE(backend->generation) << 32;
	t->entry.used_ns = bpf_ktime_get_ns();
	t->entry.since_ns = t->entry.used_ns;
	took = claim(t);
	if (took != TAKE_DONE)
		return took;
	if (bpf_map_update_elem(&weft_conntrack, &t->key, &t->entry, BPF_ANY))
		return TAKE_FAILED;
	__sync_fetch_and_add(&service->chosen, 1);
	return TAKE_DONE;
}

/* Gives a new flow, of t->key, a backend of the service that it is to, and fills in
 * t->entry. The backend depends on both ends alone, as long as the service has the
 * same ones: a flow that was forgotten gets on with it, and with Maglev on another
 * node, too. False: there is none, and the packet is to be dropped.
 *
 * What a try takes is in functions of their own, and there is no loop: without
 * CAP_PERFMON, the verifier thinks of CPUs that guess that one goes on for ever. */
__noinline bool weft_begin_flow(__u32 number)
{
	bool itself = false;
	__u32 chosen;

#pragma unroll
	for (int i = 0; i < BACKEND_TRIES; i++) {
		chosen = weft_choose_backend(number, i);
		if (!chosen) {
			weft_refuse_flow(number);
			return false;
		}
		switch (weft_take_backend(number, chosen)) {
		case TAKE_DONE:
			COUNT(begun);
			return true;
		case TAKE_FAILED:
			COUNT(failed);
			return false;
		case TAKE_ITSELF:
			itself = true;
		}
	}
	if (itself)
		COUNT(hairpin);
	else
		COUNT(clashes);
	return false;
}

/* Notes in an entry what was seen of one end. */
static __always_inline void
note_seen(struct conntrack *entry, __u8 seen, __u64 now)
{
	if (TO_CLIENT)
		entry->server |= seen;
	else
		entry->client |= seen;
	entry->used_ns = now;
}

/* Notes in the entry of the other direction what was seen in t->key's, or puts it
 * back, if the map gave it up. */
__noinline int weft_touch_other(__u32 seen)
{
	struct translation *t = translation();
	struct conntrack *other;

	if (!t)
		return 0;
	turn(t);
	other = bpf_map_lookup_elem(&weft_conntrack, &t->other);
	if (!other) {
		bpf_map_update_elem(&weft_conntrack, &t->other, &t->back,
				    BPF_NOEXIST);
		return 0;
	}
	if (other->addr.d1 != t->back.addr[0] ||
	    other->addr.d2 != t->back.addr[1] ||
	    other->port != (__u16)t->back.ends)
		return 0; /* of a later flow */
	note_seen(other, seen, t->back.used_ns);
	return 0;
}

/* Whether a packet, of t->key, goes on with a flow. If so, t->entry is its entry. */
__noinline bool weft_goes_on(__u32 flags)
{
	struct translation *t = translation();
	struct conntrack *entry;
	__u8 seen = SEEN_PACKET, before, protocol;
	__u64 now;

	if (!t)
		return false;
	protocol = protocol_of(t);
	entry = bpf_map_lookup_elem(&weft_conntrack, &t->key);
	if (!entry)
		return false;
	now = bpf_ktime_get_ns();
	if (protocol == PROTOCOL_TCP) {
		if (flags & TCP_FIN)
			seen |= SEEN_FIN;
		if (flags & TCP_RST)
			seen |= SEEN_RST;
	}
	if (is_over(entry, protocol, now))
		return false;
	if (TO_CLIENT) {
		/* The client has come to talk to the backend itself. */
		if (flags & TCP_SYN && is_closed(entry)) {
			bpf_map_delete_elem(&weft_conntrack, &t->key);
			return false;
		}
	} else if (protocol == PROTOCOL_UDP) {
		if (!keeps_backend(entry))
			return false;
	} else if (flags & TCP_SYN) {
		/* The client begins anew, or tries again. */
		if (is_closed(entry) ||
		    (!entry->server && !keeps_backend(entry)))
			return false;
	}
	before = TO_CLIENT ? entry->server : entry->client;
	if (seen & ~before || now - entry->used_ns > CONNTRACK_TOUCH_NS) {
		note_seen(entry, seen, now);
		t->entry = *(struct entry_words *)entry;
		weft_touch_other(seen);
		return true;
	}
	t->entry = *(struct entry_words *)entry;
	return true;
}

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
		if (!service)
			return TC_ACT_UNSPEC;
		if (!weft_begin_flow(service))
			return TC_ACT_SHOT;
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
	const struct conntrack *entry;
	__u32 transport, ports;
	union scratch *ip;
	__u8 protocol;

	if (!t)
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
	entry = bpf_map_lookup_elem(&weft_conntrack, &t->other);
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

/* Fills in what is known of a packet but for the ports and what is above, and returns
 * its protocol; -1: it has no addresses. */
__noinline int weft_read_packet(struct __sk_buff *skb)
{
	struct translation *t = translation();
	struct addresses addresses = {};
	struct packet packet = {};
	union scratch scratch;

	if (!t || parse_network(skb, &packet, &addresses, &scratch))
		return -1;
	t->key.src[0] = addresses.src[0];
	t->key.src[1] = addresses.src[1];
	t->key.dst[0] = addresses.dst[0];
	t->key.dst[1] = addresses.dst[1];
	t->key.rest = (__u64)packet.family << 40;
	t->network = packet.network;
	t->transport = packet.transport;
	t->end = packet.end;
	return packet.protocol;
}

/* Changes a packet that belongs to a service. Its fate is left to the next program,
 * unless it is to go nowhere. */
static __always_inline int translate(struct __sk_buff *skb)
{
	int protocol = weft_read_packet(skb);
	struct translation *t = translation();

	if (protocol < 0 || !t)
		return TC_ACT_UNSPEC;
	if (!t->transport)
		return weft_translate_fragment(skb, protocol);
	switch (protocol) {
	case PROTOCOL_TCP:
	case PROTOCOL_UDP:
		return weft_translate_flow(skb, protocol);
	case IPPROTO_ICMP:
		return family_at(t) == FAMILY_IPV4 ? weft_translate_error(skb) :
						     TC_ACT_UNSPEC;
	case IPPROTO_ICMPV6:
		return family_at(t) == FAMILY_IPV6 ? weft_translate_error(skb) :
						     TC_ACT_UNSPEC;
	}
	return TC_ACT_UNSPEC;
}
