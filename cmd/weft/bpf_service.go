// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/datapath"
)

const kindKernelServiceList = "BPFServiceList"

// kernelService is a frontend as the kernel has it, as JSON.
type kernelService struct {
	Address   netip.AddrPort   `json:"address"`
	Protocol  string           `json:"protocol"`
	Backends  []netip.AddrPort `json:"backends"`
	Algorithm string           `json:"algorithm"`
	Affinity  uint32           `json:"clientAffinitySeconds"`
	Chosen    uint64           `json:"chosen"`
	Refused   uint64           `json:"refused"`
}

func (s *kernelService) name() string { return fmt.Sprintf("%s/%s", s.Address, s.Protocol) }

func (s *kernelService) backends() string {
	const shown = 4
	var texts []string
	for _, b := range s.Backends[:min(len(s.Backends), shown)] {
		texts = append(texts, b.String())
	}
	if more := len(s.Backends) - shown; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return orDash(strings.Join(texts, ","))
}

func (s *kernelService) affinity() string {
	if s.Affinity == 0 {
		return "-"
	}
	return fmt.Sprintf("%ds", s.Affinity)
}

func bpfServiceList(env environment, c *clientOptions) *cobra.Command {
	cmd := listCommand(env, "list", "List the services of the kernel's table, with their backends", listing[kernelService]{
		kind: kindKernelServiceList, key: (*kernelService).name,
		fetch: func(context.Context, []string) ([]kernelService, error) { return listKernelServices(c.bpffs) },
		columns: []column[kernelService]{
			{title: "FRONTEND", cell: (*kernelService).name},
			{title: "BACKENDS", cell: (*kernelService).backends},
			{title: "ALGORITHM", cell: func(s *kernelService) string { return s.Algorithm }},
			{title: "AFFINITY", cell: (*kernelService).affinity},
			{title: "CHOSEN", cell: func(s *kernelService) string { return strconv.FormatUint(s.Chosen, 10) }},
			{title: "REFUSED", cell: func(s *kernelService) string { return strconv.FormatUint(s.Refused, 10) }},
		},
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func listKernelServices(bpffs string) ([]kernelService, error) {
	table, err := datapath.OpenServices(bpffs)
	if err != nil {
		return nil, err
	}
	defer table.Close()
	list, err := table.List()
	if err != nil {
		return nil, err
	}
	items := make([]kernelService, 0, len(list))
	for i := range list {
		s := &list[i]
		item := kernelService{
			Address: netip.AddrPortFrom(s.Frontend.Addr, s.Frontend.Port), Protocol: s.Frontend.Protocol.String(),
			Backends: make([]netip.AddrPort, 0, len(s.Backends)), Algorithm: s.Algorithm().String(), Affinity: s.Affinity,
			Chosen: s.Chosen, Refused: s.Refused,
		}
		for _, b := range s.Backends {
			item.Backends = append(item.Backends, netip.AddrPortFrom(b.Addr, b.Port))
		}
		items = append(items, item)
	}
	return items, nil
}
