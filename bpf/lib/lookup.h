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

/* The identity of an address, of which an IPv4 one is the first half of d1 and
 * the rest 0. IDENTITY_NONE: there is no entry, or one that says nothing.
 *
 * Not static: verified once, by itself, whatever else a program does. */
__noinline __u32 weft_find_identity(__u32 family, __u64 d1, __u64 d2)
{
	struct {
		__u64 head, d1, d2;
	} key;
	__u32 identity;

	identity = family == FAMILY_IPV4 ? find_host4(d1) :
					   weft_find_host6(d1, d2);
	if (identity)
		return identity;
	key.d1 = d1;
	key.d2 = d2;
	return find_prefix(family, (struct ipcache_key *)&key);
}

static __always_inline __u32
find_identity(__u8 family, const union v6addr *addr)
{
	return weft_find_identity(family, addr->d1, addr->d2);
}
