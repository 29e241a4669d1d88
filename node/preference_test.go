// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
	"strings"
	"testing"
)

// A node with several addresses is reached by the one that its reader prefers, in each family, and never by none.
func TestPreference(t *testing.T) {
	n := Node{Cluster: "west", Name: "n"}
	for _, a := range []string{
		"CiliumInternalIP=10.2.1.1", "InternalIP=172.18.2.1", "InternalIP=192.168.7.1", "ExternalIP=198.51.100.1", "ExternalIP=198.51.100.2",
		"Wireguard=100.64.0.1", "InternalIP=fd00:18::1", "CiliumInternalIP=fd00:10::1",
	} {
		kind, ip, _ := strings.Cut(a, "=")
		n.Addresses = append(n.Addresses, Address{kind, netip.MustParseAddr(ip)})
	}
	for prefer, want := range map[string]string{
		"":                               "172.18.2.1 fd00:18::1",
		"InternalIP":                     "172.18.2.1 fd00:18::1",
		"ExternalIP":                     "198.51.100.1 fd00:18::1",
		"Wireguard":                      "100.64.0.1 fd00:18::1",
		"Nothing":                        "172.18.2.1 fd00:18::1",
		"192.168.0.0/16":                 "192.168.7.1 fd00:18::1",
		"198.51.100.2/32,ExternalIP":     "198.51.100.2 fd00:18::1",
		"203.0.113.0/24,Wireguard":       "100.64.0.1 fd00:18::1",
		"10.0.0.0/8":                     "172.18.2.1 fd00:18::1", // an address in the pod network is none
		"fd00::/16,ExternalIP":           "198.51.100.1 fd00:18::1",
		"::/0,0.0.0.0/0":                 "172.18.2.1 fd00:18::1",
		"Nothing,192.168.7.1/32,::1/128": "192.168.7.1 fd00:18::1",
	} {
		n.Preference = nil
		for _, text := range strings.Split(prefer, ",") {
			if text == "" {
				continue
			}
			choice, err := ParseChoice(text)
			if err != nil || choice.String() != text {
				t.Fatalf("ParseChoice(%q) = %v, %v", text, choice, err)
			}
			n.Preference = append(n.Preference, choice)
		}
		if got := n.IP(false).String() + " " + n.IP(true).String(); got != want {
			t.Errorf("with %q: got %s, want %s", prefer, got, want)
		}
	}
}

func TestParseChoiceRejects(t *testing.T) {
	for text, want := range map[string]string{
		"": "neither", "192.0.2.1": "neither", "External IP": "neither", "CiliumInternalIP": "pod network", "192.0.2.1/24": "192.0.2.0/24",
		"192.0.2.0/33": "not a prefix", "a/b": "not a prefix", "::ffff:192.0.2.0/120": "not a prefix",
	} {
		if c, err := ParseChoice(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseChoice(%q) = %v, %v, want an error with %q", text, c, err, want)
		}
	}
}

func TestPreferences(t *testing.T) {
	external, internal := Preference{{Type: ExternalIP}}, Preference{{Type: InternalIP}}
	p := Preferences{"": external, "west": internal}
	if got := p.Of("west"); len(got) != 1 || got[0] != internal[0] {
		t.Errorf("west: %v", got)
	}
	if got := p.Of("east"); len(got) != 1 || got[0] != external[0] {
		t.Errorf("east: %v", got)
	}
	if got := Preferences(nil).Of("east"); got != nil {
		t.Errorf("none: %v", got)
	}
}
