// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* From an address to the identity behind it: the fast path, then ipcache. */
#pragma once

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "hosts.h"
#include "maps.h"
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

/* The identity of an address, which is filled in in the key; the rest of an IPv4
 * address is 0. IDENTITY_NONE: there is no entry, or one that says nothing. */
static __always_inline __u32
find_identity(__u8 family, struct ipcache_key *key)
{
	__u32 identity = family == FAMILY_IPV4 ?
				 weft_find_host4(key->ip6.p1) :
				 weft_find_host6(key->ip6.d1, key->ip6.d2);

	return identity ? identity : find_prefix(family, key);
}
