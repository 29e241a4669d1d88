// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/internal/kubeapiserver"
)

// labStatus is what `weft-lab status -o json` prints.
type labStatus struct {
	StateDir   string           `json:"stateDir"`
	Prefix     string           `json:"prefix"`
	Created    time.Time        `json:"created"`
	Well       bool             `json:"well"`
	Etcds      []etcdStatus     `json:"etcds"`
	APIServers []kubeStatus     `json:"kubeAPIServers,omitempty"`
	Operators  []operatorStatus `json:"operators"`
	Nodes      []nodeStatus     `json:"nodes"`
}

type etcdStatus struct {
	Cluster  string `json:"cluster"`
	NetNS    string `json:"netns"`
	Endpoint string `json:"endpoint"`
	PID      int    `json:"pid,omitempty"`
	State    string `json:"state"` // running, not well, dead
	Problem  string `json:"problem,omitempty"`
}

// kubeStatus is the state of an API server of Kubernetes.
type kubeStatus struct {
	Cluster  string `json:"cluster"`
	NetNS    string `json:"netns"`
	Endpoint string `json:"endpoint"`
	Log      string `json:"log"`
	PID      int    `json:"pid,omitempty"`
	State    string `json:"state"` // running, not well, dead
	Problem  string `json:"problem,omitempty"`
}

type operatorStatus struct {
	Cluster  string   `json:"cluster"`
	NetNS    string   `json:"netns"`
	Socket   string   `json:"apiSocket"`
	Log      string   `json:"log"`
	PID      int      `json:"pid,omitempty"`
	State    string   `json:"state"` // ready, not well, dead
	Problems []string `json:"problems"`
}

type nodeStatus struct {
	Name     string      `json:"name"`
	Cluster  string      `json:"cluster"`
	NetNS    string      `json:"netns"`
	IPs      []string    `json:"ips"`
	PodCIDRs []string    `json:"podCIDRs"`
	BPFFS    string      `json:"bpffs"`
	Socket   string      `json:"apiSocket"`
	Log      string      `json:"log"`
	PID      int         `json:"pid,omitempty"`
	State    string      `json:"state"` // ready, not well, dead
	Problems []string    `json:"problems"`
	Pods     []podStatus `json:"pods"`
}

type podStatus struct {
	Name     string   `json:"name"`
	NetNS    string   `json:"netns"`
	IPs      []string `json:"ips"`
	App      string   `json:"app"`
	Identity uint32   `json:"identity"`
	State    string   `json:"state"` // running, dead
}

const (
	stateReady   = "ready"
	stateRunning = "running"
	stateNotWell = "not well"
	stateDead    = "dead"
)

func newStatusCommand(env *environment) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the lab's nodes, agents, pods, etcds and operators; ends 1 if anything is not well",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return usage(fmt.Errorf("--output %q: give table or json", output))
			}
			l, err := env.lab()
			if err != nil {
				return err
			}
			status, err := l.status(cmd.Context())
			if err != nil {
				return err
			}
			return status.print(env.stdout, output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}

// status asks everything in the lab how it is. It fails with errNoLab where none is up.
func (l *lab) status(ctx context.Context) (labStatus, error) {
	m, err := readManifest(l.dir)
	if errors.Is(err, os.ErrNotExist) {
		return labStatus{}, errNoLab
	}
	if err != nil {
		return labStatus{}, err
	}
	s := labStatus{StateDir: l.dir, Prefix: l.Prefix, Created: m.Created, Well: m.Complete}
	for _, c := range l.Clusters {
		e := l.etcdStatus(ctx, c)
		s.Well = s.Well && e.State == stateRunning
		s.Etcds = append(s.Etcds, e)
		if l.kubernetes() {
			k := l.kubeStatus(ctx, c)
			s.Well = s.Well && k.State == stateRunning
			s.APIServers = append(s.APIServers, k)
		}
		o := l.operatorStatus(ctx, c)
		s.Well = s.Well && o.State == stateReady
		s.Operators = append(s.Operators, o)
	}
	for _, n := range l.nodes() {
		node, err := l.nodeStatus(ctx, n)
		if err != nil {
			return labStatus{}, err
		}
		s.Well = s.Well && node.State == stateReady
		for _, p := range node.Pods {
			s.Well = s.Well && p.State == stateRunning
		}
		s.Nodes = append(s.Nodes, node)
	}
	return s, nil
}

func (l *lab) etcdStatus(ctx context.Context, c clusterPlan) etcdStatus {
	s := etcdStatus{Cluster: c.Name, NetNS: c.Etcd.NetNS, Endpoint: c.Etcd.endpoint(), State: stateDead}
	p, ok := l.etcdDaemon(c).running()
	if !ok {
		return s
	}
	s.PID, s.State = p.PID, stateRunning
	if err := askEtcd(ctx, c.Etcd, clusterConfigKey(c.Name)); err != nil {
		s.State, s.Problem = stateNotWell, err.Error()
	}
	return s
}

func (l *lab) kubeStatus(ctx context.Context, c clusterPlan) kubeStatus {
	d := l.kubeDaemon(c)
	s := kubeStatus{Cluster: c.Name, NetNS: c.Etcd.NetNS, Endpoint: "https://" + c.kubeAddr().String(), Log: d.logFile, State: stateDead}
	p, ok := d.running()
	if !ok {
		return s
	}
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	s.PID, s.State = p.PID, stateRunning
	if _, err := l.askKubernetes(ctx, c, kubeapiserver.Call{Method: http.MethodGet, Path: "/readyz"}); err != nil {
		s.State, s.Problem = stateNotWell, err.Error()
	}
	return s
}

func (l *lab) operatorStatus(ctx context.Context, c clusterPlan) operatorStatus {
	d := l.operatorDaemon(c)
	s := operatorStatus{
		Cluster: c.Name, NetNS: c.Etcd.NetNS, Socket: l.operatorSocket(c.Name), Log: d.logFile, State: stateDead, Problems: []string{},
	}
	if p, ok := d.running(); ok {
		s.PID, s.State, s.Problems = p.PID, stateReady, l.operatorProblems(ctx, c)
		if len(s.Problems) > 0 {
			s.State = stateNotWell
		}
	}
	return s
}

func (l *lab) nodeStatus(ctx context.Context, n nodePlan) (nodeStatus, error) {
	s := nodeStatus{
		Name: n.Name, Cluster: n.Cluster, NetNS: n.NetNS,
		IPs:      []string{n.IPv4.Addr().String(), n.IPv6.Addr().String()},
		PodCIDRs: []string{n.PodCIDR4.String(), n.PodCIDR6.String()},
		BPFFS:    l.bpffs(n.Name), Socket: l.socket(n.Name), Log: l.agentDaemon(n).logFile,
		State: stateDead, Problems: []string{},
	}
	if p, ok := l.agentDaemon(n).running(); ok {
		s.PID, s.State, s.Problems = p.PID, stateReady, l.agentProblems(ctx, n)
		if len(s.Problems) > 0 {
			s.State = stateNotWell
		}
	}
	pods, err := l.pods(n)
	for _, p := range pods {
		state := stateRunning
		if !netNSAlive(p.NetNS) {
			state = stateDead
		}
		s.Pods = append(s.Pods, podStatus{
			Name: p.Name, NetNS: p.NetNS, IPs: []string{p.IPv4.String(), p.IPv6.String()},
			App: p.App, Identity: p.Identity, State: state,
		})
	}
	return s, err
}

// print writes the status, and returns errNotWell where something is not well.
func (s labStatus) print(w io.Writer, output string) error {
	var err error
	if output == "json" {
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(s)
	} else {
		err = s.table(w)
	}
	if err == nil && !s.Well {
		return errNotWell
	}
	return err
}

func (s labStatus) table(w io.Writer) error {
	since := s.Created.Format(time.DateTime + " UTC")
	fmt.Fprintf(w, "lab in %s, namespaces %s-…, up since %s\n\n", s.StateDir, s.Prefix, since)
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "NODE\tCLUSTER\tIP\tIPV6\tAGENT\tPID")
	for _, n := range s.Nodes {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", n.Name, n.Cluster, n.IPs[0], n.IPs[1], n.State, pid(n.PID))
	}
	fmt.Fprintln(t, "\nPOD\tAPP\tIP\tIPV6\tIDENTITY\tSTATE")
	for _, n := range s.Nodes {
		for _, p := range n.Pods {
			fmt.Fprintf(t, "%s/%s\t%s\t%s\t%s\t%d\t%s\n", n.Name, p.Name, p.App, p.IPs[0], p.IPs[1], p.Identity, p.State)
		}
	}
	fmt.Fprintln(t, "\nETCD\tENDPOINT\tSTATE\tPID")
	for _, e := range s.Etcds {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", e.Cluster, e.Endpoint, e.State, pid(e.PID))
	}
	if len(s.APIServers) > 0 {
		fmt.Fprintln(t, "\nKUBERNETES\tENDPOINT\tSTATE\tPID")
	}
	for _, k := range s.APIServers {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", k.Cluster, k.Endpoint, k.State, pid(k.PID))
	}
	fmt.Fprintln(t, "\nOPERATOR\tSTATE\tPID")
	for _, o := range s.Operators {
		fmt.Fprintf(t, "%s\t%s\t%s\n", o.Cluster, o.State, pid(o.PID))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, o := range s.Operators {
		for _, problem := range o.Problems {
			fmt.Fprintf(w, "\noperator of %s: %s", o.Cluster, problem)
		}
	}
	for _, n := range s.Nodes {
		for _, problem := range n.Problems {
			fmt.Fprintf(w, "\n%s: %s", n.Name, problem)
		}
	}
	for _, e := range s.Etcds {
		if e.Problem != "" {
			fmt.Fprintf(w, "\netcd of %s: %s", e.Cluster, e.Problem)
		}
	}
	for _, k := range s.APIServers {
		if k.Problem != "" {
			fmt.Fprintf(w, "\nAPI server of %s: %s", k.Cluster, k.Problem)
		}
	}
	_, err := fmt.Fprintln(w)
	return err
}

func pid(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
