// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Layouts shared with user space; the Go mirrors are in ../ipcache.go,
 * ../counter.go, ../event.go, ../config.go and ../pod.go. Numbers are in host order and
 * addresses in network order. Padding is explicit and always zero. */
#pragma once

#include <linux/types.h>

#include "consts.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the flag bits of struct ipcache_value are laid out for little-endian hosts"
#endif

union v4addr {
	__be32 be32;
	__u8 addr[4];
};

/* Aligned to 4, not 8: in struct ipcache_value it stands at offset 4. */
union v6addr {
	struct {
		__u32 p1;
		__u32 p2;
		__u32 p3;
		__u32 p4;
	};
	struct {
		__u64 d1;
		__u64 d2;
	};
	__u8 addr[16];
} __attribute__((packed, aligned(4)));

/* The head of a key that BPF_MAP_TYPE_LPM_TRIE asks for. */
struct lpm_key {
	__u32 prefixlen;
	__u8 data[0];
};

struct ipcache_key {
	struct lpm_key lpm_key; /* IPCACHE_STATIC_BITS + bits of the prefix */
	__u16 cluster_id;       /* always 0 */
	__u8 pad1;
	__u8 family;            /* enum family */
	union {
		union v4addr ip4; /* the bytes behind it are 0 */
		union v6addr ip6;
	};
};

struct ipcache_value {
	__u32 sec_identity;
	union {
		union v4addr ip4;
		union v6addr ip6;
	} tunnel_endpoint; /* the node behind which the address is; 0: none */
	__u16 pad;
	__u8 key; /* encryption key; 0: none */
	__u8 flag_skip_tunnel : 1,
	     flag_has_tunnel_ep : 1,
	     flag_ipv6_tunnel_ep : 1,
	     flag_remote_cluster : 1,
	     pad2 : 4;
};

/* What a table of the fast path consists of: its head, or whatever else. */
struct hosts_line {
	__u64 words[8];
};

/* The first line. It never changes while programs can see the table. */
struct hosts_head {
	__u64 layout;   /* HOSTS_LAYOUT */
	__u64 seeds[3]; /* at random; the last two odd */
	__u64 summary;  /* lines of the summary */
	__u64 groups;   /* lines of tags, of 64 slots each */
	__u64 pad[2];
};

/* Where the search for a host begins, for each family. No two epochs are the
 * same, of whatever agents. */
struct fast_head {
	__u64 seeds[3]; /* at random; the last two odd */
	__u64 shape;    /* of networks.h; 0: there are none */
	__u64 epoch;    /* of near.h: 0 while ipcache or a table is written */
	__u64 others;   /* bits of the networks whose hosts are in a table of hosts.h */
	__u64 pad[2];
};

/* How sure a CPU is of what it remembers of an address. */
enum near_state {
	NEAR_SEEN = 1,  /* a packet had it, in this epoch */
	NEAR_ASKED = 2, /* a later one asked for its identity */
	NEAR_KNOWN = 3, /* and a later one found that nothing had changed */
};

/* An address that is remembered, as its identity in an epoch. */
struct near_end {
	__u64 d1, d2;   /* as in union v6addr, of IPv4 the rest is 0 */
	__u64 epoch;    /* of its family */
	__u32 identity; /* IDENTITY_NONE: it has no entry */
	__u16 family;   /* enum family */
	__u16 state;    /* enum near_state */
};

struct counter_key {
	__u32 src_identity; /* 0 if the packet has no addresses, as is the next */
	__u32 dst_identity;
	__u8 direction; /* enum direction */
	__u8 verdict;   /* enum verdict */
	__u8 mode;      /* enum mode */
	__u8 pad;
};

/* A packet is one skb: a GSO or GRO super-packet counts once, with the bytes
 * that it has before it is cut. Bytes include the Ethernet header. */
struct counter_value {
	__u64 packets;
	__u64 bytes;
};

/* A counter of weft_front: of the key that came first, for as long as the map
 * lives. check is a
 * hash of the key: who reads a counter to whose key it does not fit has read it
 * while it was given away. Where it has no verdict, it is nobody's yet. */
struct front_counter {
	struct counter_key key;
	__u32 check;
	struct counter_value value;
};

struct front_line {
	struct front_counter counters[2];
};

/* What the other maps had no room for, by direction. */
struct missed {
	/* packets that have no key of their own in weft_counters */
	struct counter_value counts[DIRECTIONS];
	/* sampled packets of which weft_events did not take the event */
	struct counter_value events[DIRECTIONS];
};

struct config {
	__u32 flow_sample; /* one event in so many packets; 0: none */
	__u32 mark_mask;   /* of MARK_SHIFTED: no other bits are ever written */
	__u8 mark;         /* enum mark */
	__u8 mark_shift;   /* of MARK_SHIFTED: from the identity's bit 0 up */
	__u8 dual_stack;   /* 1: addresses without entry are world by family */
	__u8 underlay6;    /* 1: the overlay's outer headers are IPv6 */
	__u8 overlay_lax;  /* 1: what the overlay's checks refuse is counted alone */
	__u8 pod_check;    /* enum pod_check */
	__u8 fast_layout;  /* FAST_LAYOUT: weft_fast is kept right; else it is not */
	__u8 pad;
};

/* An address that packets from a pod's device may have as their source. */
struct pod_key {
	__u32 ifindex;
	__u32 family; /* enum family */
	union v6addr addr; /* IPv4 in the first 4 bytes, the others are 0 */
};

/* One sampled packet. Fields that the packet does not have, or that stand
 * behind a header that is not understood, are 0. */
struct event {
	__u64 ktime_ns; /* CLOCK_MONOTONIC */
	__u32 ifindex;
	__u32 length;   /* as in struct counter_value */
	__u32 src_identity; /* as in struct counter_key */
	__u32 dst_identity;
	__u16 eth_type; /* behind the VLAN tags */
	__u16 src_port; /* TCP, UDP, SCTP; the type of ICMP and ICMPv6 */
	__u16 dst_port; /* TCP, UDP, SCTP; the code of ICMP and ICMPv6 */
	__u8 family;    /* enum family; FAMILY_NONE: no addresses */
	__u8 protocol;  /* IANA number, behind IPv6 extension headers */
	__u8 tcp_flags; /* FIN is bit 0, CWR bit 7 */
	__u8 direction; /* enum direction */
	__u8 verdict;   /* enum verdict */
	__u8 mode;      /* enum mode */
	__u32 pad;
	union v6addr saddr; /* IPv4 in the first 4 bytes */
	union v6addr daddr;
};
