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
	var output *format
	cmd := newCommand("list", "List the entries of the kernel's map", func(*cobra.Command, []string) error {
		m, err := datapath.OpenIPCache(c.bpffs)
		if err != nil {
			return err
		}
		defer m.Close()
		entries := []mapEntry{}
		if err := m.All(func(e datapath.MapEntry) bool {
			entries = append(entries, makeMapEntry(e))
			return true
		}); err != nil {
			return err
		}
		order := func(a, b mapEntry) int {
			return cmp.Or(comparePrefixes(a.Prefix, b.Prefix), cmp.Compare(a.ClusterID, b.ClusterID))
		}
		slices.SortStableFunc(entries, order)
		// While an agent writes, the kernel may show an entry twice.
		entries = slices.CompactFunc(entries, func(a, b mapEntry) bool { return order(a, b) == 0 })
		return printMapEntries(env, *output, entries)
	})
	cmd.Aliases = []string{"ls"}
	output = outputFlag(cmd)
	return cmd
}

func printMapEntries(env environment, output format, entries []mapEntry) error {
	if output == formatJSON {
		return printJSON(env.stdout, api.List[mapEntry]{Meta: api.MetaOf(kindMapEntryList), Items: entries})
	}
	t := newTable(env.stdout, "IP PREFIX/ADDRESS", "IDENTITY")
	for i := range entries {
		t.row(entries[i].key(), entries[i].value())
	}
	return t.flush()
}

func bpfIPCacheGet(env environment, c *clientOptions) *cobra.Command {
	var output *format
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
		if *output == formatJSON {
			return printJSON(env.stdout, struct {
				api.Meta
				Address netip.Addr `json:"address"`
				mapEntry
			}{api.MetaOf(kindMapEntry), addr, entry})
		}
		_, err = fmt.Fprintf(env.stdout, "%s maps to %s\n", addr, entry.value())
		return err
	})
	output = outputFlag(cmd)
	return cmd
}

// counter is a counter as JSON.
type counter struct {
	Identity  uint32 `json:"identity"`
	Direction string `json:"direction"`
	Verdict   string `json:"verdict"`
	Packets   uint64 `json:"packets"`
	Bytes     uint64 `json:"bytes"`
}

func bpfCountersList(env environment, c *clientOptions) *cobra.Command {
	var output *format
	cmd := newCommand("list", "List packets and bytes by direction, identity of the peer, and verdict", func(*cobra.Command, []string) error {
		counters, err := datapath.OpenCounters(c.bpffs)
		if err != nil {
			return err
		}
		defer counters.Close()
		list, err := counters.List()
		if err != nil {
			return err
		}
		if *output == formatJSON {
			items := []counter{}
			for _, n := range list {
				items = append(items, counter{uint32(n.Identity), n.Direction.String(), n.Verdict.String(), n.Packets, n.Bytes})
			}
			return printJSON(env.stdout, api.List[counter]{Meta: api.MetaOf(kindCounterList), Items: items})
		}
		t := newTable(env.stdout, "DIRECTION", "IDENTITY", "VERDICT", "PACKETS", "BYTES")
		for _, n := range list {
			who := identityText(uint32(n.Identity))
			if n.Verdict == bpf.NotIP || n.Verdict == bpf.Malformed {
				who = "-"
			}
			t.row(n.Direction.String(), who, n.Verdict.String(), strconv.FormatUint(n.Packets, 10), strconv.FormatUint(n.Bytes, 10))
		}
		return t.flush()
	})
	cmd.Aliases = []string{"ls"}
	output = outputFlag(cmd)
	return cmd
}
