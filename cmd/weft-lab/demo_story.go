// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/weftmesh/weft/datapath"
)

// outputIn runs a command in a node's network namespace, in the environment of `weft-lab exec`.
func (d *demo) outputIn(ctx context.Context, n nodePlan, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = d.commandEnv(n, n.Name)
	var out string
	err := inNetNS(n.NetNS, func() (err error) {
		out, err = output(cmd)
		return err
	})
	return out, err
}

func (d *demo) showStatus(ctx context.Context) error {
	d.command("weft-lab exec east-1 weft status")
	text, err := d.outputIn(ctx, d.east1, d.weft, "status")
	if err != nil {
		return err
	}
	d.quote(text)
	return nil
}

// showRequests sends requests from both of east-1's pods to web of west-1.
func (d *demo) showRequests(ctx context.Context) error {
	to := d.web["west-1"]
	s := &server{name: to.path()}
	if err := inNetNS(to.NetNS, func() error { return s.listen(to.IPv4, to.IPv6) }); err != nil {
		return err
	}
	serving, stop := context.WithCancel(ctx)
	served := make(chan error)
	go func() { served <- s.serve(serving) }()
	var errs []error
	for _, from := range []podPlan{d.web["east-1"], d.db["east-1"]} {
		for _, addr := range []netip.Addr{to.IPv4, to.IPv6} {
			for _, protocol := range []string{"tcp", "udp"} {
				errs = append(errs, d.showRequest(ctx, from, protocol, netip.AddrPortFrom(addr, servicePort)))
			}
		}
	}
	stop()
	return errors.Join(append(errs, <-served)...)
}

func (d *demo) showRequest(ctx context.Context, from podPlan, protocol string, to netip.AddrPort) error {
	start := time.Now()
	var answer string
	if err := inNetNS(from.NetNS, func() (err error) {
		answer, err = request(ctx, protocol, to)
		return err
	}); err != nil {
		return fmt.Errorf("from %s: %w", from.path(), err)
	}
	d.done("%-10s %s %-22s answer: %s (%.1f ms)",
		from.path(), strings.ToUpper(protocol), to, answer, milliseconds(time.Since(start)))
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// showMap prints a few entries of east-1's map, as bpftool prints them.
func (d *demo) showMap(ctx context.Context) error {
	pin := filepath.Join(d.bpffs("east-1"), "weft", "ipcache")
	d.command("bpftool map dump pinned %s", pin)
	dump, err := output(exec.CommandContext(ctx, "bpftool", "map", "dump", "pinned", pin))
	if err != nil {
		return err
	}
	entries := splitDump(dump)
	shown := []netip.Addr{d.web["west-1"].IPv4, d.web["west-1"].IPv6, d.west1.IPv4.Addr()}
	for _, addr := range shown {
		entry, ok := dumpEntryOf(entries, addr)
		if !ok {
			return fmt.Errorf("%s is not in the map", addr)
		}
		d.quote(abridgeEntry(entry, addr.Is6()))
	}
	d.quote(fmt.Sprintf("… and %d entries more; in an entry, … stands for another view of the same bytes",
		len(entries)-len(shown)))
	return nil
}

// showRoutes prints the routes that weft installed on east-1.
func (d *demo) showRoutes(ctx context.Context) error {
	for _, family := range []string{"-4", "-6"} {
		args := []string{family, "route", "show", "proto", fmt.Sprint(routeProtocol)}
		d.command("weft-lab exec east-1 ip %s", strings.Join(args, " "))
		text, err := d.outputIn(ctx, d.east1, "ip", args...)
		if err != nil {
			return err
		}
		d.quote(text)
	}
	return nil
}

// showChange adds a pod in west and removes another one, and measures when the kernels of east have followed.
func (d *demo) showChange(ctx context.Context) error {
	cache := d.west1.pod("cache", "cache", 12)
	if err := buildPodNetwork(d.west1, cache); err != nil {
		return err
	}
	start := time.Now()
	if err := d.declarePod(cache); err != nil {
		return err
	}
	if err := d.followed(ctx, start, "added: its file in endpoints/ is written", cache, true); err != nil {
		return err
	}
	db := d.db["west-2"]
	start = time.Now()
	if err := d.withdrawPod(db); err != nil {
		return err
	}
	return d.followed(ctx, start, "removed: its file in endpoints/ is gone", db, false)
}

// followed waits until every kernel of east has, or has no longer, the addresses of a pod.
func (d *demo) followed(ctx context.Context, start time.Time, what string, p podPlan, present bool) error {
	d.say("  %s %s", p.path(), what)
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for _, n := range d.Clusters[0].Nodes {
		ipcache, err := datapath.OpenIPCache(d.bpffs(n.Name))
		if err != nil {
			return err
		}
		defer ipcache.Close()
		if err := poll(ctx, time.Millisecond, func() error {
			if present {
				return knows(ipcache, p)
			}
			return forgot(ipcache, p)
		}); err != nil {
			return fmt.Errorf("the kernel of %s has not followed: %w", n.Name, err)
		}
		d.done("the kernel of %s has followed after %.0f ms", n.Name, milliseconds(time.Since(start)))
	}
	return nil
}

// forgot checks that a kernel map gives neither address of a pod its identity; their node's pod prefixes still hold them.
func forgot(ipcache *datapath.IPCache, p podPlan) error {
	for _, addr := range []netip.Addr{p.IPv4, p.IPv6} {
		entry, ok, err := ipcache.Lookup(addr)
		if err != nil {
			return err
		}
		if ok && uint32(entry.Identity) == p.Identity {
			return fmt.Errorf("%s (%s) is still there", addr, p.path())
		}
	}
	return nil
}

// requireTools checks for the programs that the story calls.
func requireTools(names ...string) error {
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("%s is not installed: `make deps` installs what the demo calls", name)
		}
	}
	return nil
}
