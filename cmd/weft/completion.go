// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/bpf"
)

const (
	// completionPatience bounds how long a shell waits for what could be meant.
	completionPatience = 2 * time.Second
	// completionMost bounds how much a shell is offered: nobody reads more.
	completionMost = 500
)

// candidate is a word that could be meant, and what it stands for.
type candidate struct{ word, means string }

// completion asks the running agent for the words that an argument or an option could be.
type completion func(ctx context.Context, client *api.Client) []candidate

// completes offers the words of an agent for the first argument of a command; with files, a file's name can stand there, too.
func (c completion) completes(cmd *cobra.Command, env environment, files bool) {
	directive := cobra.ShellCompDirectiveNoFileComp
	if files {
		directive = cobra.ShellCompDirectiveDefault
	}
	many := strings.HasSuffix(cmd.Use, "...")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 && !many {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return c.offer(cmd, env, begun), directive
	}
}

// completesFlag offers the words of an agent for an option.
func (c completion) completesFlag(cmd *cobra.Command, env environment, flag string) {
	// The error tells of a flag that does not exist; this one does.
	_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return c.offer(cmd, env, begun), cobra.ShellCompDirectiveNoFileComp
	})
}

// offer asks for the words that begin so. A shell expands what it is offered, and other clusters may have written it: words that
// are more than names and addresses are left out, and what words mean is told in plain letters.
func (c completion) offer(cmd *cobra.Command, env environment, begun string) []cobra.Completion {
	if fromEnvironment(cmd.Flags(), env.lookup) != nil {
		return nil
	}
	// Commands that have no --api-socket know of no agent.
	socket, err := cmd.Flags().GetString("api-socket")
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionPatience)
	defer cancel()
	before := "" // of several values with commas
	if i := strings.LastIndexByte(begun, ','); i >= 0 {
		before = begun[:i+1]
	}
	var offered []cobra.Completion
	for _, x := range c(ctx, api.NewClient(socket)) {
		word := before + x.word
		if x.word == "" || !strings.HasPrefix(word, begun) || plain(word) != word {
			continue
		}
		if len(offered) == completionMost {
			break
		}
		if x.means != "" {
			word = cobra.CompletionWithDesc(word, plain(x.means))
		}
		offered = append(offered, word)
	}
	return offered
}

// plain puts ? for each character that could mean something to a shell or a terminal.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(" _.:/@%+,=-", r) {
			return r
		}
		return '?'
	}, text)
}

// The words that the agent knows. Without an agent there are none.
var (
	someCluster completion = func(ctx context.Context, client *api.Client) (known []candidate) {
		s, _ := client.Status(ctx)
		for _, c := range remoteFirst(s.Clusters) {
			known = append(known, candidate{c.Name, c.State})
		}
		return known
	}
	someIdentity completion = func(ctx context.Context, client *api.Client) (known []candidate) {
		all, _ := client.Identities(ctx)
		for _, id := range all {
			known = append(known, candidate{strconv.FormatUint(uint64(id.ID), 10), strings.TrimSpace(cmp.Or(id.Name, shortLabels(id.Labels)) + atCluster(id.ClusterName))})
		}
		return known
	}
	someService completion = func(ctx context.Context, client *api.Client) (known []candidate) {
		all, _ := client.Services(ctx)
		for i := range all {
			known = append(known, candidate{all[i].Namespace + "/" + all[i].Name, offerTexts(&all[i])})
		}
		return known
	}
	someEndpoint completion = func(ctx context.Context, client *api.Client) (known []candidate) {
		s, _ := client.Status(ctx)
		for i := range s.Endpoints.Items {
			known = append(known, candidate{endpointName(&s.Endpoints.Items[i]), joinAddrs(s.Endpoints.Items[i].IPs)})
		}
		return known
	}
	someAddress completion = func(ctx context.Context, client *api.Client) (known []candidate) {
		all, _ := client.IPs(ctx)
		slices.SortFunc(all, func(a, b api.IP) int { return comparePrefixes(a.Prefix, b.Prefix) })
		for i := range all {
			if ip := &all[i]; ip.Prefix.IsSingleIP() {
				known = append(known, candidate{ip.Prefix.Addr().String(), strings.TrimSpace(strings.Trim(workload(*ip), "-") + atCluster(ip.ClusterName))})
			}
		}
		return known
	}
	someVerdict completion = func(context.Context, *api.Client) (known []candidate) {
		for _, name := range verdictNames() {
			known = append(known, candidate{word: name})
		}
		return known
	}
)

func atCluster(name string) string {
	if name == "" {
		return ""
	}
	return " @" + name
}

// verdictNames are those of all verdicts.
func verdictNames() (names []string) {
	for v := bpf.Identified; v <= bpf.Spoofed; v++ {
		names = append(names, v.String())
	}
	return names
}
