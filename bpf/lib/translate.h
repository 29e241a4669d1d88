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

#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "flow.h"
#include "parse.h"
#include "quoted.h"
#include "rewrite.h"

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
