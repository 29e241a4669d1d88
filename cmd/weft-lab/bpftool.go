// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// pinnedObjects are the kernel's numbers of what an agent has pinned: of its map by "ipcache", of its links by their
// file names. A number that stays is the same object.
type pinnedObjects map[string]int

// readPinned asks bpftool for the numbers of a node's pinned map and links.
func (l *lab) readPinned(ctx context.Context, node string) (pinnedObjects, error) {
	pins := filepath.Join(l.bpffs(node), "weft")
	links, err := os.ReadDir(filepath.Join(pins, "links"))
	if err != nil {
		return nil, err
	}
	found := make(pinnedObjects)
	if found["ipcache"], err = pinnedID(ctx, "map", filepath.Join(pins, "ipcache")); err != nil {
		return nil, err
	}
	for _, link := range links {
		if found[link.Name()], err = pinnedID(ctx, "link", filepath.Join(pins, "links", link.Name())); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// pinnedID returns the kernel's number of a pinned object of that kind, "map" or "link".
func pinnedID(ctx context.Context, kind, file string) (int, error) {
	out, err := output(exec.CommandContext(ctx, "bpftool", "-j", kind, "show", "pinned", file))
	if err != nil {
		return 0, err
	}
	var object struct {
		ID int `json:"id"`
	}
	if err := json.Unmarshal([]byte(out), &object); err != nil {
		return 0, fmt.Errorf("read what bpftool says of %s: %w", file, err)
	}
	return object.ID, nil
}

// output runs a command and returns what it prints; its error carries what it complains of.
func output(cmd *exec.Cmd) (string, error) {
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(complaint.String()))
	}
	return string(out), nil
}

// splitDump cuts what `bpftool map dump` prints, a list that is nearly JSON, into its entries, each on one line.
func splitDump(dump string) []string {
	var entries []string
	depth, start := 0, 0
	for i, c := range dump {
		switch c {
		case '{':
			if depth == 0 {
				start = i
			}
			depth++
		case '}':
			depth--
			if depth == 0 {
				entries = append(entries, strings.Join(strings.Fields(dump[start:i+1]), " "))
			}
		}
	}
	return entries
}

// dumpEntryOf returns the entry of one address in a split dump.
func dumpEntryOf(entries []string, addr netip.Addr) (string, bool) {
	text := strings.Trim(strings.ReplaceAll(fmt.Sprint(addr.AsSlice()), " ", ","), "[]")
	key := regexp.MustCompile(`^[^}]*"prefixlen": ` + fmt.Sprint(32+addr.BitLen()) + `,.*?"addr": \[` + text + `[ ,]`)
	for _, entry := range entries {
		head, _, _ := strings.Cut(entry, `"value"`)
		if key.MatchString(head) {
			return entry, true
		}
	}
	return "", false
}

// abridgeEntry shortens an entry of a split dump to three lines: the key, the value and its flags. Of each union of an
// IPv4 and an IPv6 address it keeps the member that holds the address, and of that the bytes.
func abridgeEntry(entry string, v6 bool) string {
	key, value, _ := strings.Cut(entry, `, "value": `)
	value = abridgeUnion(value, strings.Contains(value, `"flag_ipv6_tunnel_ep": 0x1`))
	return abridgeUnion(key, v6) + ",\n  \"value\": " + strings.Replace(value, `, "pad":`, ",\n    \"pad\":", 1)
}

func abridgeUnion(text string, v6 bool) string {
	keep, drop := "ip4", "ip6"
	if v6 {
		keep, drop = drop, keep
	}
	kept := regexp.MustCompile(`"` + keep + `": \{.*?"addr": \[([0-9,]*) ?\] \}`)
	return kept.ReplaceAllString(cutMember(text, drop), `"`+keep+`": { … "addr": [$1] }`)
}

// cutMember replaces every object member of that name by an ellipsis.
func cutMember(text, name string) string {
	var out strings.Builder
	for {
		before, after, ok := strings.Cut(text, `"`+name+`": {`)
		out.WriteString(before)
		if !ok {
			return out.String()
		}
		depth, end := 1, 0
		for end = 0; end < len(after) && depth > 0; end++ {
			switch after[end] {
			case '{':
				depth++
			case '}':
				depth--
			}
		}
		out.WriteString("…")
		text = after[end:]
	}
}
