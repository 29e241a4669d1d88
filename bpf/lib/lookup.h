// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* From an address to the identity behind it: the fast path, which is a network
 * full of hosts or the table of the others, then ipcache. */
#pragma once

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "hosts.h"
#include "maps.h"
#include "networks.h"
#include "structs.h"

/* Writes the first word of a key as one. Without CAP_PERFMON, the verifiers of
 * some kernels (6.1 is one) refuse to have part of a stack word written over. */
static __always_inline void write_head(void *key, __u64 word)
{
	__builtin_memcpy(__builtin_assume_aligned(key, 8), &word, sizeof(word));
}

/* Fills in the key but for its address, and asks ipcache. */
static __always_inline __u32
find_prefix(__u8 family, struct ipcache_key *key)
{
	const struct ipcache_value *value;
	__u32 bits = family == FAMILY_IPV4 ? 32 : 128;

	/* prefixlen and family; cluster_id and pad1 are 0 */
	write_head(key, IPCACHE_STATIC_BITS + bits | (__u64)family << 56);
	value = bpf_map_lookup_elem(&ipcache, key);
	return value ? value->sec_identity : IDENTITY_NONE;
}

/* Of how, beside the family: weft_fast is kept right. */
#define FIND_FAST 0x200

/* The identity of an address that is in no network full of hosts.
 *
 * Not static: verified once, by itself, whatever else a program does. */
__noinline __u32 weft_find_identity(__u32 how, __u64 d1, __u64 d2)
{
	struct {
		__u64 head, d1, d2;
	} key;
	const struct fast_head *head;
	__u32 family = how & 0xff;
	__u32 identity = IDENTITY_NONE;

	head = fast_head(family);
	if (!head || !(how & FIND_FAST) || among_others(head, family, d1))
		identity = family == FAMILY_IPV4 ? weft_find_host4(d1) :
						   weft_find_host6(d1, d2);
	if (identity)
		return identity;
	key.d1 = d1;
	key.d2 = d2;
	return find_prefix(family, (struct ipcache_key *)&key);
}

/* The identity that the networks full of hosts have for an address, of which an
 * IPv4 one is the first half of d1 and the rest 0. */
static __always_inline __u32
find_in_network(const struct fast_head *head, __u32 family, __u64 d1, __u64 d2)
{
	return likely(family == FAMILY_IPV4) ? find_in_network4(head, d1) :
					       find_in_network6(head, d1, d2);
}

/* The same, where it is not on the way of nearly every packet. */
__noinline __u32 weft_find_in_network(__u32 family, __u64 d1, __u64 d2)
{
	const struct fast_head *head = fast_head(family);

	return head ? find_in_network(head, family, d1, d2) : IDENTITY_NONE;
}

/* The identity of an address. IDENTITY_NONE: there is no entry, or one that says
 * nothing. */
static __always_inline __u32 find_identity(__u32 how, __u64 d1, __u64 d2)
{
	__u32 identity = IDENTITY_NONE;

	if (how & FIND_FAST)
		identity = weft_find_in_network(how & 0xff, d1, d2);
	return identity ? identity : weft_find_identity(how, d1, d2);
}
