// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/datapath"
)

const kindServiceFlowList = "BPFConntrackList"

// serviceFlow is a flow of the kernel's conntrack, as JSON.
type serviceFlow struct {
	Protocol string         `json:"protocol"`
	Client   netip.AddrPort `json:"client"`
	Frontend netip.AddrPort `json:"frontend"`
	Backend  netip.AddrPort `json:"backend"`
	State    string         `json:"state"` // "asked", "answered" or "closed"
	Age      float64        `json:"ageSeconds"`
	Idle     float64        `json:"idleSeconds"`
}

func makeServiceFlow(f datapath.ServiceFlow) serviceFlow {
	shown := serviceFlow{
		Protocol: f.Protocol.String(), Client: f.Client, Frontend: f.Frontend, Backend: f.Backend, State: "asked",
		Age: f.Age.Seconds(), Idle: f.Idle.Seconds(),
	}
	switch {
	case f.Closed:
		shown.State = "closed"
	case f.Answered:
		shown.State = "answered"
	}
	return shown
}

func (f *serviceFlow) key() string { return fmt.Sprintf("%s %s %s", f.Protocol, f.Client, f.Frontend) }

// inSeconds shows a number of seconds.
func inSeconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}

func bpfConntrackList(env environment, c *clientOptions) *cobra.Command {
	cmd := listCommand(env, "list", "List the flows whose packets are translated to backends of services, and back", listing[serviceFlow]{
		kind: kindServiceFlowList, key: (*serviceFlow).key,
		fetch: func(context.Context, []string) ([]serviceFlow, error) { return listServiceFlows(c.bpffs) },
		columns: []column[serviceFlow]{
			{title: "PROTOCOL", cell: func(f *serviceFlow) string { return f.Protocol }},
			{title: "CLIENT", cell: func(f *serviceFlow) string { return f.Client.String() }},
			{title: "FRONTEND", cell: func(f *serviceFlow) string { return f.Frontend.String() }},
			{title: "BACKEND", cell: func(f *serviceFlow) string { return f.Backend.String() }},
			{title: "STATE", cell: func(f *serviceFlow) string { return f.State }},
			{title: "AGE", cell: func(f *serviceFlow) string { return inSeconds(f.Age) }},
			{title: "IDLE", cell: func(f *serviceFlow) string { return inSeconds(f.Idle) }},
		},
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func listServiceFlows(bpffs string) ([]serviceFlow, error) {
	conntrack, err := datapath.OpenServiceFlows(bpffs)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; flows are translated with --service-tc alone", err)
		}
		return nil, err
	}
	defer conntrack.Close()
	items := []serviceFlow{}
	err = conntrack.All(func(f datapath.ServiceFlow) bool {
		items = append(items, makeServiceFlow(f))
		return true
	})
	slices.SortFunc(items, func(a, b serviceFlow) int {
		if c := a.Frontend.Compare(b.Frontend); c != 0 {
			return c
		}
		return a.Client.Compare(b.Client)
	})
	return items, err
}
