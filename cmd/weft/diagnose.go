// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
)

// kindDiagnosis is the kind of what diagnose prints.
const kindDiagnosis = "Diagnosis"

// defaultTunnelPort is the UDP port of the overlay.
const defaultTunnelPort = 8472

// finding is one line of a diagnosis as JSON.
type finding struct {
	Level  string `json:"level"`
	Name   string `json:"name"`
	Detail string `json:"detail"`
	Advice string `json:"advice,omitempty"`
}

var levelMarks = map[datapath.Level]string{datapath.Fine: "✓", datapath.Warning: "!", datapath.Failure: "✗"}

func diagnoseCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		output  *format
		devices []string
		port    uint16
	)
	cmd := newCommand("diagnose", "Look for what on this machine is in weft's way", func(*cobra.Command, []string) error {
		found := datapath.Diagnose(datapath.Diagnosis{BPFFS: c.bpffs, Devices: devices, TunnelPort: port})
		if err := printDiagnosis(env, *output, found); err != nil {
			return err
		}
		for _, f := range found {
			if f.Level == datapath.Failure {
				return errUnhealthy
			}
		}
		return nil
	})
	output = outputFlag(cmd)
	cmd.Flags().Var(&list[string]{&devices, parseDevice, func(s string) string { return s }, "devices", false}, "devices",
		"`names` of network devices that are to have programs (default: those of the default routes)")
	cmd.Flags().Uint16Var(&port, "tunnel-port", defaultTunnelPort, "UDP `port` of the overlay")
	return cmd
}

func printDiagnosis(env environment, output format, found []datapath.Finding) error {
	if output == formatJSON {
		items := []finding{}
		for _, f := range found {
			items = append(items, finding{string(f.Level), f.Name, f.Detail, f.Advice})
		}
		return printJSON(env.stdout, api.List[finding]{Meta: api.MetaOf(kindDiagnosis), Items: items})
	}
	t := newTable(env.stdout)
	for _, f := range found {
		text := f.Detail
		if f.Advice != "" {
			text += fmt.Sprintf(": %s", f.Advice)
		}
		t.row(levelMarks[f.Level], f.Name, text)
	}
	return t.flush()
}
