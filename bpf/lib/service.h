// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Services: from the address that a socket asks for to that of a backend, and
 * back. User space writes weft_services, weft_slots and weft_backends through
 * memory while programs read them; ../service.go is the writer.
 *
 * What makes that safe is what RCU makes of it. A program runs within one read
 * side. Records of services and backends, and ranges of slots, are written while
 * nothing refers to them, and used again only when all programs have ended that
 * may have seen a reference. The only words that change in between are the
 * choice of a service and single slots, each at once, and each for a whole that
 * was or will be right: so a program sees a service as it was before a change or
 * as it is after it.
 *
 * A flow that keeps its backend keeps the backend's generation with it, which
 * changes when the service gives the backend up. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "structs.h"

/* Words that user space may be writing: each is read once, whole. */
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))

/* Bounds of the tables. User space makes those larger that may be. */
#define SERVICES_MAX_ENTRIES 65536
#define SLOTS_MAX_ENTRIES (1 << 21)
#define BACKENDS_MAX_ENTRIES 524288
#define AFFINITIES_MAX_ENTRIES 65536
#define REVERSE_MAX_ENTRIES 65536
#define REFUSALS_BYTES (1 << 16)

/* How often a frontend is looked up again that was another's by the time its
 * service was read: kernels use the elements of a hash again at once. */
#define FRONTEND_TRIES 4

/* The least time between two events of a service without backends. */
#define REFUSAL_INTERVAL_NS 1000000000ULL

/* Of struct service.choice: where the slots begin, their number, and flags. */
#define CHOICE_COUNT_SHIFT 32
#define CHOICE_COUNT_MASK 0xffffff
#define CHOICE_MAGLEV (1ULL << 56)

#define PROTOCOL_TCP 6
#define PROTOCOL_UDP 17

#define SERVICE_ECONNREFUSED 111

/* The last 32 bits of ::ffff:0:0/96, of which a v4-mapped address has the rest
 * behind them. */
#define V4_MAPPED 0xffff0000U /* be32 of 0x0000ffff */

/* Where a service or a backend listens. The protocol counts, too. */
struct service_address {
	union v6addr addr; /* IPv4 in the first 4 bytes, and the rest 0 */
	__be16 port;
	__u8 protocol; /* PROTOCOL_TCP or PROTOCOL_UDP */
	__u8 family;   /* enum family */
	__u32 pad;
};

/* Two lines: one that programs read, one that they write. */
struct service {
	__u64 choice; /* see above; without slots, flows are refused */
	struct service_address frontend;
	__u32 affinity;   /* seconds for which a client keeps its backend */
	__u32 generation; /* changes with the frontend; odd: it may change now */
	__u32 room;       /* for how many slots there is room; of user space */
	__u32 flags;      /* of user space */
	__u64 pad[2];
	__u64 chosen;  /* flows that were given a backend */
	__u64 refused; /* flows for which there was none */
	__u64 told_ns; /* CLOCK_MONOTONIC of the last event */
	__u64 pad2[5];
};

struct backend {
	struct service_address at;
	__u32 generation; /* changes when the service gives the backend up */
	__u32 service;    /* of which it is a backend */
};

/* Who asks, for what. */
struct affinity_key {
	__u64 client; /* cookie of the network namespace, or hash of the address */
	__u32 service;
	__u32 generation; /* of the service */
};

struct affinity {
	__u32 backend;
	__u32 generation; /* of the backend */
	__u64 used_ns;    /* CLOCK_MONOTONIC */
};

/* What a socket of UDP was last given. */
struct socket_state {
	struct service_address frontend;
	struct service_address backend;
	__u32 service;
	__u32 backend_id;
	__u32 generation; /* of the backend */
	__u32 connected;  /* 1: it is the peer that the socket is connected to */
};

struct reverse_key {
	__u64 socket; /* its cookie */
	struct service_address backend;
};

/* To the number of the service. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_RDONLY_PROG);
	__uint(max_entries, SERVICES_MAX_ENTRIES);
	__type(key, struct service_address);
	__type(value, __u32);
} weft_frontends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SERVICES_MAX_ENTRIES);
	__type(key, __u32);
	__type(value, struct service);
} weft_services SEC(".maps");

/* Numbers of backends. Two are an element: those of arrays have 8 bytes. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SLOTS_MAX_ENTRIES / 2);
	__type(key, __u32);
	__type(value, __u32[2]);
} weft_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, BACKENDS_MAX_ENTRIES);
	__type(key, __u32);
	__type(value, struct backend);
} weft_backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, AFFINITIES_MAX_ENTRIES);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} weft_affinity SEC(".maps");

/* For UDP. It lives as long as its socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_state);
} weft_sockets SEC(".maps");

/* To the frontend, for UDP: which backends a socket was given besides the last. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, REVERSE_MAX_ENTRIES);
	__type(key, struct reverse_key);
	__type(value, struct service_address);
} weft_reverse SEC(".maps");

/* Records are struct event. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, REFUSALS_BYTES);
} weft_refusals SEC(".maps");

/* A service_address in words, as it is built and compared. Without CAP_PERFMON,
 * the verifiers of some kernels refuse to have part of a stack word written over. */
struct words {
	__u64 w[3];
};

static __always_inline bool
same(const struct words *a, const struct service_address *b)
{
	const struct words *w = (const void *)b;

	return a->w[0] == w->w[0] && a->w[1] == w->w[1] && a->w[2] == w->w[2];
}

static __always_inline struct words load_words(const struct service_address *a)
{
	return *(const struct words *)a;
}

static __always_inline void
store_words(struct service_address *to, const struct words *from)
{
	*(struct words *)to = *from;
}

static __always_inline __u16 port_of(const struct words *a)
{
	return a->w[2];
}

static __always_inline __u8 family_of(const struct words *a)
{
	return a->w[2] >> 24;
}

static __always_inline __u64
transport_word(__u32 port, __u32 protocol, __u32 family)
{
	return (port & 0xffff) | (protocol & 0xff) << 16 | family << 24;
}

/* Below, what is found is passed on by its number, 0 for none, and looked up where
 * it is used. A pointer that may be NULL without having been looked up is none to
 * verifiers that walk what a CPU may guess, too: without CAP_PERFMON, those before
 * Linux 6.17 refuse to have it read even there. */

static __always_inline struct service *service_of(__u64 number)
{
	return bpf_map_lookup_elem(&weft_services, &number);
}

static __always_inline const struct backend *backend_of(__u64 number)
{
	return bpf_map_lookup_elem(&weft_backends, &number);
}

/* The number of the service whose frontend an address is. */
static __always_inline __u64 find_service(const struct words *frontend)
{
	struct service *service;
	const __u32 *found;
	__u64 number;

#pragma unroll
	for (int i = 0; i < FRONTEND_TRIES; i++) {
		found = bpf_map_lookup_elem(&weft_frontends, frontend);
		if (!found)
			return 0;
		number = READ_ONCE(*found);
		service = service_of(number);
		if (!service)
			return 0;
		if (same(frontend, &service->frontend))
			return number;
	}
	return 0;
}

static __always_inline __u64 mix(__u64 x)
{
	x ^= x >> 30;
	x *= 0xbf58476d1ce4e5b9ULL;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebULL;
	return x ^ x >> 31;
}

/* Whether a backend is still one of the service. */
static __always_inline bool
kept_backend(__u32 number, __u32 generation, __u32 service)
{
	const struct backend *backend = backend_of(number);

	return backend && READ_ONCE(backend->generation) == generation &&
	       READ_ONCE(backend->service) == service;
}

/* The number of the backend at a place among the slots of a choice: draw says where,
 * as a part of 2^32, and further how many slots behind that. 0: there is none. */
static __always_inline __u64
backend_at(__u64 choice, __u64 draw, __u32 further)
{
	__u64 count = choice >> CHOICE_COUNT_SHIFT & CHOICE_COUNT_MASK;
	const __u32 *pair;
	__u64 slot, at;

	if (!count)
		return 0;
	slot = draw * count >> 32;
	if (further)
		slot = (slot + further) % count;
	slot += choice & 0xffffffff;
	at = slot >> 1;
	pair = bpf_map_lookup_elem(&weft_slots, &at);
	if (!pair)
		return 0;
	return slot & 1 ? READ_ONCE(pair[1]) : READ_ONCE(pair[0]);
}

/* The number of a backend for a new flow. With Maglev, the same seed gets the
 * same backend on every node; else chance decides. */
static __always_inline __u64
draw_backend(const struct service *service, __u64 seed)
{
	__u64 choice = READ_ONCE(service->choice);
	__u64 draw;

	if (choice & CHOICE_MAGLEV)
		draw = mix(seed) >> 32;
	else
		draw = bpf_get_prandom_u32();
	return backend_at(choice, draw, 0);
}

/* The backend that the client was given last, if that is not too long ago, or a
 * new one, which is then the one that it was given. */
static __always_inline __u64
affine_backend(struct service *service, __u64 number, __u64 client)
{
	const struct backend *backend;
	struct affinity *kept;
	struct {
		__u64 client, service;
	} key; /* a struct affinity_key */
	struct {
		__u64 backend, used_ns;
	} fresh; /* a struct affinity */
	__u64 now = bpf_ktime_get_ns();
	__u64 seconds = READ_ONCE(service->affinity);
	__u64 chosen;

	key.client = client;
	key.service = (number & 0xffffffff) | (__u64)service->generation << 32;
	kept = bpf_map_lookup_elem(&weft_affinity, &key);
	if (kept && now - kept->used_ns < seconds * 1000000000ULL) {
		chosen = READ_ONCE(kept->backend);
		if (kept_backend(chosen, READ_ONCE(kept->generation), number)) {
			kept->used_ns = now;
			return chosen;
		}
	}
	chosen = draw_backend(service, client);
	backend = backend_of(chosen);
	if (!backend)
		return 0;
	fresh.backend = chosen | (__u64)backend->generation << 32;
	fresh.used_ns = now;
	if (chosen)
		bpf_map_update_elem(&weft_affinity, &key, &fresh, BPF_ANY);
	return chosen;
}

/* Tells user space, once in a while, of a service that refuses. */
static __always_inline void
tell_refusal(struct service *service, const struct words *frontend)
{
	__u64 now = bpf_ktime_get_ns();
	struct event *event;

	if (service->told_ns && now - service->told_ns < REFUSAL_INTERVAL_NS)
		return;
	event = bpf_ringbuf_reserve(&weft_refusals, sizeof(*event), 0);
	if (!event)
		return;
	service->told_ns = now;
	__builtin_memset(event, 0, sizeof(*event));
	event->ktime_ns = now;
	event->dst_port = __builtin_bswap16(port_of(frontend));
	event->family = family_of(frontend);
	event->protocol = frontend->w[2] >> 16;
	event->direction = DIRECTION_EGRESS;
	event->verdict = VERDICT_NO_BACKEND;
	event->daddr.d1 = frontend->w[0];
	event->daddr.d2 = frontend->w[1];
	bpf_ringbuf_submit(event, 0);
}

/* Counts that there was no backend for a flow, and tells of it. */
static __always_inline void
note_refusal(struct service *service, const struct words *frontend)
{
	__sync_fetch_and_add(&service->refused, 1);
	tell_refusal(service, frontend);
}
