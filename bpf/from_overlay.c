// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets that come out of the overlay: are they whose they say that they are?
 * Attached to tc or tcx ingress of its device. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/overlay.h"

SEC("tc")
int weft_from_overlay(struct __sk_buff *skb)
{
	return overlay(skb, DIRECTION_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
