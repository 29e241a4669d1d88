// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
)

// clusterRouting is the routing mode of one cluster.
type clusterRouting struct {
	cluster string
	mode    datapath.RoutingMode
}

func (c clusterRouting) String() string { return c.cluster + "=" + string(c.mode) }

func parseClusterRouting(text string) (clusterRouting, error) {
	cluster, mode, ok := strings.Cut(text, "=")
	c := clusterRouting{cluster: cluster, mode: datapath.RoutingMode(mode)}
	if !ok || !c.mode.Valid() {
		return c, fmt.Errorf("%q: want CLUSTER=MODE with the mode none, native or tunnel", text)
	}
	return c, identity.ValidateClusterName(cluster)
}

// clusterRouting gathers the modes by cluster; of several for one, the last counts.
func (o *agentOptions) clusterRouting() map[string]datapath.RoutingMode {
	modes := map[string]datapath.RoutingMode{}
	for _, c := range o.clusterRoutingMode {
		modes[c.cluster] = c.mode
	}
	return modes
}

// markMask is a number that is written with its bits in sight.
type markMask uint32

func (m *markMask) String() string { return fmt.Sprintf("%#x", uint32(*m)) }
func (m *markMask) Type() string   { return "mask" }

func (m *markMask) Set(text string) error {
	n, err := strconv.ParseUint(text, 0, 32)
	*m = markMask(n)
	return err
}

// datapathMark is what --mark and its companions say.
func (o *agentOptions) datapathMark() datapath.Mark {
	m := datapath.Mark{Mask: uint32(o.markMask), Shift: o.markShift}
	switch o.mark {
	case "custom":
		m.Kind = bpf.MarkShifted
	case "cilium":
		m.Kind = bpf.MarkCilium
	}
	return m
}

// checkMark refuses marks that could not be told from others.
func (c *agentConfig) checkMark() error {
	switch c.mark {
	case "none", "cilium":
		if c.markMask != 0 || c.markShift != 0 {
			return fmt.Errorf("--mark %s: --mark-mask and --mark-shift go with --mark custom", c.mark)
		}
	case "custom":
	default:
		return fmt.Errorf("--mark %q: want none, cilium or custom", c.mark)
	}
	m := c.datapathMark()
	if err := m.Validate(); err != nil {
		return fmt.Errorf("--mark %s: %w", c.mark, err)
	}
	if err := datapath.CheckMarkCluster(m, identity.ClusterID(c.clusterID)); err != nil {
		return fmt.Errorf("--mark %s: %w", c.mark, err)
	}
	return nil
}
