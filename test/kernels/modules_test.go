// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const modulesDep = `kernel/drivers/net/dummy.ko:
kernel/drivers/net/vxlan/vxlan.ko.xz: kernel/net/ipv6/ip6_udp_tunnel.ko.xz kernel/net/ipv4/udp_tunnel.ko.xz
kernel/net/ipv4/udp_tunnel.ko.xz:
kernel/net/ipv6/ip6_udp_tunnel.ko.xz: kernel/net/ipv4/udp_tunnel.ko.xz
kernel/net/bridge/bridge.ko: kernel/net/802/stp.ko kernel/net/llc/llc.ko
kernel/net/802/stp.ko: kernel/net/llc/llc.ko
kernel/net/llc/llc.ko:
kernel/lib/with-dash.ko.zst: kernel/lib/built-in.ko
kernel/lib/broken.ko: kernel/lib/nowhere.ko
`

const modulesBuiltin = "kernel/net/ipv6/ipv6.ko\nkernel/lib/built-in.ko\n"

func TestModuleOrder(t *testing.T) {
	d, err := parseDependencies(modulesDep, modulesBuiltin)
	if err != nil {
		t.Fatal(err)
	}
	const udp, udp6 = "kernel/net/ipv4/udp_tunnel.ko.xz", "kernel/net/ipv6/ip6_udp_tunnel.ko.xz"
	const vxlan, dummy = "kernel/drivers/net/vxlan/vxlan.ko.xz", "kernel/drivers/net/dummy.ko"
	for _, tc := range []struct {
		wanted string
		want   []string
	}{
		{"dummy", []string{dummy}},
		{"vxlan", []string{udp, udp6, vxlan}},
		{"vxlan udp_tunnel dummy vxlan", []string{udp, udp6, vxlan, dummy}},
		{"dummy ip6_udp_tunnel vxlan", []string{dummy, udp, udp6, vxlan}},
		{"bridge", []string{"kernel/net/llc/llc.ko", "kernel/net/802/stp.ko", "kernel/net/bridge/bridge.ko"}},
		{"ipv6", nil},
		{"with_dash", []string{"kernel/lib/with-dash.ko.zst"}},
	} {
		got, err := d.order(strings.Fields(tc.wanted)...)
		if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", tc.wanted, err, diff)
		}
	}
	for wanted, names := range map[string][]string{"absent": {"absent"}, "broken": {"broken", "nowhere"}} {
		_, err := d.order(wanted)
		for _, name := range names {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v, want an error that names %s", wanted, err, name)
			}
		}
	}
	if _, err := parseDependencies("a.ko:\nno colon\n", ""); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("line without a colon: %v, want an error that names line 2", err)
	}
}
