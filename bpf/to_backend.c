// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets from a client to a service: to a backend of it instead.
 * Attached to tc or tcx ingress of the device that leads to the client. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#define TO_CLIENT 0

#include "lib/translate.h"

SEC("tc")
int weft_to_backend(struct __sk_buff *skb)
{
	return translate(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
