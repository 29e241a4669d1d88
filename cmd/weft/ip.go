// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
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
	return plural("ips", group("ip", "Addresses and whose they are, as the agent knows them", ipList(env, c), ipGet(env, c), ipConflicts(env, c)))
}

func ipList(env environment, c *clientOptions) *cobra.Command {
	var cluster string
	cmd := listCommand(env, "list", "List every known prefix", listing[api.IP]{
		kind: api.KindIPList,
		key:  func(ip *api.IP) string { return ip.Prefix.String() },
		fetch: func(ctx context.Context, _ []string) ([]api.IP, error) {
			ips, err := api.NewClient(c.socket).IPs(ctx)
			slices.SortFunc(ips, func(a, b api.IP) int { return comparePrefixes(a.Prefix, b.Prefix) })
			return ofCluster(ctx, c, cluster, ips, err, func(ip *api.IP) string { return clusterText(ip.Cluster, ip.ClusterName) })
		},
		columns: []column[api.IP]{
			{title: "PREFIX", cell: func(ip *api.IP) string { return ip.Prefix.String() }},
			{title: "IDENTITY", cell: func(ip *api.IP) string { return identityText(ip.Identity) }},
			{title: "CLUSTER", cell: func(ip *api.IP) string { return clusterText(ip.Cluster, ip.ClusterName) }},
			{title: "SOURCE", cell: func(ip *api.IP) string { return ip.Source }},
			{title: "HOST", cell: func(ip *api.IP) string { return addrText(ip.Host) }},
			{title: "WORKLOAD", cell: func(ip *api.IP) string { return workload(*ip) }},
			{title: "OWNER", wide: true, cell: func(ip *api.IP) string { return orDash(ip.Owner) }},
			{title: "REVISION", wide: true, cell: func(ip *api.IP) string { return strconv.FormatInt(ip.Revision, 10) }},
			{title: "KEY", wide: true, cell: func(ip *api.IP) string { return strconv.Itoa(int(ip.EncryptKey)) }},
			{title: "FLAGS", wide: true, cell: func(ip *api.IP) string { return orDash(strings.Join(ip.Flags, ",")) }},
		},
	})
	cmd.Aliases = []string{"ls"}
	onlyOfCluster(cmd, env, &cluster, "prefixes")
	return cmd
}

func ipGet(env environment, c *clientOptions) *cobra.Command {
	var out *output
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
		return out.show(env.stdout, detail, func(t *table) { printIP(t, detail) })
	})
	someAddress.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

func printIP(t *table, detail api.IPDetail) {
	ip := detail.IP
	t.row("Address:", detail.Address.String())
	t.row("Prefix:", ip.Prefix.String())
	t.row("Identity:", identityText(ip.Identity))
	t.rows("Labels:", ip.Labels)
	t.row("Cluster:", clusterText(ip.Cluster, ip.ClusterName))
	t.row("Source:", ip.Source)
	t.row("Owner:", orDash(ip.Owner))
	t.row("Host:", addrText(ip.Host))
	t.row("Encrypt key:", strconv.Itoa(int(ip.EncryptKey)))
	t.row("Flags:", orDash(strings.Join(ip.Flags, ",")))
	t.row("Workload:", workload(ip))
	var shadowed []string
	for _, s := range detail.Shadowed {
		shadowed = append(shadowed, fmt.Sprintf("identity %s from %s, source %s, owner %s", identityText(s.Identity),
			clusterText(s.Cluster, s.ClusterName), s.Source, orDash(s.Owner)))
	}
	t.rows("Shadowed:", shadowed)
}

func ipConflicts(env environment, c *clientOptions) *cobra.Command {
	const short = "List the prefixes of which several clusters or sources say different things"
	return listCommand(env, "conflicts", short, listing[api.Conflict]{
		kind: api.KindConflictList,
		key:  func(c *api.Conflict) string { return c.Prefix.String() },
		fetch: func(ctx context.Context, _ []string) ([]api.Conflict, error) {
			return api.NewClient(c.socket).Conflicts(ctx)
		},
		columns: []column[api.Conflict]{
			{title: "PREFIX", cell: func(c *api.Conflict) string { return c.Prefix.String() }},
			{title: "WINNER", cell: func(c *api.Conflict) string { return claimText(&c.Winner) }},
			{title: "SHADOWED", cell: func(c *api.Conflict) string {
				var shadowed []string
				for i := range c.Shadowed {
					shadowed = append(shadowed, claimText(&c.Shadowed[i]))
				}
				return strings.Join(shadowed, "; ")
			}},
			{title: "THE WINNER HAS", cell: func(c *api.Conflict) string { return c.Why }},
		},
	})
}

// claimText is a claim in few words.
func claimText(ip *api.IP) string {
	text := fmt.Sprintf("%s by %s (%s)", identityText(ip.Identity), clusterText(ip.Cluster, ip.ClusterName), ip.Source)
	if w := workload(*ip); w != "-" {
		text += " " + w
	}
	return text
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
