// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
)

func ipCommand(env environment, c *clientOptions) *cobra.Command {
	return group("ip", "Addresses and whose they are, as the agent knows them", ipList(env, c), ipGet(env, c))
}

func ipList(env environment, c *clientOptions) *cobra.Command {
	var output *format
	cmd := newCommand("list", "List every known prefix", func(cmd *cobra.Command, _ []string) error {
		ips, err := api.NewClient(c.socket).IPs(cmd.Context())
		if err != nil {
			return err
		}
		slices.SortFunc(ips, func(a, b api.IP) int { return comparePrefixes(a.Prefix, b.Prefix) })
		if *output == formatJSON {
			return printJSON(env.stdout, api.List[api.IP]{Meta: api.MetaOf(api.KindIPList), Items: ips})
		}
		t := newTable(env.stdout, "PREFIX", "IDENTITY", "CLUSTER", "SOURCE", "HOST", "WORKLOAD")
		for _, ip := range ips {
			t.row(ip.Prefix.String(), identityText(ip.Identity), clusterText(ip.Cluster, ip.ClusterName), ip.Source,
				addrText(ip.Host), workload(ip))
		}
		return t.flush()
	})
	output = outputFlag(cmd)
	return cmd
}

func ipGet(env environment, c *clientOptions) *cobra.Command {
	var output *format
	const short = "Show whose an address is: the longest known prefix that contains it"
	cmd := newCommand("get ADDRESS", short, func(cmd *cobra.Command, args []string) error {
		addr, err := parseAddress(args[0])
		if err != nil {
			return err
		}
		detail, err := api.NewClient(c.socket).IP(cmd.Context(), addr)
		if err != nil {
			return err
		}
		if *output == formatJSON {
			return printJSON(env.stdout, detail)
		}
		return printIP(env, detail)
	})
	output = outputFlag(cmd)
	return cmd
}

func printIP(env environment, detail api.IPDetail) error {
	ip := detail.IP
	t := newTable(env.stdout)
	t.row("Address:", detail.Address.String())
	t.row("Prefix:", ip.Prefix.String())
	t.row("Identity:", identityText(ip.Identity))
	title := "Labels:"
	for _, label := range ip.Labels {
		t.row(title, label)
		title = ""
	}
	t.row("Cluster:", clusterText(ip.Cluster, ip.ClusterName))
	t.row("Source:", ip.Source)
	t.row("Owner:", orDash(ip.Owner))
	t.row("Host:", addrText(ip.Host))
	t.row("Encrypt key:", strconv.Itoa(int(ip.EncryptKey)))
	t.row("Flags:", orDash(strings.Join(ip.Flags, ",")))
	t.row("Workload:", workload(ip))
	title = "Shadowed:"
	for _, s := range detail.Shadowed {
		t.row(title, fmt.Sprintf("identity %s from %s, source %s, owner %s", identityText(s.Identity),
			clusterText(s.Cluster, s.ClusterName), s.Source, orDash(s.Owner)))
		title = ""
	}
	return t.flush()
}

func parseAddress(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, usagef("%q is not an IP address", text)
	}
	return addr.Unmap(), nil
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
}

// identityText is the number, and the name of a reserved identity.
func identityText(id uint32) string {
	number := strconv.FormatUint(uint64(id), 10)
	if name := identity.ID(id).String(); name != number {
		return number + " " + name
	}
	return number
}

func workload(ip api.IP) string {
	if ip.Namespace == "" && ip.Pod == "" {
		return "-"
	}
	return ip.Namespace + "/" + ip.Pod
}
