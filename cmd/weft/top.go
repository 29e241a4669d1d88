// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

const kindTop = "Top"

// topView is what happened between two looks at the agent and at the kernel's counters.
type topView struct {
	api.Meta
	At       time.Time    `json:"at"`
	Seconds  float64      `json:"seconds"` // between the looks
	Node     string       `json:"node"`
	Started  time.Time    `json:"started"` // the agent
	Healthy  bool         `json:"healthy"`
	Problems []string     `json:"problems"`
	Clusters []topCluster `json:"clusters"`
	Pairs    []topPair    `json:"pairs"`
	// PairsError says why there are no pairs: the counters are in the kernel, and not for everybody to read.
	PairsError string `json:"pairsError,omitempty"`
}

// topCluster is a cluster, and how fast it changes.
type topCluster struct {
	Name     string     `json:"name"`
	Own      bool       `json:"own"`
	State    string     `json:"state"`
	Since    time.Time  `json:"since"`
	Counts   api.Counts `json:"counts"`
	Lag      int64      `json:"lag"`
	Changes  float64    `json:"changesPerSecond"` // revisions of its etcd
	Rejected uint64     `json:"rejected"`
	ready    bool
}

// topPair is the traffic between two identities, in both directions of the node.
type topPair struct {
	Source      uint32  `json:"sourceIdentity"`
	Destination uint32  `json:"destinationIdentity"`
	Verdict     string  `json:"verdict"`
	Packets     float64 `json:"packetsPerSecond"`
	Bytes       float64 `json:"bytesPerSecond"`
	names       [2]string
}

// look is what is known at one moment.
type look struct {
	at       time.Time
	status   api.Status
	counters []counter
	err      error // of the counters
}

// topOrder says which pairs stand first.
type topOrder int

const (
	byPackets topOrder = iota
	byBytes
	byPair
	topOrders // how many there are
)

func (o topOrder) String() string { return [...]string{"packets", "bytes", "identities"}[o] }

func (o topOrder) compare(a, b topPair) int {
	first := 0
	switch o {
	case byPackets:
		first = cmp.Compare(b.Packets, a.Packets)
	case byBytes:
		first = cmp.Compare(b.Bytes, a.Bytes)
	}
	return cmp.Or(first, cmp.Compare(a.Source, b.Source), cmp.Compare(a.Destination, b.Destination), cmp.Compare(a.Verdict, b.Verdict))
}

// top looks again and again.
type top struct {
	client   *api.Client
	bpffs    string
	now      func() time.Time
	interval time.Duration
	order    topOrder
}

func topCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out  *output
		once bool
		sort string
	)
	t := &top{now: env.now}
	cmd := newCommand("top", "Watch clusters, and the pairs of identities that send most", func(cmd *cobra.Command, _ []string) error {
		if t.interval < minWatchInterval {
			return usagef("--interval %s: want at least %s", t.interval, minWatchInterval)
		}
		t.client, t.bpffs = api.NewClient(c.socket), c.bpffs
		for t.order.String() != sort {
			if t.order++; t.order == topOrders {
				return usagef("--sort %s: want packets, bytes or identities", sort)
			}
		}
		screen, live := newScreen(env)
		if live && !once && out.forPeople() {
			return t.live(cmd.Context(), env, screen)
		}
		v, err := t.once(cmd.Context())
		if err != nil {
			return err
		}
		if out.forPrograms() {
			return out.object(env.stdout, v)
		}
		return t.print(out, env, &v)
	})
	out = outputFlags(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&once, "once", false, "look twice, print what happened in between, and end; so it is where the output is no terminal")
	flags.DurationVar(&t.interval, "interval", 2*time.Second, "time between two looks, a `duration`")
	flags.StringVar(&sort, "sort", byPackets.String(), "`order` of the pairs: packets, bytes or identities")
	return cmd
}

// look asks the agent and reads the counters.
func (t *top) look(ctx context.Context) (look, error) {
	l := look{}
	var err error
	if l.status, err = t.client.Status(ctx); err != nil {
		return l, err
	}
	l.counters, l.err = listCounters(t.bpffs)
	l.at = t.now()
	return l, nil
}

// once takes two looks.
func (t *top) once(ctx context.Context) (topView, error) {
	before, err := t.look(ctx)
	if err != nil {
		return topView{}, err
	}
	select {
	case <-time.After(t.interval):
	case <-ctx.Done():
		return topView{}, ctx.Err()
	}
	now, err := t.look(ctx)
	if err != nil {
		return topView{}, err
	}
	return t.compare(ctx, &before, &now), nil
}

// compare makes rates of two looks, and names the identities of those pairs that send.
func (t *top) compare(ctx context.Context, before, now *look) topView {
	v := makeTop(before, now)
	slices.SortFunc(v.Pairs, t.order.compare)
	names := make(map[uint32]string)
	for i := range v.Pairs {
		for end, id := range []uint32{v.Pairs[i].Source, v.Pairs[i].Destination} {
			if _, known := names[id]; !known {
				names[id] = t.name(ctx, id)
			}
			v.Pairs[i].names[end] = names[id]
		}
		if i == shownPairs {
			break // no screen is as high
		}
	}
	return v
}

// shownPairs bounds for how many pairs the agent is asked who they are.
const shownPairs = 200

// name is what people call an identity: its labels, if they are known.
func (t *top) name(ctx context.Context, id uint32) string {
	text := identityText(id)
	if known, err := t.client.Identity(ctx, id); err == nil && known.Name == "" {
		text += " " + shortLabels(known.Labels)
		if known.ClusterName != "" {
			text += " @" + known.ClusterName
		}
	}
	return text
}

// makeTop is what happened between two looks. Counters that began anew count from 0.
func makeTop(before, now *look) topView {
	s := &now.status
	v := topView{
		Meta: api.MetaOf(kindTop), At: now.at, Seconds: now.at.Sub(before.at).Seconds(), Node: s.Cluster.Name + "/" + s.Node.Name, Started: s.Started,
		Healthy: s.Healthy, Problems: present(s.Problems), Clusters: []topCluster{}, Pairs: []topPair{}, PairsError: errorText(now.err),
	}
	perSecond := func(from, to uint64) float64 {
		if to < from {
			from = 0
		}
		return float64(to-from) / max(v.Seconds, minWatchInterval.Seconds()/10)
	}
	revisions := make(map[string]int64)
	for i := range before.status.Clusters {
		revisions[before.status.Clusters[i].Name] = before.status.Clusters[i].Revision
	}
	for i, all := 0, remoteFirst(s.Clusters); i < len(all); i++ {
		c := &all[i]
		shown := topCluster{Name: c.Name, Own: c.Own, State: c.State, Since: c.Since, Counts: c.Counts, Lag: c.Lag, ready: c.Ready}
		if was := revisions[c.Name]; was > 0 && c.Revision > was {
			shown.Changes = perSecond(uint64(was), uint64(c.Revision))
		}
		for _, n := range c.Rejected {
			shown.Rejected += n
		}
		v.Clusters = append(v.Clusters, shown)
	}
	type pair struct {
		source, destination uint32
		verdict             string
	}
	type direction struct {
		pair
		direction, mode string
	}
	was := make(map[direction]counter)
	for _, n := range before.counters {
		was[direction{pair{n.Source, n.Destination, n.Verdict}, n.Direction, n.Mode}] = n
	}
	sums := make(map[pair]topPair)
	for _, n := range now.counters {
		key := pair{n.Source, n.Destination, n.Verdict}
		old := was[direction{key, n.Direction, n.Mode}]
		sum := sums[key]
		sum.Source, sum.Destination, sum.Verdict = n.Source, n.Destination, n.Verdict
		sum.Packets += perSecond(old.Packets, n.Packets)
		sum.Bytes += perSecond(old.Bytes, n.Bytes)
		sums[key] = sum
	}
	for _, p := range sums {
		if p.Packets > 0 {
			v.Pairs = append(v.Pairs, p)
		}
	}
	return v
}

// print prints a view for people, or its tables as TSV.
func (t *top) print(out *output, env environment, v *topView) error {
	if out.forPeople() {
		if _, err := fmt.Fprintln(env.stdout, v.title(env.now(), env.ink())); err != nil {
			return err
		}
	}
	clusters := out.table(env.stdout, "CLUSTER", "STATE", "FOR", "NODES", "IPS", "IDENTITIES", "SERVICES", "CHANGES/S", "LAG", "REJECTED")
	for i := range v.Clusters {
		clusters.row(v.Clusters[i].cells(env.now())...)
	}
	if err := clusters.flush(); err != nil {
		return err
	}
	if v.PairsError != "" {
		_, err := fmt.Fprintf(env.stderr, "weft: the kernel's counters cannot be read, so no pairs are shown: %s\n", printable(v.PairsError))
		return err
	}
	if out.forPeople() {
		if _, err := fmt.Fprintln(env.stdout); err != nil {
			return err
		}
	}
	pairs := out.table(env.stdout, "PACKETS/S", "BYTES/S", "SOURCE", "DESTINATION", "VERDICT")
	for i := range v.Pairs[:min(len(v.Pairs), shownPairs)] {
		pairs.row(v.Pairs[i].cells()...)
	}
	return pairs.flush()
}

// title is the first line: whose view it is, and whether all is well.
func (v *topView) title(now time.Time, ink ink) string {
	health, mood := "ok", good
	if !v.Healthy {
		health, mood = count(len(v.Problems), "problem"), bad
	}
	return printable(v.Node) + ", agent up " + age(now, v.Started) + ", " + ink.paint(mood, health)
}

func (c *topCluster) cells(now time.Time) []string {
	name := c.Name
	if c.Own {
		name += " (own)"
	}
	return []string{
		name, c.State, age(now, c.Since), strconv.Itoa(c.Counts.Nodes), strconv.Itoa(c.Counts.IPs), strconv.Itoa(c.Counts.Identities),
		strconv.Itoa(c.Counts.Services), rateText(c.Changes), strconv.FormatInt(c.Lag, 10), strconv.FormatUint(c.Rejected, 10),
	}
}

func (p *topPair) cells() []string {
	return []string{rateText(p.Packets), rateText(p.Bytes), strings.TrimSpace(p.names[0]), strings.TrimSpace(p.names[1]), p.Verdict}
}

// rateText is a rate in at most six characters.
func rateText(perSecond float64) string {
	for _, unit := range []string{"", "k", "M", "G", "T"} {
		switch {
		case perSecond < 10 && perSecond > 0:
			return strconv.FormatFloat(perSecond, 'f', 1, 64) + unit
		case perSecond < 1000 || unit == "T":
			return strconv.FormatFloat(perSecond, 'f', 0, 64) + unit
		}
		perSecond /= 1000
	}
	return ""
}
