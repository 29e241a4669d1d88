// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* The host's side of the devices of this node's own pods: traffic between two of
 * them passes no other device, and only here is it certain which pod a packet
 * is from. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "identify.h"
#include "maps.h"
#include "parse.h"
#include "structs.h"

/* Sources that nobody routes and everybody may use: none yet (DHCP, duplicate
 * address detection), and those of the link (fe80::/10). */
static __always_inline bool is_of_link(__u8 family, const __u64 *src)
{
	if (family == FAMILY_IPV4)
		return src[0] == 0;
	return (src[0] | src[1]) == 0 || (src[0] & 0xc0ff) == 0x80fe;
}

/* Whether the source is an address of the pod behind the device. */
static __always_inline bool
is_own_address(struct __sk_buff *skb, __u8 family, const __u64 *src,
	       union scratch *key)
{
	if (is_of_link(family, src))
		return true;
	/* a struct pod_key */
	key->words[0] = skb->ifindex | (__u64)family << 32;
	key->words[1] = src[0];
	key->words[2] = src[1];
	return bpf_map_lookup_elem(&weft_pods, key) != NULL;
}

/* As identify, and a packet from the pod is held against its addresses. */
static __always_inline int
pod(struct __sk_buff *skb, const enum direction direction)
{
	struct finding found = { .mode = MODE_POD };
	struct addresses addresses = {};
	struct packet packet = {};
	const struct config *config;
	union scratch scratch;

	scratch.words[0] = 0; /* the key */
	config = bpf_map_lookup_elem(&weft_config, &scratch);
	if (!config)
		return TC_ACT_UNSPEC;
	found.verdict = parse_network(skb, &packet, &addresses, &scratch);
	if (found.verdict == VERDICT_NONE) {
		identify_ends(config, direction, packet.family, &addresses,
			      &found);
		if (direction == DIRECTION_INGRESS && config->pod_check &&
		    !is_own_address(skb, packet.family, addresses.src,
				    &scratch))
			found.verdict = VERDICT_SPOOFED;
	}
	report(skb, config, direction, &found);
	if (found.verdict == VERDICT_SPOOFED &&
	    config->pod_check == POD_CHECK_DROP)
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}
