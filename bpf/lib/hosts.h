// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Hosts of networks that have few of them (networks.h has the others): for each
 * family, a hash table that one lookup costs one or two cache lines. User space
 * writes it through memory while programs read it; ../hosts.go is the writer.
 *
 * A table is an array of lines of 64 bytes: the head; the summary; for each group
 * a line with the tags of its 8 buckets of 8 slots, one byte a slot, 0 for an
 * empty one; the slots. The summary has a bit for each network, /24 or /64, or
 * for several: 0 if there is no host in any of them. An address belongs into
 * either of two buckets of one group. Summary and tags are the small part that
 * stays in the CPU's caches, and for nearly all addresses without an entry they
 * are all that is read.
 *
 * Whatever is not found here, for whatever reason, is asked of ipcache, which
 * has everything. The only promise of a table is that ipcache has what it has. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "maps.h"
#include "structs.h"

/* Words that user space may be writing: each is read once, whole. */
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))

#define TAG_ONES 0x0101010101010101ULL
#define TAG_HIGHS 0x8080808080808080ULL

/* A search through the slots whose tag is that of the address. */
struct search {
	void *table;
	__u64 key;              /* memory for keys of maps */
	__u32 slots;            /* the line where they begin */
	__u32 first, second;    /* buckets, of all groups */
	__u64 found, in_second; /* a bit for each slot that is not looked into yet */
};

/* What networks are told apart by. The seeds are secret and of each table its
 * own: who chooses addresses cannot choose buckets. */
static __always_inline __u64 hash_word(const __u64 *seeds, __u64 word)
{
	return (word ^ seeds[0]) * seeds[1];
}

/* Products carry bits upwards alone, and what tells hosts apart may be the upper
 * bits of a word. */
static __always_inline __u64 swap_halves(__u64 word)
{
	return word << 32 | word >> 32;
}

static __always_inline __u64
hash_host(const struct hosts_head *head, __u64 network_hash, __u64 host)
{
	__u64 h = (network_hash ^ network_hash >> 32 ^ swap_halves(host)) * head->seeds[2];

	h = (h ^ h >> 29) * HOSTS_MULTIPLIER;
	return h ^ h >> 32;
}

/* A number below bound, by the upper half of a hash. */
static __always_inline __u64 below(__u64 hash, __u64 bound)
{
	return (hash >> 32) * bound >> 32;
}

/* The top bit of each byte of tags that equals tag. A byte above such a one
 * may be set, too; the key in the slot decides. */
static __always_inline __u64 matches(__u64 tags, __u8 tag)
{
	__u64 x = tags ^ tag * TAG_ONES;

	return (x - TAG_ONES) & ~x & TAG_HIGHS;
}

/* The number of the byte of which only the top bit is set. */
static __always_inline __u32 byte_of(__u64 bit)
{
	return (bit >> 7) * 0x0001020304050607ULL >> 56;
}

/* p, which for the CPU depends on x: what is read through it is read after x
 * was, on machines, too, that else do not promise it. */
static __always_inline const __u64 *after(const __u64 *p, __u64 x)
{
	asm volatile("%0 &= 0" : "+r"(x));
	return (const void *)p + x;
}

/* A word of a line. Where the number is bounded far from its use, compilers
 * leave the bound to be proved by verifiers, and that of 6.1 cannot. */
static __always_inline __u64 word_of(const struct hosts_line *line, __u64 i)
{
	asm volatile("%0 &= 7" : "+r"(i));
	return READ_ONCE(line->words[i]);
}

static __always_inline const struct hosts_line *
hosts_line(struct search *s, __u32 index)
{
	s->key = index;
	return bpf_map_lookup_elem(s->table, &s->key);
}

/* Reads the summary, and the tags of the two buckets of an address; false if
 * there is nothing to look into. */
static __always_inline bool
search(struct search *s, __u32 which, __u64 network, __u64 host)
{
	const struct hosts_line *line;
	const struct hosts_head *head;
	__u64 hash, bit, group;
	__u32 first, second;
	__u8 tag;

	s->key = which;
	s->table = bpf_map_lookup_elem(&weft_hosts, &s->key);
	if (!s->table)
		return false;
	line = hosts_line(s, 0);
	if (!line)
		return false;
	head = (const struct hosts_head *)line;
	if (head->layout != HOSTS_LAYOUT)
		return false;

	hash = hash_word(head->seeds, network);
	bit = below(hash, head->summary * 512);
	line = hosts_line(s, 1 + bit / 512);
	if (!line || !(word_of(line, bit / 64) >> bit % 64 & 1))
		return false;

	hash = hash_host(head, hash, host);
	group = below(hash, head->groups);
	first = hash >> 8 & 7;
	second = first ^ (hash >> 11 & 6) ^ 1;
	tag = hash;
	if (!tag)
		tag = 1;
	s->slots = 1 + head->summary + head->groups;
	s->first = group * 8 + first;
	s->second = group * 8 + second;
	line = hosts_line(s, 1 + head->summary + group);
	if (!line)
		return false;
	s->found = matches(word_of(line, first), tag);
	s->in_second = matches(word_of(line, second), tag);
	return s->found | s->in_second;
}

/* The next slot to look into; false at the end. */
static __always_inline bool next_slot(struct search *s, __u32 *slot)
{
	__u64 bit;

	if (!s->found) {
		if (!s->in_second)
			return false;
		s->found = s->in_second;
		s->in_second = 0;
		s->first = s->second;
	}
	bit = s->found & -s->found;
	s->found ^= bit;
	*slot = s->first * 8 + byte_of(bit);
	return true;
}

/* The identity that the table has for an IPv4 address; IDENTITY_NONE if it is to
 * be asked of ipcache. Not static, and so verified once, by itself.
 *
 * A slot is one word, so what is read of it is always a whole entry. */
__noinline __u32 weft_find_host4(__u32 addr)
{
	const struct hosts_line *line;
	struct search s;
	__u64 word;
	__u32 slot;

	if (!search(&s, 0, addr & 0xffffff, addr >> 24))
		return IDENTITY_NONE;
#pragma unroll
	for (int i = 0; i < HOSTS_PROBES; i++) {
		if (!next_slot(&s, &slot))
			break;
		line = hosts_line(&s, s.slots + slot / 8);
		if (!line)
			break;
		word = word_of(line, slot);
		if ((__u32)word == addr)
			return word >> 32;
	}
	return IDENTITY_NONE;
}

/* The same for an IPv6 address.
 *
 * A slot is two words of address and one with the identity and a number that
 * no two writes of the slot have in common, which frames the reading of the
 * others; while they are written, the identity is 0. */
__noinline __u32 weft_find_host6(__u64 d1, __u64 d2)
{
	__u64 a, b, before, behind, half;
	const struct hosts_line *line;
	const __u64 *words;
	struct search s;
	__u32 slot;

	if (!search(&s, 1, d1, d2))
		return IDENTITY_NONE;
#pragma unroll
	for (int i = 0; i < HOSTS_PROBES; i++) {
		if (!next_slot(&s, &slot))
			break;
		line = hosts_line(&s, s.slots + slot / 2);
		if (!line)
			break;
		half = slot * 4;
		asm volatile("%0 &= 4" : "+r"(half));
		words = &line->words[half];
		before = READ_ONCE(words[2]);
		words = after(words, before);
		a = READ_ONCE(words[0]);
		b = READ_ONCE(words[1]);
		words = after(words, a | b);
		behind = READ_ONCE(words[2]);
		if (a == d1 && b == d2)
			return before == behind ? before >> 32 : IDENTITY_NONE;
	}
	return IDENTITY_NONE;
}
