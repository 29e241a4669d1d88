// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/bpf"
)

// showFlows asks west-1's agent which packets of the requests its kernel has seen come in, and whose it took them for.
func (d *demo) showFlows(ctx context.Context) error {
	d.command("weft-lab exec west-1 weft flows")
	to := d.web["west-1"]
	for _, from := range []podPlan{d.web["east-1"], d.db["east-1"]} {
		for _, addrs := range [][2]netip.Addr{{from.IPv4, to.IPv4}, {from.IPv6, to.IPv6}} {
			for _, protocol := range []string{"TCP", "UDP"} {
				flow, err := d.waitFlow(ctx, d.west1, flowKey{addrs[0], addrs[1], protocol})
				if err != nil {
					return err
				}
				if err := checkSource(flow, from); err != nil {
					return err
				}
				d.done("%s %-15s → %-22s from identity %d: %s, cluster %s", flow.Protocol, flow.Source.IP,
					netip.AddrPortFrom(flow.Destination.IP, flow.Destination.Port),
					flow.Source.Identity, strings.Join(shortLabels(flow.Source.Labels), " "), flow.Source.ClusterName)
			}
		}
	}
	return nil
}

// flowKey is what to look for among flows: packets to the server's port that come in.
type flowKey struct {
	from, to netip.Addr
	protocol string
}

func (k flowKey) matches(f *api.Flow) bool {
	return f != nil && f.Direction == "ingress" && strings.EqualFold(f.Protocol, k.protocol) &&
		f.Source.IP == k.from && f.Destination.IP == k.to && f.Destination.Port == servicePort
}

// waitFlow returns the first flow of that kind that a node's agent remembers, once it does.
func (d *demo) waitFlow(ctx context.Context, n nodePlan, key flowKey) (*api.Flow, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var found *api.Flow
	err := poll(ctx, 20*time.Millisecond, func() error {
		err := api.NewClient(d.socket(n.Name)).Flows(ctx, api.FlowQuery{Last: -1}, func(e api.FlowEvent) error {
			if found == nil && key.matches(e.Flow) {
				found = e.Flow
			}
			return nil
		})
		if err == nil && found == nil {
			err = fmt.Errorf("the agent of %s has seen no %s from %s to %s", n.Name, key.protocol, key.from, key.to)
		}
		return err
	})
	return found, err
}

// checkSource checks that the kernel took a flow's source for the pod that it is.
func checkSource(flow *api.Flow, from podPlan) error {
	source := flow.Source
	if flow.Verdict != bpf.Identified.String() || source.Identity != from.Identity || source.ClusterName != from.Cluster {
		return fmt.Errorf("%s was %s as %d of cluster %q, not as %d of %q",
			from.path(), flow.Verdict, source.Identity, source.ClusterName, from.Identity, from.Cluster)
	}
	for _, label := range source.Labels {
		if label == "k8s:app="+from.App {
			return nil
		}
	}
	return fmt.Errorf("%s was taken for labels %q, without k8s:app=%s", from.path(), source.Labels, from.App)
}

// shortLabels keeps the labels that a reader of the story needs: the app and its namespace.
func shortLabels(labels []string) []string {
	var short []string
	for _, label := range labels {
		if strings.HasPrefix(label, "k8s:app=") || strings.HasPrefix(label, "k8s:io.kubernetes.pod.namespace=") {
			short = append(short, label)
		}
	}
	return short
}
