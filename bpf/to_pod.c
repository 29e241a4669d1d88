// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets that a pod of this node gets: whose are they?
 * Attached to tc or tcx egress of the host's side of its device. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/pod.h"

SEC("tc")
int weft_to_pod(struct __sk_buff *skb)
{
	return pod(skb, DIRECTION_EGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
