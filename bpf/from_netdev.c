// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets that arrive from a device of the node: whose are they, and
 * whom are they for?
 * Attached to tc or tcx ingress. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/identify.h"

SEC("tc")
int weft_from_netdev(struct __sk_buff *skb)
{
	return identify(skb, DIRECTION_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
