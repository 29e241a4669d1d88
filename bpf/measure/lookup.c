// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Lookups by the very code of the programs that ship: each address comes from a
 * list, as with real traffic.
 *
 * The programs measure_* make many in one run, of which none begins before the
 * last has ended, as with real packets. measure_nothing does all but the lookup:
 * what it takes is to be subtracted. The programs try_* make one in a run, and go
 * on where they ended: kernels before 5.17 have no bpf_loop. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "../lib/lookup.h"
#include "../lib/near.h"

struct measurement {
	__u32 lookups; /* to be made */
	__u32 at;      /* in the list, where to begin and where it ended */
	__u32 length;  /* of the list */
	__u32 known;   /* lookups with an identity */
	__u32 last;    /* the identity that the last lookup found */
	__u32 wrong;   /* try_check: identities of other addresses */
	__u32 stale;   /* try_check: older than one that was seen before */
	__u32 absent;  /* try_check: none, where there always is one */
};

/* Of the identities that try_check expects, the low bits count the changes
 * of the entry, the others are a checksum of the address. */
#define VERSION_BITS 12

/* prefixlen is 0. For try_check, pad1 tells that there always is an entry,
 * and cluster_id is the newest version that was seen. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ipcache_key);
} measure_list SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct measurement);
} measure_order SEC(".maps");

enum way { NOTHING, TRIE, IDENTITY, NEAR, CHECK };

static __always_inline __u32 checksum(const union v6addr *addr)
{
	__u32 sum = addr->p1 ^ addr->p2 * 3 ^ addr->p3 * 5 ^ addr->p4 * 7;

	return sum * 0x9e3779b1 >> (VERSION_BITS + 1);
}

static __always_inline void
check(struct measurement *m, struct ipcache_key *listed, __u32 identity)
{
	__u16 version = identity & ((1 << VERSION_BITS) - 1);

	if (identity == IDENTITY_NONE) {
		m->absent += listed->pad1;
		return;
	}
	if (identity >> VERSION_BITS != checksum(&listed->ip6))
		m->wrong++;
	else if (version < listed->cluster_id)
		m->stale++;
	else
		listed->cluster_id = version;
}

/* As the native programs do it, for the sake of the time that it takes. */
static __always_inline __u32
recognize_identity(__u32 family, __u64 d1, __u64 d2)
{
	const struct fast_head *head = fast_head(family);
	__u32 identity = IDENTITY_NONE;

	if (head)
		identity = find_in_network(head, family, d1, d2);
	return identity ? identity : weft_find_identity(family | FIND_FAST, d1, d2);
}

static __always_inline long
step(struct measurement *m, const enum way way)
{
	struct ipcache_key key __attribute__((aligned(8)));
	struct ipcache_key *next;
	__u32 identity;

	next = bpf_map_lookup_elem(&measure_list, &m->at);
	if (!next)
		return 1;
	__builtin_memcpy(&key, next, sizeof(key));
	if (way == IDENTITY || way == CHECK)
		identity = recognize_identity(next->family, key.ip6.d1, key.ip6.d2);
	else if (way == NEAR)
		identity = near_identity(next->family | FIND_FAST, key.ip6.d1, key.ip6.d2);
	else if (way == TRIE)
		identity = find_prefix(next->family, &key);
	else
		identity = next->ip6.p1 >> 1;
	if (way == CHECK)
		check(m, next, identity);
	m->known += identity != IDENTITY_NONE;
	m->last = identity;
	/* No identity has the top bit, but no compiler and no CPU knows. */
	m->at += 1 + (identity >> 31);
	if (m->at >= m->length)
		m->at = 0;
	return 0;
}

static long step_nothing(__u32 i, struct measurement *m)
{
	return step(m, NOTHING);
}

static long step_trie(__u32 i, struct measurement *m)
{
	return step(m, TRIE);
}

static long step_identity(__u32 i, struct measurement *m)
{
	return step(m, IDENTITY);
}

static __always_inline int
measure(long (*step)(__u32, struct measurement *))
{
	struct measurement m, *order;
	__u32 zero = 0;

	order = bpf_map_lookup_elem(&measure_order, &zero);
	if (!order)
		return 1;
	m = *order;
	bpf_loop(m.lookups, step, &m, 0);
	*order = m;
	return 0;
}

SEC("tc")
int measure_nothing(struct __sk_buff *skb)
{
	return measure(step_nothing);
}

SEC("tc")
int measure_trie(struct __sk_buff *skb)
{
	return measure(step_trie);
}

SEC("tc")
int measure_identity(struct __sk_buff *skb)
{
	return measure(step_identity);
}

static __always_inline int try(const enum way way)
{
	struct measurement *order;
	__u32 zero = 0;

	order = bpf_map_lookup_elem(&measure_order, &zero);
	return order ? step(order, way) : 1;
}

SEC("tc")
int try_identity(struct __sk_buff *skb)
{
	return try(IDENTITY);
}

SEC("tc")
int try_near(struct __sk_buff *skb)
{
	return try(NEAR);
}

/* Counts answers that no order of writes makes right. */
SEC("tc")
int try_check(struct __sk_buff *skb)
{
	return try(CHECK);
}

/* A program that does nothing, on the hook of those that ship. */
SEC("tc")
int measure_empty(struct __sk_buff *skb)
{
	return -1;
}

char _license[] SEC("license") = "Dual BSD/GPL";
