// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/bpf"
)

func flowsCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out    *output
		filter *flowFilter
		follow bool
		last   int
		pcap   string
	)
	cmd := newCommand("flows", "Show packets with the identities of both sides", func(cmd *cobra.Command, _ []string) error {
		if last < -1 {
			return usagef("--last %d: want a number of flows", last)
		}
		for _, name := range filter.clusters {
			if err := knowCluster(cmd.Context(), c, name); err != nil {
				return err
			}
		}
		query := api.FlowQuery{Last: last, Follow: follow}
		if follow && !cmd.Flags().Changed("last") {
			query.Last = 0
		}
		var capture *captureFile
		if pcap != "" {
			var err error
			if capture, err = newCapture(env, pcap); err != nil {
				return err
			}
			defer capture.Close()
		}
		return api.NewClient(c.socket).Flows(cmd.Context(), query, func(e api.FlowEvent) error {
			switch {
			case e.Flow != nil && !filter.wants(e.Flow):
				return nil
			case e.Flow != nil && capture != nil:
				return capture.write(e.Flow)
			case out.forPrograms():
				return out.line(env.stdout, e)
			case e.Kind == api.KindFlowsLost:
				_, err := fmt.Fprintf(env.stderr, "weft: %d flows were lost: they came faster than they could be printed\n", e.Lost)
				return err
			case e.Flow == nil:
				return nil
			}
			_, err := fmt.Fprintln(env.stdout, flowText(e.Flow))
			return err
		})
	})
	cmd.Aliases = []string{"monitor", "observe"}
	out = outputFlags(cmd)
	filter = newFlowFilter(cmd.Flags())
	cmd.Flags().StringVar(&pcap, "pcap", "", "write the packets' headers, with identities as comments, to a `file` in pcapng instead; -: standard output")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with the flows that come")
	cmd.Flags().IntVar(&last, "last", -1, "how many past flows to show (default: all that the agent remembers, with --follow none)")
	someCluster.completesFlag(cmd, env, "cluster")
	someIdentity.completesFlag(cmd, env, "identity")
	someAddress.completesFlag(cmd, env, "ip")
	someVerdict.completesFlag(cmd, env, "verdict")
	return cmd
}

// flowText is a flow in one line.
func flowText(f *api.Flow) string {
	detail := ""
	if d := strings.TrimSpace(f.TCPFlags + " " + f.ICMP); d != "" {
		detail = " " + d
	}
	return printable(fmt.Sprintf("%s %s %-7s %s%s %s %s -> %s%s %d bytes", f.Time.Local().Format("15:04:05.000"), f.Device, f.Direction,
		f.Verdict, modeText(f.Mode), f.Protocol, peerText(f.Source), peerText(f.Destination), detail, f.Length))
}

// modeText names the mode where it is not the usual one.
func modeText(mode string) string {
	if mode == "" || mode == bpf.Native.String() {
		return ""
	}
	return " " + mode
}

func peerText(p api.Peer) string {
	if !p.IP.IsValid() {
		return "?"
	}
	who := []string{strconv.FormatUint(uint64(p.Identity), 10)}
	if p.Name != "" {
		who = append(who, p.Name)
	}
	if labels := shortLabels(p.Labels); labels != "" && p.Name == "" {
		who = append(who, labels)
	}
	if cluster := clusterText(p.Cluster, p.ClusterName); cluster != "-" {
		who = append(who, "@"+cluster)
	}
	return fmt.Sprintf("%s (%s)", addressText(p.IP, p.Port), strings.Join(who, " "))
}

func addressText(ip netip.Addr, port uint16) string {
	if port == 0 {
		return ip.String()
	}
	return net.JoinHostPort(ip.String(), strconv.Itoa(int(port)))
}

// shortLabels leaves out what the cluster adds to the labels that people give, except the namespace.
func shortLabels(labels []string) string {
	namespace, given := "", []string{}
	for _, label := range labels {
		label = strings.TrimPrefix(label, "k8s:")
		if value, ok := strings.CutPrefix(label, "io.kubernetes.pod.namespace="); ok {
			namespace = value + "/"
		} else if !strings.HasPrefix(label, "io.cilium.k8s.") {
			given = append(given, label)
		}
	}
	return namespace + strings.Join(given, ",")
}
