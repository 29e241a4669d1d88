// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* The hosts of networks that are full of them, /24 or /120, as those of pods are:
 * four bytes for each address of the network, side by side. ../networks.go is
 * the writer.
 *
 * All is words, in tables of one size that stand behind each other: the directory,
 * whose place and size is the shape, and the blocks, one for each network. The
 * directory is a hash table that only grows: a place that a network has, it keeps
 * until programs have another shape. Of IPv4, a place is one word, the network and
 * in the upper half its block. Of IPv6, it is the network in two words, and the
 * block, which is written after them and read before. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "hosts.h"
#include "maps.h"
#include "structs.h"

/* NULL is for callers that know that the head is not kept right. */
static __always_inline const struct fast_head *fast_head(__u32 family)
{
	__u32 which = family == FAMILY_IPV4 ? 0 : 1;

	return bpf_map_lookup_elem(&weft_fast, &which);
}

/* A word of all, 0 if it is not there. The key is memory that serves them all: slots
 * of the stack do not serve twice by themselves (../gen.go). */
static __always_inline __u64 networks_word(__u64 *key, __u32 index)
{
	const __u64 *word;
	void *table;

	*key = index >> NETWORKS_CHUNK_SHIFT;
	table = bpf_map_lookup_elem(&weft_networks, key);
	if (unlikely(!table))
		return 0;
	*key = index & (NETWORKS_CHUNK_WORDS - 1);
	word = bpf_map_lookup_elem(table, key);
	return likely(word) ? READ_ONCE(*word) : 0;
}

/* The same, read after x was. */
static __always_inline __u64
networks_word_after(__u64 *key, __u32 index, __u64 x)
{
	asm volatile("%0 &= 0" : "+r"(x));
	return networks_word(key, index + x);
}

static __always_inline __u32
block_identity(__u64 *key, __u64 block, __u32 host)
{
	return networks_word(key, block * BLOCK_WORDS + host / 2) >>
	       host % 2 * 32;
}

/* Whether the table of hosts.h may have an address. */
static __always_inline bool
among_others(const struct fast_head *head, __u32 family, __u64 d1)
{
	__u64 network = family == FAMILY_IPV4 ? d1 & 0xffffff : d1;
	__u64 bit = hash_word(head->seeds, network) >> OTHERS_SHIFT;

	return READ_ONCE(head->others) >> bit & 1;
}

/* The identity that the network of an IPv4 address has for it; IDENTITY_NONE if it is
 * to be looked for elsewhere. */
static __always_inline __u32
find_in_network4(const struct fast_head *head, __u32 addr)
{
	__u64 shape = READ_ONCE(head->shape);
	__u32 network = addr & 0xffffff;
	__u32 at = hash_word(head->seeds, network) >> 32;
	__u64 place, key;

	if (!shape)
		return IDENTITY_NONE;
#pragma unroll
	for (int i = 0; i < NETWORKS_PROBES; i++) {
		place = networks_word(&key, shape + (at + i & shape >> 32));
		if (!place)
			break;
		if (likely((__u32)place == network))
			return block_identity(&key, place >> 32, addr >> 24);
	}
	return IDENTITY_NONE;
}

/* The same for an IPv6 address. */
static __always_inline __u32
find_in_network6(const struct fast_head *head, __u64 d1, __u64 d2)
{
	__u64 shape = READ_ONCE(head->shape);
	__u64 network = d2 << 8 >> 8;
	__u64 hash = hash_word(head->seeds, d1);
	__u32 at, place;
	__u64 block, key;

	if (!shape)
		return IDENTITY_NONE;
	hash = (hash ^ hash >> 32 ^ swap_halves(network)) * head->seeds[2];
	at = hash >> 32;
#pragma unroll
	for (int i = 0; i < NETWORKS_PROBES; i++) {
		place = shape + (at + i & shape >> 32) * 4;
		block = networks_word(&key, place + 2);
		if (!block)
			break;
		if (likely(networks_word_after(&key, place, block) == d1 &&
			   networks_word_after(&key, place + 1, block) == network))
			return block_identity(&key, block, d2 >> 56);
	}
	return IDENTITY_NONE;
}
