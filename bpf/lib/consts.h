// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/* Numbers of the layouts, and the bounds of maps and of the parser. */
#pragma once

/* What compilers should take for the usual way, and lay out in one piece. */
#ifndef likely
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#endif

/* Bits of an ipcache key before the address: cluster_id, pad1 and family. */
#define IPCACHE_STATIC_BITS 32

/* A bound that keeps the array of the map small beside the identities that a
 * node really talks to; 64 Ki keys of 12 bytes, 16 more a CPU, allocated as they come. */
#define COUNTERS_MAX_ENTRIES 65536

/* Two keys a line: 64 KiB a CPU, in which 500 keys find room but for one in 30. */
#define FRONT_LINES 1024
#define FRONT_SHIFT 22 /* from 32 bits to the number of a line */

/* Of a node's own addresses, and 8 KiB a CPU. */
#define NEAR_ENDS 256
#define NEAR_SHIFT 56 /* from 64 bits to the number of one */

/* One MiB holds 13,107 events of 72 bytes with their header of 8. */
#define EVENTS_BYTES (1 << 20)

/* A node has some hundred pods, each with an address or two. */
#define PODS_MAX_ENTRIES 65536

/* Of the tables of the fast path. A program leaves one with another number in
 * its head alone; raise it with every change of what is in the tables. */
#define HOSTS_LAYOUT 2

/* Of weft_fast and weft_networks, as the settings have it: raise it with every
 * change of what is in them. It is never 0, which is what a version of weft
 * writes that does not know of them, and so leaves them behind. */
#define FAST_LAYOUT 1

/* Of the networks that are full of hosts: words of 8 bytes in a table, tables
 * of both generations of both families, words of a network's block, and places
 * of the directory that are looked into. */
#define NETWORKS_CHUNK_WORDS 32768
#define NETWORKS_CHUNK_SHIFT 15
#define NETWORKS_CHUNKS 1024
#define BLOCK_WORDS 128
#define NETWORKS_PROBES 8

/* From 64 bits to the number of one of fast_head's others. */
#define OTHERS_SHIFT 58

/* Slots with the right tag that are looked into; by chance, a bucket has more
 * than one once in 30 times. */
#define HOSTS_PROBES 2

/* Odd, and half of its bits set. */
#define HOSTS_MULTIPLIER 0x9e3779b97f4a7c15ULL

/* VLAN tags looked through in the packet's bytes; one more may be in the
 * skb's metadata, where the kernel has taken it out of the bytes. */
#define MAX_VLAN_TAGS 2

/* RFC 8200 expects each of the five kinds once, destination options twice.
 * Behind more headers than this the transport is unknown. */
#define MAX_EXTENSIONS 8

enum family {
	FAMILY_NONE = 0,
	FAMILY_IPV4 = 1,
	FAMILY_IPV6 = 2,
};

enum identity {
	IDENTITY_NONE = 0,
	IDENTITY_HOST = 1,
	IDENTITY_WORLD = 2,
	IDENTITY_REMOTE_NODE = 6,
	IDENTITY_WORLD_IPV4 = 9,
	IDENTITY_WORLD_IPV6 = 10,
};

enum direction {
	DIRECTION_INGRESS = 0, /* the source is the peer */
	DIRECTION_EGRESS = 1,  /* the destination is the peer */
	DIRECTIONS = 2,
};

enum verdict {
	VERDICT_NONE = 0,       /* not decided yet; never stored */
	VERDICT_IDENTIFIED = 1, /* the peer's address has an entry in ipcache */
	VERDICT_WORLD = 2,      /* it has none */
	VERDICT_NOT_IP = 3,     /* no IPv4 or IPv6 behind at most two VLAN tags */
	VERDICT_MALFORMED = 4,  /* a header is cut short or contradicts itself */
	/* Of the overlay alone. */
	VERDICT_NO_ENDPOINT = 5,    /* the destination is behind no node */
	VERDICT_WRONG_NODE = 6,     /* the outer source is not the inner one's node */
	VERDICT_WRONG_IDENTITY = 7, /* the VNI is not the inner source's identity */
	/* Of services alone. */
	VERDICT_NO_BACKEND = 8,     /* the service has no backend to send to */
	/* Of pods' devices alone. */
	VERDICT_SPOOFED = 9,        /* the source is no address of the device's pod */
};

enum mode {
	MODE_NATIVE = 0,  /* as it is on the wire */
	MODE_OVERLAY = 1, /* inside the overlay */
	MODE_POD = 2,     /* between the node and a pod of its own */
};

/* What becomes of a packet from a pod's device that has another's address. */
enum pod_check {
	POD_CHECK_OFF = 0,   /* nobody looks */
	POD_CHECK_COUNT = 1, /* it is counted as spoofed, and passed on */
	POD_CHECK_DROP = 2,  /* it is counted as spoofed, and dropped */
};

/* How the mark tells the identity of the source. */
enum mark {
	MARK_NONE = 0,    /* not at all: it is left alone */
	MARK_SHIFTED = 1, /* by mask and shift of the configuration */
	MARK_CILIUM = 2,  /* as Cilium's programs do */
};

/* The mark of Cilium's programs: the lower 16 bits of the identity, the number
 * that says that there is one, and the cluster. 0xf000 belongs to others. */
#define CILIUM_MARK_MASK 0xffff0fff
#define CILIUM_MARK_IDENTITY 0x0f00

/* Cilium's programs take this bit of a mark for another thing. In an identity it
 * is set where the cluster's number has bit 7. */
#define CILIUM_MARK_TAKEN 0x80

#define OVERLAY_TTL 64
