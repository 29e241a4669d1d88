// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
)

func explainCommand(env environment, c *clientOptions) *cobra.Command {
	var out *output
	const short = "Tell all that is known of an address, and why it is what it is"
	cmd := newCommand("explain ADDRESS", short, func(cmd *cobra.Command, args []string) error {
		addr, err := parseAddress(args[0])
		if err != nil {
			return err
		}
		e, err := api.NewClient(c.socket).Explain(cmd.Context(), addr)
		if errors.Is(err, api.ErrUnreachable) {
			e = explainAlone(c.bpffs, addr)
		} else if err != nil {
			return err
		}
		// The kernel alone has answered where there is no agent, and the exit code says so.
		return errors.Join(printExplanation(env, out, &e), err)
	})
	someAddress.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

// explainAlone says what the kernel does while no agent answers.
func explainAlone(bpffs string, addr netip.Addr) api.Explanation {
	found := datapath.Explain(bpffs, addr)
	e := api.Explanation{
		Meta: api.MetaOf(api.KindExplanation), Address: addr, Claims: []api.Claim{}, Kernel: makeKernel(bpffs, &found),
		Why:    "no agent answers: this is what the kernel goes by without it",
		Advice: []string{"start the agent, or name its socket with --api-socket: only it knows why, and whether that is right"},
	}
	if e.Kernel.Error != "" {
		e.Advice = append(e.Advice, adviceDiagnose)
	}
	id := identity.World // which of the worlds only the agent knows
	if found.Found {
		id = found.Entry.Identity
	}
	if e.Identity.ID = uint32(id); id.Reserved() {
		e.Identity.Name = id.String()
	}
	e.Identity.Labels = []string{}
	return e
}

func printExplanation(env environment, out *output, e *api.Explanation) error {
	if out.forPrograms() {
		return out.object(env.stdout, e)
	}
	t := out.table(env.stdout)
	t.row("Address:", e.Address.String())
	t.row("Identity:", identityText(e.Identity.ID))
	labels := e.Identity.Labels
	if !e.LabelsKnown {
		labels = []string{"not known yet"}
	}
	t.rows("Labels:", labels)
	t.row("Why:", e.Why)
	var services []string
	for i := range e.Services {
		services = append(services, explainedService(&e.Services[i]))
	}
	t.rows("Service:", services)
	t.row("Node:", explainedNode(e.Node))
	t.row("Cluster:", explainedCluster(env.now(), e.Cluster))
	t.rows("Kernel:", explainedEntry(&e.Kernel))
	t.row("Route:", explainedRoute(&e.Kernel))
	if len(e.Waiting) > 0 {
		t.rows("Waiting:", waitingLines(e.Waiting))
	}
	if len(e.Refused) > 0 {
		t.rows("Refused:", refusedLines(env.now(), e.Refused))
	}
	if len(e.Advice) > 0 {
		t.rows("Next:", e.Advice)
	}
	if err := t.flush(); err != nil || len(e.Claims) == 0 {
		return err
	}
	fmt.Fprintln(env.stdout)
	return printClaims(env, out, e.Claims)
}

// waitingLines say what would be claimed, and what it waits for.
func waitingLines(claims []api.Claim) []string {
	var lines []string
	for i := range claims {
		c := &claims[i]
		lines = append(lines, fmt.Sprintf("%s of %s, identity %s, is not used: no node with its host %s is known (%s)", c.Prefix,
			clusterText(c.Cluster, c.ClusterName), identityText(c.Identity), c.Host, c.Key))
	}
	return lines
}

func refusedLines(now time.Time, all []api.Refused) []string {
	var lines []string
	for _, r := range all {
		lines = append(lines, fmt.Sprintf("%s of %s, %s: %s", r.Key, r.Cluster, ago(now, r.At), r.Reason))
	}
	return lines
}

func explainedService(s *api.ExplainedService) string {
	text := fmt.Sprintf("%s/%s, port %d/%s: ", s.Namespace, s.Name, s.Port, s.Protocol)
	if s.Holder != "" {
		return text + "not in force, as " + s.Holder + " has it"
	}
	return text + fmt.Sprintf("%s used: %s", count(s.Used, "backend"), s.Why)
}

func explainedNode(n *api.ExplainedNode) string {
	if n == nil {
		return "-"
	}
	text := n.Cluster + "/" + n.Name
	if n.Via.IsValid() {
		text += ", by " + n.Via.String()
	}
	return text
}

func explainedCluster(now time.Time, c *api.Cluster) string {
	if c == nil {
		return "-"
	}
	text := fmt.Sprintf("%s: %s for %s, revision %d, last answer %s", clusterName(c), c.State, age(now, c.Since), c.Revision,
		ago(now, c.LastSuccess))
	if !c.Ready && c.LastError != "" {
		text += ": " + c.LastError
	}
	return text
}

// explainedEntry is the kernel's entry, and, if it is not right, what it should be.
func explainedEntry(k *api.Kernel) []string {
	switch {
	case k.Error != "":
		return []string{"not to be read: " + k.Error}
	case k.Entry == nil && k.Wanted == "":
		return []string{"no entry in " + k.Pin}
	}
	text := "no entry"
	if e := k.Entry; e != nil {
		shown := mapEntry{Identity: e.Identity, TunnelEndpoint: e.TunnelEndpoint, EncryptKey: e.EncryptKey, Flags: e.Flags}
		text = shown.value()
	}
	lines := []string{text + " in " + k.Pin}
	if k.Kept {
		lines = append(lines, "kept from before the agent's start, until its cluster has been heard")
	}
	if k.Wanted != "" {
		lines = append(lines, "differs from what it should be: "+k.Wanted)
	}
	return lines
}

func explainedRoute(k *api.Kernel) string {
	r := k.Route
	if r == nil {
		return orDash(k.RouteError)
	}
	words := []string{r.Type}
	add := func(name, value string) {
		if value != "" {
			words = append(words, name, value)
		}
	}
	if r.Gateway.IsValid() {
		add("via", r.Gateway.String())
	}
	add("dev", r.Device)
	if r.Source.IsValid() {
		add("src", r.Source.String())
	}
	add("table", strconv.Itoa(r.Table))
	add("proto", r.Protocol)
	return strings.Join(words, " ")
}

func printClaims(env environment, out *output, claims []api.Claim) error {
	titles := []string{"PREFIX", "CLAIM", "IDENTITY", "CLUSTER", "SOURCE", "HOST", "WORKLOAD", "REVISION", "AGE", "KEY"}
	t := out.table(env.stdout, titles...)
	for i := range claims {
		c := &claims[i]
		prefix, state := c.Prefix.String(), "shadowed"
		if c.CIDR && c.Prefix.IsSingleIP() {
			prefix += " (cidr)"
		}
		switch {
		case c.Wins && i == 0:
			state = "in force"
		case c.Wins:
			state = "covered" // by a longer prefix
		}
		t.row(prefix, state, identityText(c.Identity), clusterText(c.Cluster, c.ClusterName), c.Source, addrText(c.Host),
			workload(c.IP), revisionText(c.Revision), claimAge(env.now(), c), orDash(strings.TrimSpace(c.Key+" "+c.File)))
	}
	return t.flush()
}

func revisionText(revision int64) string {
	if revision == 0 {
		return "-"
	}
	return strconv.FormatInt(revision, 10)
}

func claimAge(now time.Time, c *api.Claim) string {
	switch {
	case c.Since.IsZero():
		return "-"
	case !c.Exactly:
		return "over " + age(now, c.Since)
	}
	return age(now, c.Since)
}
