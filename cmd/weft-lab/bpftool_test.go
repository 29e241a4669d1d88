// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// dump has the shape in which bpftool prints the map: one entry for each family.
const dump = `[{
        "key": {
            "lpm_key": {
                "prefixlen": 64,
                "data": []
            },
            "cluster_id": 0,
            "pad1": 0,
            "family": 1,
            "": {
                "ip4": {
                    "be32": 167838218,
                    "addr": [10,2,1,10
                    ]
                },
                "ip6": {
                    "": {
                        "p1": 167838218,
                        "p2": 0
                    },
                    "addr": [10,2,1,10,0,0,0,0,0,0,0,0,0,0,0,0
                    ]
                }
            }
        },
        "value": {
            "sec_identity": 131329,
            "tunnel_endpoint": {
                "ip4": {
                    "be32": 16913068,
                    "addr": [172,18,2,1
                    ]
                },
                "ip6": {
                    "addr": [172,18,2,1,0,0,0,0,0,0,0,0,0,0,0,0
                    ]
                }
            },
            "pad": 0,
            "flag_has_tunnel_ep": 0x1
        }
    },{
        "key": {
            "lpm_key": {
                "prefixlen": 160,
                "data": []
            },
            "family": 2,
            "": {
                "ip4": {
                    "be32": 268435709,
                    "addr": [253,0,0,16
                    ]
                },
                "ip6": {
                    "addr": [253,0,0,16,0,2,0,1,0,0,0,0,0,0,0,16
                    ]
                }
            }
        },
        "value": {
            "sec_identity": 131330
        }
    }
]
`

func TestAbridgedDump(t *testing.T) {
	entries := splitDump(dump)
	if len(entries) != 2 {
		t.Fatalf("splitDump found %d entries, want 2: %q", len(entries), entries)
	}
	for addr, want := range map[string]string{
		"10.2.1.10": `{ "key": { "lpm_key": { "prefixlen": 64, "data": [] }, "cluster_id": 0, "pad1": 0, "family": 1, "": { "ip4": { … "addr": [10,2,1,10] }, … } },
  "value": { "sec_identity": 131329, "tunnel_endpoint": { "ip4": { … "addr": [172,18,2,1] }, … },
    "pad": 0, "flag_has_tunnel_ep": 0x1 } }`,
		"fd00:10:2:1::10": `{ "key": { "lpm_key": { "prefixlen": 160, "data": [] }, "family": 2, "": { …, "ip6": { … "addr": [253,0,0,16,0,2,0,1,0,0,0,0,0,0,0,16] } } },
  "value": { "sec_identity": 131330 } }`,
	} {
		a := netip.MustParseAddr(addr)
		entry, ok := dumpEntryOf(entries, a)
		if !ok {
			t.Errorf("dumpEntryOf found no %s", addr)
			continue
		}
		if diff := cmp.Diff(want, abridgeEntry(entry, a.Is6())); diff != "" {
			t.Errorf("abridged entry of %s (-want +got):\n%s", addr, diff)
		}
	}
	for _, absent := range []string{"10.2.1.1", "10.2.1.100", "172.18.2.1", "253.0.0.16", "fd00:10:2:1::1"} {
		if entry, ok := dumpEntryOf(entries, netip.MustParseAddr(absent)); ok {
			t.Errorf("dumpEntryOf(%s) = %s, want none", absent, entry)
		}
	}
}
