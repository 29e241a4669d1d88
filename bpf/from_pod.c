// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets that a pod of this node sends: are they the pod's, and whom are they
 * for?
 * Attached to tc or tcx ingress of the host's side of its device. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/pod.h"

SEC("tc")
int weft_from_pod(struct __sk_buff *skb)
{
	return pod(skb, DIRECTION_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
