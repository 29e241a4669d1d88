// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Flows to services: what is known of the packet at hand, which flow it belongs to,
 * and the backend that a new one gets. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "conntrack.h"
#include "consts.h"
#include "parse.h"
#include "service.h"
#include "structs.h"

/* How many slots are looked into for a backend that can be had: not the client
 * itself, and not one that the client's port talks to already. */
#define BACKEND_TRIES 8

/* What became of packets, by CPU. */
struct translated {
	__u64 requests;  /* packets to a backend */
	__u64 replies;   /* packets back to a client */
	__u64 errors;    /* ICMP errors about either */
	__u64 fragments; /* of the packets, those behind the first of a datagram */
	__u64 begun;     /* flows that were given a backend */
	/* dropped, and of the first two some answered: */
	__u64 refused;   /* the service has no backend */
	__u64 hairpin;   /* the only backend is the client itself */
	__u64 clashes;   /* the client's port talks to each backend already */
	__u64 failed;    /* the kernel had no memory for it */
	__u64 answered;  /* of refused and hairpin, those whose client was told */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translated);
} weft_translated SEC(".maps");

/* Headers of what answers a packet that is dropped. */
struct tcp_header {
	__be16 src_port, dst_port;
	__be32 seq, ack;
	__u8 offset; /* of the data, in words, in the upper half */
	__u8 flags;
	__be16 window;
	__u16 check;
	__be16 urgent;
};

struct icmp_header {
	__u8 type, code;
	__u16 check;
	__u32 unused;
};

/* Of how many bytes a sum is taken at once: bpf_csum_diff can do no more. */
#define ANSWER_CHUNK 512

/* What is known of the packet at hand, where all functions find it: it is too much
 * for the stack, and no pointer may be given to those that are verified by
 * themselves. Those are all that have more than a few ways through: without
 * CAP_PERFMON, the verifier of 6.1 walks through every combination of them. A CPU
 * has one packet at hand at a time. */
struct translation {
	struct conntrack_words key;   /* of the packet */
	struct conntrack_words other; /* of those of the other direction */
	struct entry_words entry;     /* of key */
	struct entry_words back;      /* of other */
	struct words frontend; /* of key */
	union {
		struct conntrack_words words;
		struct conntrack_key key;
	} sought; /* what the conntrack before is asked for */
	struct conntrack found;
	struct fragment_key datagram;
	struct fragment fragment;
	__u32 network, transport, end; /* as in struct packet */
	__u32 pad;
	union scratch ip; /* of a quoted packet, or of an answer */
	union {
		struct tcp_header tcp;
		struct icmp_header icmp;
		__u64 words[3];
	} answer;
	__u8 chunk[ANSWER_CHUNK];
	/* Of the CPU: how many ICMP errors it has sent since when. */
	__u64 answers_since_ns, answers;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct translation);
} weft_translation SEC(".maps");

static __always_inline struct translation *translation(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&weft_translation, &zero);
}

/* Not static: the number of the field is then a number like any other to the
 * verifier, which without CAP_PERFMON wants no code that two constants reach. */
__noinline int weft_count(__u64 field)
{
	__u32 zero = 0;
	__u64 *counts = bpf_map_lookup_elem(&weft_translated, &zero);

	if (counts && field < sizeof(struct translated) / sizeof(*counts))
		counts[field]++;
	return 0;
}

#define COUNT(what) \
	weft_count(offsetof(struct translated, what) / sizeof(__u64))

static __always_inline __u8 protocol_of(const struct translation *t)
{
	return t->key.rest >> 32;
}

static __always_inline __u8 family_at(const struct translation *t)
{
	return t->key.rest >> 40;
}

/* The key and the entry of the other direction, from those of this one. */
static __always_inline void turn(struct translation *t)
{
	__u64 src_port = t->key.rest & 0xffff;
	__u64 dst_port = t->key.rest >> 16 & 0xffff;
	__u64 new_port = t->entry.ends & 0xffff;

	if (TO_CLIENT) {
		t->other.src[0] = t->key.dst[0];
		t->other.src[1] = t->key.dst[1];
		t->other.dst[0] = t->entry.addr[0];
		t->other.dst[1] = t->entry.addr[1];
		t->other.rest = conntrack_rest(dst_port, new_port,
					       protocol_of(t), family_at(t), 0);
		t->back.addr[0] = t->key.src[0];
		t->back.addr[1] = t->key.src[1];
		t->back.ends = (t->entry.ends & ~0xffffULL) | src_port;
	} else {
		t->other.src[0] = t->entry.addr[0];
		t->other.src[1] = t->entry.addr[1];
		t->other.dst[0] = t->key.src[0];
		t->other.dst[1] = t->key.src[1];
		t->other.rest = conntrack_rest(new_port, src_port,
					       protocol_of(t), family_at(t),
					       CONNTRACK_REPLY);
		t->back.addr[0] = t->key.dst[0];
		t->back.addr[1] = t->key.dst[1];
		t->back.ends = (t->entry.ends & ~0xffffULL) | dst_port;
	}
	t->back.backend = t->entry.backend;
	t->back.used_ns = t->entry.used_ns;
	t->back.since_ns = t->entry.since_ns;
}

/* Takes over the entry of t->sought from the conntrack before. False: it has none, or
 * there is no such conntrack. */
__noinline bool weft_take_over(void)
{
	struct translation *t = translation();
	void *now = conntrack_at(CONNTRACK_NOW);
	void *before = conntrack_at(CONNTRACK_BEFORE);
	const struct conntrack *entry;

	if (!t || !now || !before)
		return false;
	entry = bpf_map_lookup_elem(before, &t->sought);
	if (!entry)
		return false;
	t->found = *entry;
	/* User space may be faster, which is as well. */
	bpf_map_update_elem(now, &t->sought, &t->found, BPF_NOEXIST);
	return true;
}

/* The same for a key, if there is a conntrack before at all. */
static __always_inline bool
take_over(struct translation *t, const struct conntrack_words *key)
{
	if (!conntrack_at(CONNTRACK_BEFORE))
		return false;
	t->sought.words = *key;
	return weft_take_over();
}

enum take {
	TAKE_DONE = 0,
	TAKE_ITSELF = 1, /* the backend is the client itself */
	TAKE_CLASH = 2,  /* another flow has what answers would be known by */
	TAKE_OTHER = 3,  /* it has just become something else */
	TAKE_FAILED = 4, /* there is no memory */
};

/* Takes what answers of the backend in t->entry will be known by. */
static __always_inline enum take claim(struct translation *t)
{
	void *flows = conntrack_at(CONNTRACK_NOW);
	const struct conntrack *has;
	long err;

	if (!flows)
		return TAKE_FAILED;
	turn(t);
	take_over(t, &t->other);
	err = bpf_map_update_elem(flows, &t->other, &t->back, BPF_NOEXIST);
	if (!err)
		return TAKE_DONE;
	has = bpf_map_lookup_elem(flows, &t->other);
	if (!has)
		return TAKE_FAILED;
	if ((has->addr.d1 != t->back.addr[0] || has->addr.d2 != t->back.addr[1] ||
	     has->port != (__u16)t->back.ends) &&
	    !is_closed(has) &&
	    !is_over(has, protocol_of(t), t->back.used_ns))
		return TAKE_CLASH;
	err = bpf_map_update_elem(flows, &t->other, &t->back, BPF_ANY);
	return err ? TAKE_FAILED : TAKE_DONE;
}

/* The number of the service that t->key is to; 0: to none. */
__noinline __u32 weft_find_service(void)
{
	struct translation *t = translation();

	if (!t)
		return 0;
	t->frontend.w[0] = t->key.dst[0];
	t->frontend.w[1] = t->key.dst[1];
	t->frontend.w[2] = transport_word(t->key.rest >> 16, t->key.rest >> 32,
					  family_at(t));
	return find_service(&t->frontend);
}

/* Tells of a flow that is to a service without backends. */
__noinline int weft_refuse_flow(__u32 number)
{
	struct translation *t = translation();
	struct service *service = service_of(number);

	if (t && service)
		note_refusal(service, &t->frontend);
	COUNT(refused);
	return 0;
}

/* The number of a backend for a new flow, of t->key: the one that its hash comes to,
 * or so many slots behind that. 0: the service has none. */
__noinline __u32 weft_choose_backend(__u32 number, __u32 further)
{
	struct translation *t = translation();
	struct service *service = service_of(number);
	__u64 client, hash;

	if (!t || !service)
		return 0;
	/* The number of no network namespace has its highest bit set. */
	client = mix(t->key.src[0] ^ mix(t->key.src[1])) | 1ULL << 63;
	if (!further && READ_ONCE(service->affinity))
		return affine_backend(service, number, client);
	hash = mix(client ^ (t->key.rest & 0xffffffffffff) ^
		   mix(t->key.dst[0] ^ mix(t->key.dst[1])));
	return backend_at(READ_ONCE(service->choice), hash >> 32, further);
}

/* Gives a new flow, of t->key, a backend, and fills in t->entry. */
__noinline int weft_take_backend(__u32 number, __u32 chosen)
{
	struct translation *t = translation();
	const struct backend *backend = backend_of(chosen);
	struct service *service = service_of(number);
	void *flows = conntrack_at(CONNTRACK_NOW);
	enum take took;

	if (!flows || !t || !service || !backend || backend->at.family != family_at(t))
		return TAKE_OTHER;
	if (backend->at.addr.d1 == t->key.src[0] &&
	    backend->at.addr.d2 == t->key.src[1])
		return TAKE_ITSELF;
	t->entry.addr[0] = backend->at.addr.d1;
	t->entry.addr[1] = backend->at.addr.d2;
	t->entry.ends = backend->at.port | SEEN_PACKET << 16 |
			(__u64)number << 32;
	t->entry.backend = chosen | (__u64)READ_ONCE(backend->generation) << 32;
	t->entry.used_ns = bpf_ktime_get_ns();
	t->entry.since_ns = t->entry.used_ns;
	took = claim(t);
	if (took != TAKE_DONE)
		return took;
	if (bpf_map_update_elem(flows, &t->key, &t->entry, BPF_ANY))
		return TAKE_FAILED;
	__sync_fetch_and_add(&service->chosen, 1);
	return TAKE_DONE;
}

enum begun {
	BEGUN = 0,
	BEGUN_NOT = 1,     /* not now */
	BEGUN_REFUSED = 2, /* there is no backend for it */
};

/* Gives a new flow, of t->key, a backend of the service that it is to, and fills in
 * t->entry. The backend depends on both ends alone, as long as the service has the
 * same ones: a flow that was forgotten gets on with it, and with Maglev on another
 * node, too.
 *
 * What a try takes is in functions of their own, and there is no loop: without
 * CAP_PERFMON, the verifier thinks of CPUs that guess that one goes on for ever. */
__noinline int weft_begin_flow(__u32 number)
{
	bool itself = false;
	__u32 chosen;

#pragma unroll
	for (int i = 0; i < BACKEND_TRIES; i++) {
		chosen = weft_choose_backend(number, i);
		if (!chosen) {
			weft_refuse_flow(number);
			return BEGUN_REFUSED;
		}
		switch (weft_take_backend(number, chosen)) {
		case TAKE_DONE:
			COUNT(begun);
			return BEGUN;
		case TAKE_FAILED:
			COUNT(failed);
			return BEGUN_NOT;
		case TAKE_ITSELF:
			itself = true;
		}
	}
	if (itself) {
		COUNT(hairpin);
		return BEGUN_REFUSED;
	}
	COUNT(clashes);
	return BEGUN_NOT;
}

/* Notes in an entry what was seen of one end. */
static __always_inline void
note_seen(struct conntrack *entry, __u8 seen, __u64 now)
{
	if (TO_CLIENT)
		entry->server |= seen;
	else
		entry->client |= seen;
	entry->used_ns = now;
}

/* Notes in the entry of the other direction what was seen in t->key's, or puts it
 * back, if the map gave it up. */
__noinline int weft_touch_other(__u32 seen)
{
	struct translation *t = translation();
	void *flows = conntrack_at(CONNTRACK_NOW);
	struct conntrack *other;

	if (!t || !flows)
		return 0;
	turn(t);
	other = bpf_map_lookup_elem(flows, &t->other);
	if (!other) {
		bpf_map_update_elem(flows, &t->other, &t->back, BPF_NOEXIST);
		return 0;
	}
	if (other->addr.d1 != t->back.addr[0] ||
	    other->addr.d2 != t->back.addr[1] ||
	    other->port != (__u16)t->back.ends)
		return 0; /* of a later flow */
	note_seen(other, seen, t->back.used_ns);
	return 0;
}

/* A packet, of t->key, is to no service, and may begin a flow of its own. If what
 * answers it will be known by is that of a flow to a service, which has ended or, of
 * UDP, may have, that is forgotten: the client has come to talk to the backend
 * itself. Should it go on with the service, that begins anew with the same backend. */
__noinline int weft_make_way(void)
{
	struct translation *t = translation();
	void *flows = conntrack_at(CONNTRACK_NOW);
	const struct conntrack *entry;
	__u64 rest;

	if (!t || !flows)
		return 0;
	rest = t->key.rest;
	t->other.src[0] = t->key.dst[0];
	t->other.src[1] = t->key.dst[1];
	t->other.dst[0] = t->key.src[0];
	t->other.dst[1] = t->key.src[1];
	t->other.rest = conntrack_rest(rest >> 16 & 0xffff, rest & 0xffff,
				       protocol_of(t), family_at(t),
				       CONNTRACK_REPLY);
	entry = bpf_map_lookup_elem(flows, &t->other);
	if (!entry || (protocol_of(t) == PROTOCOL_TCP && !is_closed(entry)))
		return 0;
	t->sought.words = t->key;
	t->sought.words.dst[0] = entry->addr.d1;
	t->sought.words.dst[1] = entry->addr.d2;
	t->sought.words.rest = conntrack_rest(rest & 0xffff, entry->port,
					      protocol_of(t), family_at(t), 0);
	bpf_map_delete_elem(flows, &t->other);
	bpf_map_delete_elem(flows, &t->sought);
	return 0;
}

/* Whether a packet, of t->key, goes on with a flow. If so, t->entry is its entry. */
__noinline bool weft_goes_on(__u32 flags)
{
	struct translation *t = translation();
	void *flows = conntrack_at(CONNTRACK_NOW);
	struct conntrack *entry;
	__u8 seen = SEEN_PACKET, before, protocol;
	__u64 now;

	if (!t || !flows)
		return false;
	protocol = protocol_of(t);
	entry = bpf_map_lookup_elem(flows, &t->key);
	if (!entry) {
		if (!take_over(t, &t->key))
			return false;
		entry = bpf_map_lookup_elem(flows, &t->key);
		if (!entry)
			return false;
	}
	now = bpf_ktime_get_ns();
	if (protocol == PROTOCOL_TCP) {
		if (flags & TCP_FIN)
			seen |= SEEN_FIN;
		if (flags & TCP_RST)
			seen |= SEEN_RST;
	}
	if (is_over(entry, protocol, now))
		return false;
	if (TO_CLIENT) {
		/* The client has come to talk to the backend itself. */
		if (flags & TCP_SYN && is_closed(entry)) {
			bpf_map_delete_elem(flows, &t->key);
			return false;
		}
	} else if (protocol == PROTOCOL_UDP) {
		if (!keeps_backend(entry))
			return false;
	} else if (flags & TCP_SYN) {
		/* The client begins anew, or tries again. */
		if (is_closed(entry) ||
		    (!entry->server && !keeps_backend(entry)))
			return false;
	}
	before = TO_CLIENT ? entry->server : entry->client;
	if (seen & ~before || now - entry->used_ns > CONNTRACK_TOUCH_NS) {
		note_seen(entry, seen, now);
		t->entry = *(struct entry_words *)entry;
		weft_touch_other(seen);
		return true;
	}
	t->entry = *(struct entry_words *)entry;
	return true;
}
