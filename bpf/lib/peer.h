// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* The services that sockets of TCP are connected to, for those who ask for the peer.
 *
 * Storage of its own for each socket would take half as long as all else that it
 * takes to connect to a service, and as long again to free. So there is one table,
 * of a place for each of the last million sockets: cookies are handed out in turn,
 * and the low bits of a socket's are its place. A socket whose place another one
 * has taken sees its backend as its peer. */
#pragma once

#include "service.h"

#define PEERS_MAX_ENTRIES (1 << 20)

/* A peer is one word, so that it is read and written at once: what the place does
 * not tell of the cookie, the service's generation, of both the low bits, and the
 * number of the service, 0 for none. */
#define PEER_GENERATION_SHIFT 20
#define PEER_SOCKET_SHIFT 40
#define PEER_NUMBER_MASK ((1ULL << PEER_GENERATION_SHIFT) - 1)

_Static_assert(SERVICES_MAX_ENTRIES <= PEER_NUMBER_MASK, "peers have all services");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PEERS_MAX_ENTRIES);
	__type(key, __u32);
	__type(value, __u64);
} weft_peers SEC(".maps");

static __always_inline __u64 *peer_of(__u64 socket)
{
	__u32 at = socket & (PEERS_MAX_ENTRIES - 1);

	return bpf_map_lookup_elem(&weft_peers, &at);
}

static __always_inline __u64
make_peer(__u64 socket, __u64 generation, __u64 number)
{
	return socket / PEERS_MAX_ENTRIES << PEER_SOCKET_SHIFT |
	       (generation & PEER_NUMBER_MASK) << PEER_GENERATION_SHIFT | number;
}

static __always_inline void write_peer(__u64 *peer, __u64 value)
{
	*(volatile __u64 *)peer = value;
}

/* A socket is connected to a service. One that is being taken away is not noted: its
 * record may soon be another's. */
static __always_inline void
remember_peer(__u64 socket, const struct service *service, __u64 number)
{
	__u32 generation = READ_ONCE(service->generation);
	__u64 *peer = peer_of(socket);
	bool stays = !(generation & 1);

	if (peer)
		write_peer(peer,
			   stays ? make_peer(socket, generation, number) : 0);
}

/* A socket is connected to what is no service. */
static __always_inline void forget_peer(__u64 socket)
{
	__u64 *peer = peer_of(socket);

	if (peer && READ_ONCE(*peer) >> PEER_SOCKET_SHIFT ==
			    make_peer(socket, 0, 0) >> PEER_SOCKET_SHIFT)
		write_peer(peer, 0);
}

/* The number of the service that a socket is connected to, 0 for none. The record is
 * still that service's, and stays so while the program runs: user space makes the
 * generation odd, and waits for all programs, before it writes another into it. */
static __always_inline __u64 peer_service(__u64 socket)
{
	const struct service *service;
	__u64 *found = peer_of(socket);
	__u64 peer, number;

	if (!found)
		return 0;
	peer = READ_ONCE(*found);
	number = peer & PEER_NUMBER_MASK;
	service = service_of(number);
	if (!number || !service)
		return 0;
	if (peer != make_peer(socket, READ_ONCE(service->generation), number))
		return 0;
	return number;
}
