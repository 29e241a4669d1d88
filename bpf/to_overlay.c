// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets that enter the overlay: to which node, and whose are they?
 * Attached to tc or tcx egress of its device. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/overlay.h"

SEC("tc")
int weft_to_overlay(struct __sk_buff *skb)
{
	return overlay(skb, DIRECTION_EGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
