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
	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/datapath"
)

// Kinds of the objects that come from the kernel rather than from the agent.
const (
	kindMapEntry     = "BPFIPCacheEntry"
	kindMapEntryList = "BPFIPCacheList"
	kindCounterList  = "BPFCounterList"
)

// bpfCommand reads the pins, so its verbs work whether an agent runs or not.
func bpfCommand(env environment, c *clientOptions) *cobra.Command {
	return group("bpf", "What is in the kernel, whether an agent runs or not",
		group("ipcache", "The map that identifies addresses", bpfIPCacheList(env, c), bpfIPCacheGet(env, c)),
		group("counters", "Packets by identity and verdict", bpfCountersList(env, c)),
		group("service", "The table of services that sockets are given backends from", bpfServiceList(env, c)),
		group("conntrack", "Flows to services that come from no local socket", bpfConntrackList(env, c)),
	)
}

// mapEntry is an entry of the map as JSON.
type mapEntry struct {
	Prefix         netip.Prefix `json:"prefix"`
	ClusterID      uint16       `json:"clusterID"`
	Identity       uint32       `json:"identity"`
	TunnelEndpoint netip.Addr   `json:"tunnelEndpoint"`
	EncryptKey     uint8        `json:"encryptKey"`
	Flags          []string     `json:"flags"`
}

func makeMapEntry(e datapath.MapEntry) mapEntry {
	m := mapEntry{
		Prefix: e.Prefix, ClusterID: e.ClusterID, Identity: uint32(e.Identity), TunnelEndpoint: e.TunnelEndpoint,
		EncryptKey: e.EncryptKey, Flags: []string{},
	}
	if e.Flags != 0 {
		m.Flags = strings.Split(e.Flags.String(), ",")
	}
	return m
}

// key and value print an entry as Cilium's users know it.
func (m *mapEntry) key() string {
	if m.ClusterID == 0 {
		return m.Prefix.String()
	}
	return fmt.Sprintf("%s@%d", m.Prefix, m.ClusterID)
}

func (m *mapEntry) value() string {
	endpoint := m.TunnelEndpoint
	if !endpoint.IsValid() {
		endpoint = netip.IPv4Unspecified()
	}
	flags := strings.Join(m.Flags, ",")
	return fmt.Sprintf("identity=%d encryptkey=%d tunnelendpoint=%s flags=%s", m.Identity, m.EncryptKey, endpoint, cmp.Or(flags, "<none>"))
}

func bpfIPCacheList(env environment, c *clientOptions) *cobra.Command {
	cmd := listCommand(env, "list", "List the entries of the kernel's map", listing[mapEntry]{
		kind: kindMapEntryList, key: (*mapEntry).key,
		fetch: func(context.Context, []string) ([]mapEntry, error) { return listMapEntries(c.bpffs) },
		columns: []column[mapEntry]{
			{title: "IP PREFIX/ADDRESS", cell: (*mapEntry).key},
			{title: "IDENTITY", cell: (*mapEntry).value},
		},
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func listMapEntries(bpffs string) ([]mapEntry, error) {
	m, err := datapath.OpenIPCache(bpffs)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	entries := []mapEntry{}
	if err := m.All(func(e datapath.MapEntry) bool {
		entries = append(entries, makeMapEntry(e))
		return true
	}); err != nil {
		return nil, err
	}
	order := func(a, b mapEntry) int {
		return cmp.Or(comparePrefixes(a.Prefix, b.Prefix), cmp.Compare(a.ClusterID, b.ClusterID))
	}
	slices.SortStableFunc(entries, order)
	// While an agent writes, the kernel may show an entry twice.
	return slices.CompactFunc(entries, func(a, b mapEntry) bool { return order(a, b) == 0 }), nil
}

func bpfIPCacheGet(env environment, c *clientOptions) *cobra.Command {
	var out *output
	cmd := newCommand("get ADDRESS", "Look an address up as the programs in the kernel do", func(_ *cobra.Command, args []string) error {
		addr, err := parseAddress(args[0])
		if err != nil {
			return err
		}
		m, err := datapath.OpenIPCache(c.bpffs)
		if err != nil {
			return err
		}
		defer m.Close()
		e, ok, err := m.Lookup(addr)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("the kernel's map has no entry for %s", addr)
		}
		entry := makeMapEntry(e)
		object := struct {
			api.Meta
			Address netip.Addr `json:"address"`
			mapEntry
		}{api.MetaOf(kindMapEntry), addr, entry}
		return out.show(env.stdout, object, func(t *table) { t.row(fmt.Sprintf("%s maps to %s", addr, entry.value())) })
	})
	someAddress.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

// counter is a counter as JSON.
type counter struct {
	Source      uint32 `json:"sourceIdentity"`
	Destination uint32 `json:"destinationIdentity"`
	Direction   string `json:"direction"`
	Verdict     string `json:"verdict"`
	Mode        string `json:"mode"`
	Packets     uint64 `json:"packets"`
	Bytes       uint64 `json:"bytes"`
}

// identity is that of one end; what has no addresses has none.
func (n *counter) identity(id uint32) string {
	if n.Verdict == bpf.NotIP.String() || n.Verdict == bpf.Malformed.String() {
		return "-"
	}
	return identityText(id)
}

func bpfCountersList(env environment, c *clientOptions) *cobra.Command {
	const short = "List packets and bytes by direction, identities of both ends, verdict, and mode"
	cmd := listCommand(env, "list", short, listing[counter]{
		kind: kindCounterList,
		key: func(n *counter) string {
			return fmt.Sprintf("%s %d %d %s %s", n.Direction, n.Source, n.Destination, n.Verdict, n.Mode)
		},
		fetch: func(context.Context, []string) ([]counter, error) { return listCounters(c.bpffs) },
		columns: []column[counter]{
			{title: "DIRECTION", cell: func(n *counter) string { return n.Direction }},
			{title: "SOURCE", cell: func(n *counter) string { return n.identity(n.Source) }},
			{title: "DESTINATION", cell: func(n *counter) string { return n.identity(n.Destination) }},
			{title: "VERDICT", cell: func(n *counter) string { return n.Verdict }},
			{title: "MODE", cell: func(n *counter) string { return n.Mode }},
			{title: "PACKETS", cell: func(n *counter) string { return strconv.FormatUint(n.Packets, 10) }},
			{title: "BYTES", cell: func(n *counter) string { return strconv.FormatUint(n.Bytes, 10) }},
		},
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func listCounters(bpffs string) ([]counter, error) {
	counters, err := datapath.OpenCounters(bpffs)
	if err != nil {
		return nil, err
	}
	defer counters.Close()
	list, err := counters.List()
	if err != nil {
		return nil, err
	}
	items := []counter{}
	for _, n := range list {
		items = append(items, counter{
			uint32(n.Source), uint32(n.Destination), n.Direction.String(), n.Verdict.String(), n.Mode.String(), n.Packets, n.Bytes,
		})
	}
	return items, nil
}
