// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

//go:build ignore

/* Sockets that ask for a service get a backend, and believe that they talk to
 * the service: the address is changed once, when a socket is connected or sends,
 * and no packet is touched.
 * Attached to cgroups. */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "lib/peer.h"
#include "lib/service.h"

/* Takes the address of the call apart. An IPv4-mapped one is an IPv4 one. */
static __always_inline void read4(struct bpf_sock_addr *ctx, struct words *at)
{
	at->w[0] = ctx->user_ip4;
	at->w[1] = 0;
	at->w[2] = transport_word(ctx->user_port, ctx->protocol, FAMILY_IPV4);
}

static __always_inline void read6(struct bpf_sock_addr *ctx, struct words *at)
{
	__u32 a = ctx->user_ip6[0], b = ctx->user_ip6[1];
	__u32 c = ctx->user_ip6[2], d = ctx->user_ip6[3];
	bool mapped = !a && !b && c == V4_MAPPED;

	at->w[0] = mapped ? d : a | (__u64)b << 32;
	at->w[1] = mapped ? 0 : c | (__u64)d << 32;
	at->w[2] = transport_word(ctx->user_port, ctx->protocol,
				  mapped ? FAMILY_IPV4 : FAMILY_IPV6);
}

static __always_inline void
write4(struct bpf_sock_addr *ctx, const struct words *at)
{
	ctx->user_ip4 = at->w[0];
	ctx->user_port = port_of(at);
}

static __always_inline void
write6(struct bpf_sock_addr *ctx, const struct words *at)
{
	bool mapped = family_of(at) == FAMILY_IPV4;

	ctx->user_ip6[0] = mapped ? 0 : at->w[0];
	ctx->user_ip6[1] = mapped ? 0 : at->w[0] >> 32;
	ctx->user_ip6[2] = mapped ? V4_MAPPED : at->w[1];
	ctx->user_ip6[3] = mapped ? at->w[0] : at->w[1] >> 32;
	ctx->user_port = port_of(at);
}

static __always_inline bool serves(const struct bpf_sock_addr *ctx)
{
	return ctx->protocol == PROTOCOL_TCP || ctx->protocol == PROTOCOL_UDP;
}

/* There is no backend. ECONNREFUSED as far as the kernel lets a program say it,
 * which it does since Linux 6.1; before, user space replaces the call, and it is
 * EPERM. */
static __always_inline int
refuse(struct service *service, const struct words *frontend)
{
	note_refusal(service, frontend);
	bpf_set_retval(-SERVICE_ECONNREFUSED);
	return 0;
}

static __always_inline __u64
choose(struct bpf_sock_addr *ctx, struct service *service, __u64 number)
{
	if (READ_ONCE(service->affinity))
		return affine_backend(service, number, bpf_get_netns_cookie(ctx));
	return draw_backend(service, bpf_get_socket_cookie(ctx));
}

/* What a socket was given, for what comes next of it. */
static __always_inline void
remember(struct socket_state *state, const struct words *frontend,
	 const struct backend *backend, __u64 service, __u64 number,
	 __u32 connected)
{
	store_words(&state->frontend, frontend);
	state->backend = backend->at;
	state->service = service;
	state->backend_id = number;
	state->generation = backend->generation;
	state->connected = connected;
}

static __always_inline void
remember_reverse(struct bpf_sock_addr *ctx, const struct words *frontend,
		 const struct backend *backend)
{
	struct {
		__u64 socket;
		struct words backend;
	} key; /* a struct reverse_key */

	key.socket = bpf_get_socket_cookie(ctx);
	key.backend = load_words(&backend->at);
	bpf_map_update_elem(&weft_reverse, &key, frontend, BPF_ANY);
}

static __always_inline struct socket_state *
state_of(struct bpf_sock_addr *ctx, __u64 flags)
{
	return bpf_sk_storage_get(&weft_sockets, ctx->sk, 0, flags);
}

/* What a socket was connected to before is nothing to it now. */
static __always_inline void forget(struct bpf_sock_addr *ctx)
{
	struct socket_state *state;

	if (ctx->protocol == PROTOCOL_TCP) {
		forget_peer(bpf_get_socket_cookie(ctx));
		return;
	}
	state = state_of(ctx, 0);
	if (state)
		__builtin_memset(state, 0, sizeof(*state));
}

/* What a call comes to. 1: it goes on, and if changed is set, with the address
 * that is then in at; 0: it fails. */

/* A socket is connected. */
static __always_inline int
connect(struct bpf_sock_addr *ctx, struct words *at, bool *changed)
{
	const struct backend *backend;
	struct socket_state *state;
	struct service *service;
	__u64 number, chosen;

	if (!serves(ctx))
		return 1;
	number = find_service(at);
	if (!number) {
		forget(ctx);
		return 1;
	}
	service = service_of(number);
	if (!service)
		return 1;
	chosen = choose(ctx, service, number);
	if (!chosen)
		return refuse(service, at);
	backend = backend_of(chosen);
	if (!backend)
		return refuse(service, at);
	if (ctx->protocol == PROTOCOL_TCP) {
		remember_peer(bpf_get_socket_cookie(ctx), service, number);
	} else {
		/* Without memory, the socket sees its backend as its peer. */
		state = state_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);
		if (state)
			remember(state, at, backend, number, chosen, 1);
		remember_reverse(ctx, at, backend);
	}
	__sync_fetch_and_add(&service->chosen, 1);
	*at = load_words(&backend->at);
	*changed = true;
	return 1;
}

/* A datagram is sent to an address. A socket that goes on with a service stays
 * with its backend as long as the service has that. */
static __always_inline int
sendmsg(struct bpf_sock_addr *ctx, struct words *at, bool *changed)
{
	const struct backend *backend;
	struct socket_state *state;
	struct service *service;
	__u64 number, chosen = 0;
	bool fresh;

	if (ctx->protocol != PROTOCOL_UDP)
		return 1;
	number = find_service(at);
	if (!number)
		return 1;
	service = service_of(number);
	if (!service)
		return 1;
	state = state_of(ctx, 0);
	if (state && state->service == (__u32)number &&
	    same(at, &state->frontend) &&
	    kept_backend(state->backend_id, state->generation, number))
		chosen = state->backend_id;
	fresh = !chosen;
	if (fresh)
		chosen = choose(ctx, service, number);
	if (!chosen)
		return refuse(service, at);
	backend = backend_of(chosen);
	if (!backend)
		return refuse(service, at);
	if (fresh) {
		/* Asked for again, for the sake of the verifiers, see service.h. */
		state = state_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);
		if (state && !state->connected)
			remember(state, at, backend, number, chosen, 0);
		remember_reverse(ctx, at, backend);
		__sync_fetch_and_add(&service->chosen, 1);
	}
	*at = load_words(&backend->at);
	*changed = true;
	return 1;
}

/* A datagram came from an address: if it is a backend's that the socket was
 * given, it came from the service. */
static __always_inline int
recvmsg(struct bpf_sock_addr *ctx, struct words *at, bool *changed)
{
	const struct service_address *frontend;
	struct socket_state *state;
	struct {
		__u64 socket;
		struct words backend;
	} key; /* a struct reverse_key */

	if (ctx->protocol != PROTOCOL_UDP)
		return 1;
	state = state_of(ctx, 0);
	if (!state)
		return 1;
	if (same(at, &state->backend)) {
		*at = load_words(&state->frontend);
		*changed = true;
		return 1;
	}
	key.socket = bpf_get_socket_cookie(ctx);
	key.backend = *at;
	frontend = bpf_map_lookup_elem(&weft_reverse, &key);
	if (!frontend)
		return 1;
	*at = load_words(frontend);
	*changed = true;
	return 1;
}

/* A socket is asked for its peer. */
static __always_inline int
peer(struct bpf_sock_addr *ctx, struct words *at, bool *changed)
{
	struct socket_state *state;
	struct service *service;
	__u64 number;

	if (ctx->protocol == PROTOCOL_TCP) {
		number = peer_service(bpf_get_socket_cookie(ctx));
		service = service_of(number);
		if (!number || !service)
			return 1;
		*at = load_words(&service->frontend);
		*changed = true;
		return 1;
	}
	state = state_of(ctx, 0);
	if (!state || !state->connected || !same(at, &state->backend))
		return 1;
	*at = load_words(&state->frontend);
	*changed = true;
	return 1;
}

/* A program for each family of a socket's call: the address of the call is taken
 * apart, and put back if it became another one. */
#define PROGRAM(hook, call, family)                            \
	SEC("cgroup/" hook #family)                            \
	int weft_##call##family(struct bpf_sock_addr *ctx)     \
	{                                                      \
		bool changed = false;                          \
		struct words at;                               \
		int ok;                                        \
                                                               \
		read##family(ctx, &at);                        \
		ok = call(ctx, &at, &changed);                 \
		if (changed)                                   \
			write##family(ctx, &at);               \
		return ok;                                     \
	}
#define PROGRAMS(hook, call)   \
	PROGRAM(hook, call, 4) \
	PROGRAM(hook, call, 6)

PROGRAMS("connect", connect)
PROGRAMS("sendmsg", sendmsg)
PROGRAMS("recvmsg", recvmsg)
PROGRAMS("getpeername", peer)

char _license[] SEC("license") = "Dual BSD/GPL";
