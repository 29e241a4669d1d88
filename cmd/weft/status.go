// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

// statusOptions say what of the status is shown, and when.
type statusOptions struct {
	out         *output
	watch       *watchFlags
	controllers bool
	brief       bool
	wait        bool
	timeout     time.Duration
}

func statusCommand(env environment, c *clientOptions) *cobra.Command {
	o := new(statusOptions)
	cmd := newCommand("status", "Show how the agent, the clusters it follows and the kernel are", func(cmd *cobra.Command, _ []string) error {
		if err := o.watch.check(); err != nil {
			return err
		}
		ask := api.NewClient(c.socket).Status
		if o.wait {
			ask = o.untilHealthy(env, ask)
		}
		healthy, err := o.show(cmd.Context(), env, ask)
		if err == nil && o.watch.on {
			err = o.watch.again(cmd.Context(), func() (err error) {
				healthy, err = o.show(cmd.Context(), env, ask)
				return err
			})
		}
		if err != nil || healthy {
			return err
		}
		return errUnhealthy
	})
	o.out = outputFlags(cmd)
	o.watch = newWatchFlags(cmd.Flags(), "show it again and again: on a terminal in its place, else below each other")
	flags := cmd.Flags()
	flags.BoolVar(&o.controllers, "all-controllers", false, "show every part of the agent that runs by itself, too")
	flags.BoolVar(&o.brief, "brief", false, "show the verdict and the problems alone")
	flags.BoolVar(&o.wait, "wait", false, "wait until an agent answers and all is well")
	flags.DurationVar(&o.timeout, "timeout", 5*time.Minute, "how long --wait waits, a `duration`; then the status is shown as it is")
	flags.Bool("all-clusters", true, "shown they are always")
	// The error tells of a flag that does not exist; this one does.
	_ = flags.MarkHidden("all-clusters")
	return cmd
}

// waitInterval is how often --wait looks.
const waitInterval = 250 * time.Millisecond

// untilHealthy asks again and again until all is well, and gives the last answer when the time is over.
func (o *statusOptions) untilHealthy(env environment, ask func(context.Context) (api.Status, error)) func(context.Context) (api.Status, error) {
	return func(ctx context.Context) (api.Status, error) {
		if o.timeout <= 0 {
			return api.Status{}, usagef("--timeout %s: want a duration above 0", o.timeout)
		}
		over := time.NewTimer(o.timeout)
		defer over.Stop()
		ticker := time.NewTicker(waitInterval)
		defer ticker.Stop()
		p := startProgress(env)
		defer p.end()
		for {
			s, err := ask(ctx)
			if err == nil && s.Healthy || err != nil && !errors.Is(err, api.ErrUnreachable) {
				return s, err
			}
			p.say("waiting: %s", waitText(&s, err))
			select {
			case <-ctx.Done():
				return s, cmp.Or(err, ctx.Err())
			case <-over.C:
				return s, err
			case <-ticker.C:
			}
		}
	}
}

// waitText says what there is to wait for.
func waitText(s *api.Status, err error) string {
	switch {
	case err != nil:
		return "no agent answers"
	case len(s.Problems) == 0:
		return healthText(s)
	}
	return healthText(s) + ", such as " + s.Problems[0]
}

// show asks once, and prints the answer.
func (o *statusOptions) show(ctx context.Context, env environment, ask func(context.Context) (api.Status, error)) (healthy bool, err error) {
	s, err := ask(ctx)
	if err != nil {
		return false, err
	}
	var text bytes.Buffer // so that a terminal is not empty while it is made
	to := env
	to.stdout = &text
	if err := o.print(to, &s, env.ink()); err != nil {
		return false, err
	}
	if o.watch.on && o.out.forPeople() {
		text.WriteString("\n")
	}
	if _, onTerminal := terminalOf(env.stdout); onTerminal && o.watch.on && o.out.forPeople() {
		_, err = io.WriteString(env.stdout, clearScreen)
	}
	if err == nil {
		_, err = text.WriteTo(env.stdout)
	}
	return s.Healthy, err
}

func (o *statusOptions) print(env environment, s *api.Status, ink ink) error {
	switch {
	case o.out.forPrograms() && o.watch.on:
		return o.out.line(env.stdout, s)
	case o.out.forPrograms():
		return o.out.object(env.stdout, s)
	case o.out.format == formatTSV:
		return printStatusRows(o.out.table(env.stdout), s)
	}
	p := &statusPrinter{w: env.stdout, now: env.now(), ink: ink, s: s, full: o.out.full()}
	if o.brief {
		p.health()
		return nil
	}
	p.print()
	if o.controllers {
		return p.controllers()
	}
	return nil
}

// printStatusRows has a row for the verdict, for each problem, and for each cluster.
func printStatusRows(t *table, s *api.Status) error {
	t.row("health", healthText(s))
	for _, problem := range s.Problems {
		t.row("problem", problem)
	}
	clusters := remoteFirst(s.Clusters)
	for i := range clusters {
		c := &clusters[i]
		t.row("cluster", c.Name, c.State, strconv.Itoa(c.Counts.Nodes), strconv.Itoa(c.Counts.IPs), strconv.Itoa(c.Counts.Identities),
			strconv.Itoa(c.Counts.Services), strconv.FormatInt(c.Revision, 10), strconv.FormatInt(c.Lag, 10))
	}
	return t.flush()
}

// statusPrinter prints a status for people, on one screen.
type statusPrinter struct {
	w   io.Writer
	now time.Time
	ink ink
	s   *api.Status
	// full: all that is known of a cluster is asked for, or one cluster alone, so that there is room for it.
	full bool
}

const statusIndent = 15 // where values begin

// line prints a titled value; without a title, a continuation.
func (p *statusPrinter) line(title, format string, args ...any) {
	if title != "" {
		title += ":"
	}
	fmt.Fprintln(p.w, printable(fmt.Sprintf("%-*s", statusIndent, title)+fmt.Sprintf(format, args...)))
}

// branch prints a line of the tree below a value.
func (p *statusPrinter) branch(format string, args ...any) {
	fmt.Fprintln(p.w, printable("   └  "+fmt.Sprintf(format, args...)))
}

// health prints the verdict, and what is wrong.
func (p *statusPrinter) health() {
	text, mood := healthText(p.s), good
	if !p.s.Healthy {
		mood = bad
	}
	fmt.Fprintln(p.w, fmt.Sprintf("%-*s", statusIndent, "Health:")+p.ink.paint(mood, text))
	for _, problem := range p.s.Problems {
		p.branch("%s", problem)
	}
}

func (p *statusPrinter) print() {
	s := p.s
	p.line("Agent", "%s, up %s", s.Version, age(p.now, s.Started))
	p.health()
	p.line("Cluster", "%s, id %d of at most %d", s.Cluster.Name, s.Cluster.ID, s.Cluster.MaxConnectedClusters)
	p.line("Node", "%s: %s", s.Node.Name, orDash(strings.Join(texts(s.Node.IPs), ", ")))
	if len(s.Node.PodCIDRs) > 0 {
		p.branch("pods: %s", strings.Join(texts(s.Node.PodCIDRs), ", "))
	}
	p.kvstore()
	p.clusters()
	p.endpoints()
	p.line("Tables", "%s, %s, %s, %s, %s", count(s.Tables.IPs, "ip"), count(s.Tables.Identities, "identity"),
		count(s.Tables.Nodes, "node"), count(s.Tables.Services, "service"), count(s.Tables.Conflicts, "conflict"))
	if s.Tables.Conflicts > 0 {
		p.branch("several clusters or sources claim one prefix for different things: see weft ip conflicts")
	}
	p.datapath()
}

func healthText(s *api.Status) string {
	if s.Healthy {
		return "ok"
	}
	return count(len(s.Problems), "problem")
}

func (p *statusPrinter) kvstore() {
	k := p.s.KVStore
	if k == nil {
		p.line("KVStore", "none, nothing is published")
		return
	}
	p.line("KVStore", "%s for %s, %s published, %d pending, leases: %s", k.State, age(p.now, k.Since), count(k.Keys-min(k.Pending, k.Keys), "key"), k.Pending,
		orDash(strings.Join(k.Leases, ",")))
	p.etcd(k.Endpoints, k.ServerVersion, k.EtcdClusterID, k.Revision, 0, k.LastContact)
	p.warning(k.Warning)
	p.certificates(k.Certificates, k.CertificateWarnings)
	p.lastError(k.LastError, k.LastErrorAt)
}

func (p *statusPrinter) etcd(endpoints []string, version, clusterID string, revision, lag int64, contact time.Time) {
	p.branch("etcd: %s - %s, cluster-id=%s, revision=%d, lag=%d, last answer: %s", orDash(strings.Join(endpoints, ",")), orDash(version),
		orDash(clusterID), revision, lag, answered(p.now, contact))
}

// certificates says until when those of each role are good, and which of them need care; in full, of each.
func (p *statusPrinter) certificates(certificates []api.Certificate, warnings []string) {
	var roles []string
	first := make(map[string]time.Time)
	for _, c := range certificates {
		if until, ok := first[c.Role]; !ok {
			roles = append(roles, c.Role)
			first[c.Role] = c.NotAfter
		} else if c.NotAfter.Before(until) {
			first[c.Role] = c.NotAfter
		}
	}
	var texts []string
	for _, role := range roles {
		texts = append(texts, fmt.Sprintf("%s until %s", role, first[role].UTC().Format(time.DateOnly)))
	}
	if len(texts) > 0 {
		p.branch("certificates: %s", strings.Join(texts, ", "))
	}
	if p.full {
		for _, c := range certificates {
			p.branch("certificate: %s of %s, %s, until %s", c.Role, c.Of, c.Subject, c.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	for _, text := range warnings {
		p.warning(text)
	}
}

func (p *statusPrinter) warning(text string) {
	if text != "" {
		p.branch("warning: %s", text)
	}
}

func (p *statusPrinter) lastError(text string, at time.Time) {
	if text != "" {
		p.branch("last error (%s): %s", ago(p.now, at), text)
	}
}

func (p *statusPrinter) clusters() {
	remote, ready := 0, 0
	for i := range p.s.Clusters {
		if c := &p.s.Clusters[i]; !c.Own {
			remote++
			if c.Ready {
				ready++
			}
		}
	}
	p.line("ClusterMesh", "%d/%d remote clusters ready", ready, remote)
	// The own cluster comes last: it is there only if it has other nodes to follow.
	for _, own := range []bool{false, true} {
		for i := range p.s.Clusters {
			if c := &p.s.Clusters[i]; c.Own == own {
				p.cluster(c)
			}
		}
	}
}

func (p *statusPrinter) cluster(c *api.Cluster) {
	name := c.Name
	if c.Own {
		name += " (own)"
	}
	mood := bad
	if c.Ready {
		mood = good
	}
	fmt.Fprintln(p.w, "   "+printable(name)+": "+p.ink.paint(mood, printable(c.State))+printable(fmt.Sprintf(" for %s, %s, %s, %s, %s, %s", age(p.now, c.Since),
		count(c.Counts.Nodes, "node"), count(c.Counts.IPs, "endpoint"), count(c.Counts.Identities, "identity"),
		count(c.Counts.Services, "service"), reconnectionText(p.now, c))))
	if len(c.Endpoints) > 0 {
		p.etcd(c.Endpoints, c.ServerVersion, c.EtcdClusterID, c.Revision, c.Lag, c.LastSuccess)
		p.warning(c.Warning)
		p.certificates(c.Certificates, c.CertificateWarnings)
	}
	if p.full {
		p.branch("configuration file: %s", orDash(c.ConfigFile))
		p.branch("failures: %d since the agent started", c.Failures)
	}
	if c.ID != 0 && !c.Own {
		p.branch("remote configuration: cluster-id=%d, kvstoremesh=%t, sync-canaries=%t", c.ID, c.Cached, c.Canaries)
	}
	if c.ID != 0 {
		p.branch("synchronization status: nodes=%t, endpoints=%t, identities=%t, services=%t",
			c.Synced["nodes"], c.Synced["ips"], c.Synced["identities"], c.Synced["services"])
	}
	if c.ConfigError != "" {
		p.branch("config: %s", c.ConfigError) // which names the file
	}
	if !c.StaleSince.IsZero() {
		kept := "what was known stays in use"
		if c.Withdrawn {
			kept = "what outlived --clustermesh-cache-ttl is withdrawn"
		}
		p.branch("stale since %s (%s): %s", c.StaleSince.UTC().Format(time.RFC3339), ago(p.now, c.StaleSince), kept)
	}
	if c.ServicesLost {
		p.branch("services: away for --service-withdraw-after: its backends are used only where there are no others")
	}
	p.quotas(c)
	p.rejections(c)
	if c.Conflicts > 0 {
		p.branch("conflicts: %s that others claim for something else: see weft ip conflicts", count(c.Conflicts, "prefix"))
	}
	if c.LastError != c.ConfigError {
		p.lastError(c.LastError, c.LastErrorAt)
	}
}

// reconnectionText says how often the connection was made anew, and when last.
func reconnectionText(now time.Time, c *api.Cluster) string {
	text := count(int(c.Reconnects), "reconnection")
	if c.LastReconnect.IsZero() {
		return text
	}
	return text + " (last: " + ago(now, c.LastReconnect) + ")"
}

// quotas says what the limits hold back, and how to give more.
func (p *statusPrinter) quotas(c *api.Cluster) {
	if c.Waiting > 0 {
		p.branch("waiting: %s whose node is not known", count(c.Waiting, "endpoint"))
	}
	q := &c.Quotas
	if name, _ := q.Exceeded(); name != "" {
		p.branch("quota: %s, %s: what goes beyond is refused; raise %s in --mesh-limits if it should have more",
			quotaText(q.Entries, "entries"), quotaText(q.Bytes, "bytes"), name)
	} else if p.full && q.Entries.Used > 0 {
		p.branch("quota: %s, %s", quotaText(q.Entries, "entries"), quotaText(q.Bytes, "bytes"))
	}
	if q.HeldBack > 0 {
		p.branch("quota: held back %d times for more than %d events per second; raise max-events-per-second if it should have more",
			q.HeldBack, q.EventsPerSecond)
	}
}

func quotaText(q api.Quota, of string) string {
	if q.Limit == 0 {
		return fmt.Sprintf("%d %s", q.Used, of)
	}
	return fmt.Sprintf("%d of %d %s", q.Used, q.Limit, of)
}

func (p *statusPrinter) rejections(c *api.Cluster) {
	if len(c.Rejected) == 0 {
		return
	}
	last := ""
	if n := len(c.Rejections); n > 0 {
		r := c.Rejections[n-1]
		last = fmt.Sprintf("; last (%s): %s %s: %s", ago(p.now, r.At), r.Kind, r.Key, r.Reason)
	}
	p.branch("rejected: %s%s", rejectedText(c), last)
	if p.full {
		p.branch("the last %d of them: see weft clusters rejected %s", len(c.Rejections), c.Name)
	}
}

// shownEndpoints keeps the status of a busy node on one screen.
const shownEndpoints = 10

func (p *statusPrinter) endpoints() {
	e := &p.s.Endpoints
	p.line("Endpoints", "%d", len(e.Items))
	for i, item := range e.Items {
		if i == shownEndpoints {
			p.branch("and %d more, see weft status -o json", len(e.Items)-i)
			break
		}
		p.branch("%s/%s: %s, identity %d, %s", item.Namespace, item.Name, strings.Join(texts(item.IPs), ", "), item.Identity,
			orDash(ownLabels(item.Labels)))
	}
	if a := p.s.Allocator; a != nil {
		p.line("Identities", "%s in use, %d waiting, %d restored, %d free in the cluster", count(a.LabelSets, "label set"), a.Waiting, a.Restored, a.Free)
	}
}

// ownLabels are the labels that the workload was given, without those that every workload of a cluster has.
func ownLabels(labels []string) string {
	text := shortLabels(labels)
	_, text, _ = strings.Cut(text, "/")
	return text
}

func (p *statusPrinter) datapath() {
	d := &p.s.Datapath
	state := "not ready"
	if d.Ready {
		state = "ready"
	}
	p.line("Datapath", "%s, routing %s, %s, %s seen, %d lost", state, d.RoutingMode, count(d.Routes, "route"),
		count(int(d.Flows.Received), "flow"), d.Flows.Lost)
	usage := "?"
	if d.Map.MaxEntries > 0 {
		usage = strconv.FormatFloat(100*float64(d.Map.Entries)/float64(d.Map.MaxEntries), 'f', 1, 64) + "%"
	}
	p.branch("ipcache: %d/%d entries (%s), %d pending, %d unclaimed: %s", d.Map.Entries, d.Map.MaxEntries, usage, d.Map.Pending,
		d.Map.Unclaimed, d.Map.Pin)
	if text := driftText(d.Drift); text != "" {
		p.branch("drift: %s changed by somebody else and put right, map last compared %s: find out who, if it grows", text, ago(p.now, d.Map.VerifiedAt))
	}
	for _, device := range d.Devices {
		var programs []string
		for _, program := range device.Programs {
			text := program.Name
			if !program.Attached {
				text += " (not attached)"
			}
			programs = append(programs, text)
		}
		p.branch("device %s: %s", device.Name, cmp.Or(strings.Join(programs, ", "), device.Error, "-"))
	}
	p.overlay(d.Overlay)
	p.pods(&d.Pods)
	if t := d.Services; t != nil {
		p.branch("services: %d/%d frontends, %d/%d backends, %d/%d slots, %d pending, %d unclaimed, %s kept, %s refused: %s",
			t.Frontends, t.MaxFrontends, t.Backends, t.MaxBackends, t.Slots, t.MaxSlots, t.Pending, t.Unclaimed,
			count(t.Affinities, "client"), count(int(t.Refused), "flow"), t.Cgroup)
		p.translation(t.Translation)
	}
}

// overlay tells of the device that leads to the pods of other nodes.
func (p *statusPrinter) overlay(o *api.Overlay) {
	if o == nil {
		return
	}
	mtu := "no device"
	if o.MTU > 0 {
		mtu = fmt.Sprintf("MTU %d", o.MTU)
	}
	state := "up"
	if o.Error != "" {
		state = o.Error
	}
	p.branch("overlay %s: UDP port %d, %s: %s", o.Device, o.Port, mtu, state)
}

// translation tells of services for packets that come from no local socket.
func (p *statusPrinter) translation(t *api.Translation) {
	if t == nil {
		return
	}
	p.branch("translation: at %s, %s of at most %d, packets dropped: %d without backend, %d to the client itself, %d of a port in use, %d without memory; %d answered",
		count(len(t.Devices), "device"), count(t.Flows, "flow"), t.MaxFlows, t.Refused, t.Hairpin, t.Clashes, t.Failed, t.Answered)
}

// pods tells of the devices of this node's own pods.
func (p *statusPrinter) pods(pods *api.PodDevices) {
	if pods.Addresses == 0 && len(pods.Missing) == 0 {
		return
	}
	p.branch("pods: %d addresses at %s, %d without, check %s", pods.Addresses, count(len(pods.Devices), "device"), len(pods.Missing), pods.Check)
	const shown = 3
	for i, m := range pods.Missing {
		if i == shown {
			p.branch("pods: and %d more", len(pods.Missing)-i)
			break
		}
		p.branch("pod %s: %s", m.Address, m.Reason)
	}
}

// driftText lists how much of which kind was changed by others; "" if nothing was.
func driftText(drift map[string]uint64) string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(drift)) {
		if n := drift[kind]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d of %s", n, kind))
		}
	}
	return strings.Join(parts, ", ")
}

// controllers lists what runs by itself.
func (p *statusPrinter) controllers() error {
	fmt.Fprintln(p.w)
	t := newTable(p.w, "CONTROLLER", "STATE", "LAST SUCCESS", "FAILURES", "LAST ERROR")
	for _, task := range p.s.Tasks {
		state := "starting"
		if task.Ready {
			state = "ready"
		}
		t.row(task.Name, state, "-", "-", "-")
	}
	for _, c := range p.s.Clusters {
		name := "remote-etcd-" + c.Name
		if c.Own {
			name = "own-etcd-" + c.Name
		}
		success, failure := "never", "-"
		if !c.LastSuccess.IsZero() {
			success = ago(p.now, c.LastSuccess)
		}
		if c.LastError != "" {
			failure = ago(p.now, c.LastErrorAt) + ": " + c.LastError
		}
		t.row(name, c.State, success, strconv.FormatUint(c.Failures, 10), failure)
	}
	return t.flush()
}

// count says how many of something there are.
func count(n int, one string) string {
	switch {
	case n == 1:
		return "1 " + one
	case strings.HasSuffix(one, "x"):
		return fmt.Sprintf("%d %ses", n, one)
	case strings.HasSuffix(one, "ty"), strings.HasSuffix(one, "try"):
		return fmt.Sprintf("%d %sies", n, strings.TrimSuffix(one, "y"))
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// age is how long ago something was, coarsely.
func age(now, then time.Time) string {
	if then.IsZero() {
		return "ever"
	}
	d := max(now.Sub(then), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

func ago(now, then time.Time) string {
	if then.IsZero() {
		return "at an unknown time"
	}
	return age(now, then) + " ago"
}
