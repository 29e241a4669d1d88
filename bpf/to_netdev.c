// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets that leave to a device of the node: whom are they for, and
 * whose are they?
 * Attached to tc or tcx egress. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/identify.h"

SEC("tc")
int weft_to_netdev(struct __sk_buff *skb)
{
	return identify(skb, DIRECTION_EGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
