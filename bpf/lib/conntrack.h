// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Which flows are translated, and to what. Each has two entries, one for each of
 * its directions, found by what a packet of that direction has before it is
 * translated. Either can be made from the other, and is, if the map gave it up. */
#pragma once

#include <stdbool.h>

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "consts.h"
#include "service.h"
#include "structs.h"

/* Two entries a flow. User space makes it larger or smaller; it takes all its memory
 * at once, some 18 MiB for these. */
#define CONNTRACK_MAX_ENTRIES 131072

/* Places of weft_conntracks: the conntrack, and while its flows are on their way to
 * it, the one before, which had another size. */
#define CONNTRACK_NOW 0
#define CONNTRACK_BEFORE 1

/* Datagrams of which a first fragment came, and others may follow. */
#define FRAGMENTS_MAX_ENTRIES 4096

/* The most that an entry's time of use lags behind. */
#define CONNTRACK_TOUCH_NS 1000000000ULL

/* For how long a flow is remembered that is silent: one that nobody has answered,
 * UDP, TCP that both ends or one at once have ended, and other TCP. */
#define CONNTRACK_UNANSWERED_NS (60 * 1000000000ULL)
#define CONNTRACK_UDP_NS (120 * 1000000000ULL)
#define CONNTRACK_CLOSED_NS (30 * 1000000000ULL)
#define CONNTRACK_TCP_NS (6 * 3600 * 1000000000ULL)

/* RFC 791 and 8200 have those who put datagrams together wait so long at most. */
#define FRAGMENTS_NS (60 * 1000000000ULL)

/* Of conntrack_key.kind. */
#define CONNTRACK_REPLY 1    /* from the backend to the client */

/* Of what came from an end. */
#define SEEN_PACKET 1
#define SEEN_FIN 2
#define SEEN_RST 4

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

struct conntrack_key {
	union v6addr src; /* IPv4 in the first 4 bytes, and the rest 0 */
	union v6addr dst;
	__be16 src_port;
	__be16 dst_port;
	__u8 protocol; /* PROTOCOL_TCP or PROTOCOL_UDP */
	__u8 family;   /* enum family */
	__u8 kind;     /* CONNTRACK_REPLY, or 0: from the client */
	__u8 pad;
};

struct conntrack {
	union v6addr addr; /* in place of the frontend's; of a reply, of the backend's */
	__be16 port;
	__u8 client;       /* what the client sent, SEEN_...: it alone writes this */
	__u8 server;       /* what the backend sent: likewise */
	__u32 service;     /* its number, or what was its number */
	__u32 backend;     /* likewise */
	__u32 generation;  /* of the backend */
	__u64 used_ns;     /* CLOCK_MONOTONIC, less at most CONNTRACK_TOUCH_NS */
	__u64 since_ns;    /* CLOCK_MONOTONIC */
};

/* A datagram: those of IPv6 are told apart without the protocol. */
struct fragment_key {
	union v6addr src;
	union v6addr dst;
	__u32 id;      /* as it is in the packet */
	__u8 protocol; /* of IPv6, 0 */
	__u8 family;
	__u8 kind;     /* as in struct conntrack_key */
	__u8 pad;
};

struct fragment {
	union v6addr addr; /* as in struct conntrack */
	__u64 since_ns;    /* CLOCK_MONOTONIC */
};

/* That a conntrack is changed for another here, for all programs at once, is what
 * lets no flow be without one. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2);
	__type(key, __u32);
	__array(values, struct {
		__uint(type, BPF_MAP_TYPE_LRU_HASH);
		__uint(max_entries, CONNTRACK_MAX_ENTRIES);
		__type(key, struct conntrack_key);
		__type(value, struct conntrack);
	});
} weft_conntracks SEC(".maps");

static __always_inline void *conntrack_at(__u32 place)
{
	return bpf_map_lookup_elem(&weft_conntracks, &place);
}

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, FRAGMENTS_MAX_ENTRIES);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} weft_fragments SEC(".maps");

/* Keys and values in words, as they are built. */
struct conntrack_words {
	__u64 src[2], dst[2], rest;
};

struct entry_words {
	__u64 addr[2], ends, backend, used_ns, since_ns;
};

/* The last word of a key. */
static __always_inline __u64
conntrack_rest(__u64 src_port, __u64 dst_port, __u64 protocol, __u64 family,
	       __u64 kind)
{
	return src_port | dst_port << 16 | protocol << 32 | family << 40 |
	       kind << 48;
}

/* For how long a flow is remembered after its last packet. */
static __always_inline __u64
lifetime(const struct conntrack *entry, __u8 protocol)
{
	__u8 either = entry->client | entry->server;
	__u8 both = entry->client & entry->server;

	if (either & SEEN_RST || both & SEEN_FIN)
		return CONNTRACK_CLOSED_NS;
	if (!entry->server)
		return CONNTRACK_UNANSWERED_NS;
	return protocol == PROTOCOL_TCP ? CONNTRACK_TCP_NS : CONNTRACK_UDP_NS;
}

static __always_inline bool
is_over(const struct conntrack *entry, __u8 protocol, __u64 now)
{
	return (__s64)(now - entry->used_ns) > (__s64)lifetime(entry, protocol);
}

static __always_inline bool is_closed(const struct conntrack *entry)
{
	return (entry->client | entry->server) & SEEN_RST ||
	       entry->client & entry->server & SEEN_FIN;
}

/* Whether the service still has the backend of a flow. Tables may have been made
 * anew since, hence the address, too. */
static __always_inline bool keeps_backend(const struct conntrack *entry)
{
	const struct backend *backend = backend_of(entry->backend);

	return backend &&
	       READ_ONCE(backend->generation) == entry->generation &&
	       READ_ONCE(backend->service) == entry->service &&
	       backend->at.addr.d1 == entry->addr.d1 &&
	       backend->at.addr.d2 == entry->addr.d2 &&
	       backend->at.port == entry->port;
}
