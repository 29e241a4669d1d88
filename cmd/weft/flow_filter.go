// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
)

// flowFilter says which flows are wanted: those that are what each option that is given asks for. Options about a peer ask for
// either side of the flow.
type flowFilter struct {
	clusters   []string
	identities []identity.ID
	labels     labelSelector
	addresses  []netip.Prefix
	ports      []uint16
	verdicts   []string
	devices    []string
}

func newFlowFilter(flags *pflag.FlagSet) *flowFilter {
	f := new(flowFilter)
	flags.StringSliceVar(&f.clusters, "cluster", nil, "only flows of these clusters, by `name`")
	flags.Var(&list[identity.ID]{&f.identities, identity.ParseID, identity.ID.String, "identities", false}, "identity",
		"only flows of these identities, by number, or by name if they are reserved")
	flags.VarP(&f.labels, "label", "l", "only flows of workloads whose labels match this selector, such as app=web,tier!=db or 'app in (web, db)'")
	flags.Var(&list[netip.Prefix]{&f.addresses, parseAddressOrPrefix, netip.Prefix.String, "addresses", false}, "ip",
		"only flows of these addresses or prefixes")
	flags.Var(&list[uint16]{&f.ports, parsePortNumber, formatPort, "ports", false}, "port", "only flows of these ports")
	flags.Var(&list[string]{&f.verdicts, parseVerdict, func(s string) string { return s }, "verdicts", false}, "verdict",
		"only flows of these verdicts, such as identified or world")
	flags.StringSliceVar(&f.devices, "device", nil, "only flows on these devices, by `name`")
	return f
}

// wants reports whether a flow passes.
func (f *flowFilter) wants(flow *api.Flow) bool {
	peers := []*api.Peer{&flow.Source, &flow.Destination}
	either := func(is func(*api.Peer) bool) bool { return slices.ContainsFunc(peers, is) }
	return among(f.verdicts, flow.Verdict) && among(f.devices, flow.Device) &&
		(len(f.clusters) == 0 || either(func(p *api.Peer) bool { return slices.Contains(f.clusters, p.ClusterName) })) &&
		(len(f.identities) == 0 || either(func(p *api.Peer) bool { return slices.Contains(f.identities, identity.ID(p.Identity)) })) &&
		(len(f.ports) == 0 || either(func(p *api.Peer) bool { return slices.Contains(f.ports, p.Port) })) &&
		(len(f.addresses) == 0 || either(func(p *api.Peer) bool {
			return slices.ContainsFunc(f.addresses, func(a netip.Prefix) bool { return a.Contains(p.IP) })
		})) &&
		(len(f.labels) == 0 || either(func(p *api.Peer) bool { return f.labels.matches(p.Labels) }))
}

// among: a list that is empty asks for nothing.
func among(wanted []string, is string) bool { return len(wanted) == 0 || slices.Contains(wanted, is) }

func parseVerdict(text string) (string, error) {
	if names := verdictNames(); !slices.Contains(names, text) {
		return "", fmt.Errorf("verdict %q: want one of %s", text, strings.Join(names, ", "))
	}
	return text, nil
}

func parseAddressOrPrefix(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
		return netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is neither an address nor a prefix", text)
	}
	return p.Masked(), nil
}

func parsePortNumber(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %q: want a number from 1 to 65535", text)
	}
	return uint16(n), nil
}

func formatPort(port uint16) string { return strconv.Itoa(int(port)) }
