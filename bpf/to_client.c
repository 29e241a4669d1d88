// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Packets from a backend to a client: from the service that it asked for instead.
 * Attached to tc or tcx egress of the device that leads to the client. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#define TO_CLIENT 1

#include "lib/translate.h"

SEC("tc")
int weft_to_client(struct __sk_buff *skb)
{
	return translate(skb);
}

char _license[] SEC("license") = "Dual BSD/GPL";
