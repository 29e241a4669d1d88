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

// diagnosedOptions are those of the agent that a diagnosis goes by.
var diagnosedOptions = []string{"devices", "tunnel-port", "service-cgroup", "service-netns-dir"}

// finding is one line of a diagnosis as JSON.
type finding struct {
	Level  string `json:"level"`
	Name   string `json:"name"`
	Detail string `json:"detail"`
	Advice string `json:"advice,omitempty"`
}

var levelMarks = map[datapath.Level]mark{datapath.Fine: passed, datapath.Warning: warned, datapath.Failure: failed}

func diagnoseCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out     *output
		devices []string
		port    uint16
		cgroup  string
		netns   string
	)
	cmd := newCommand("diagnose", "Look for what on this machine is in weft's way", func(cmd *cobra.Command, _ []string) error {
		// What is not given is the running agent's, so that its settings are judged, and not the defaults.
		for i, value := range agentOptionValues(cmd.Context(), c.socket, diagnosedOptions...) {
			if f := cmd.Flags().Lookup(diagnosedOptions[i]); value != "" && !f.Changed {
				if err := f.Value.Set(value); err != nil {
					return fmt.Errorf("the running agent's %s: %w", f.Name, err)
				}
			}
		}
		found := datapath.Diagnose(datapath.Diagnosis{BPFFS: c.bpffs, Devices: devices, TunnelPort: port, ServiceCgroup: cgroup, ServiceNetNSDir: netns})
		if err := printDiagnosis(env, out, found); err != nil {
			return err
		}
		for _, f := range found {
			if f.Level == datapath.Failure {
				return errUnhealthy
			}
		}
		return nil
	})
	out = outputFlags(cmd)
	cmd.Flags().Var(&list[string]{&devices, parseDevice, func(s string) string { return s }, "devices", false}, "devices",
		"`names` of network devices that are to have programs (default: the running agent's, else those of the default routes)")
	cmd.Flags().Uint16Var(&port, "tunnel-port", defaultTunnelPort, "UDP `port` of the overlay")
	cmd.Flags().StringVar(&cgroup, "service-cgroup", "", "`directory` of the cgroup whose sockets are to reach services (default: the running agent's, else the root)")
	cmd.Flags().StringVar(&netns, "service-netns-dir", "",
		"`directory` with the network namespaces of pods whose connected UDP sockets are to end with their backends (default: the running agent's, else none)")
	return cmd
}

func printDiagnosis(env environment, out *output, found []datapath.Finding) error {
	if out.forPrograms() {
		items := []finding{}
		for _, f := range found {
			items = append(items, finding{string(f.Level), f.Name, f.Detail, f.Advice})
		}
		return out.object(env.stdout, api.List[finding]{Meta: api.MetaOf(kindDiagnosis), Items: items})
	}
	t := out.table(env.stdout)
	t.ink = env.ink()
	for _, f := range found {
		if out.format == formatTSV {
			t.row(string(f.Level), f.Name, f.Detail, f.Advice)
			continue
		}
		text := f.Detail
		if f.Advice != "" {
			text += fmt.Sprintf(": %s", f.Advice)
		}
		t.marked(levelMarks[f.Level], f.Name, text)
	}
	return t.flush()
}
