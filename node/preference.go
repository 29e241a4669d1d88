// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net/netip"
	"strings"
)

// Preference says by which of its addresses a node is reached, best first, where [Node.IP]'s own order is not what the
// network between the clusters needs. It never leaves a node without an address: what it does not match, that order decides.
type Preference []Choice

// Choice prefers addresses of one type, or, where Prefix is valid, those inside it.
type Choice struct {
	Type   string
	Prefix netip.Prefix
}

// ParseChoice reads a prefix such as 192.0.2.0/24, or else the name of a type of address. The addresses of nodes in their
// own pod networks cannot be chosen: they are reached through the one that is.
func ParseChoice(text string) (Choice, error) {
	if strings.Contains(text, "/") {
		p, err := netip.ParsePrefix(text)
		switch {
		case err != nil, p.Addr().Is4In6():
			return Choice{}, fmt.Errorf("%q is not a prefix such as 192.0.2.0/24", text)
		case p != p.Masked():
			return Choice{}, fmt.Errorf("%s has bits beyond its length: did you mean %s?", p, p.Masked())
		}
		return Choice{Prefix: p}, nil
	}
	letter := func(c rune) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' }
	if text == "" || strings.ContainsFunc(text, func(c rune) bool { return !letter(c) }) {
		return Choice{}, fmt.Errorf("%q is neither a type of address such as ExternalIP nor a prefix", text)
	}
	if text == CiliumInternalIP {
		return Choice{}, fmt.Errorf("%s is an address in a pod network, by which no node is reached", text)
	}
	return Choice{Type: text}, nil
}

// String is what ParseChoice reads.
func (c Choice) String() string {
	if c.Prefix.IsValid() {
		return c.Prefix.String()
	}
	return c.Type
}

// matches reports whether a is one of the addresses preferred.
func (c Choice) matches(a Address) bool {
	if c.Prefix.IsValid() {
		return c.Prefix.Contains(a.IP)
	}
	return c.Type == a.Type
}

// Preferences holds the preference for the nodes of each cluster by its name, and under the empty name that for all others.
type Preferences map[string]Preference

// Of returns the preference for the nodes of a cluster.
func (p Preferences) Of(cluster string) Preference {
	if own, ok := p[cluster]; ok {
		return own
	}
	return p[""]
}
