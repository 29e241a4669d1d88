// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
)

// A shell offers what the running agent knows, and nothing that it would run: others write names and labels.
func TestCompletion(t *testing.T) {
	agent := lab(true)
	agent.Services = func() iter.Seq[api.Service] {
		return slices.Values([]api.Service{
			{Namespace: "shop", Name: "web", Clusters: []api.ServiceCluster{{Cluster: "west`reboot`", Ready: 2}}},
			{Namespace: "shop", Name: "$(reboot)"}, {Namespace: "shop", Name: "we\x1b[2J"},
		})
	}
	agent.IPs = func() iter.Seq[api.IP] {
		return func(yield func(api.IP) bool) {
			for i := range 3 * completionMost {
				ip := westPod
				ip.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 3, byte(i >> 8), byte(i)}), 32)
				if !yield(ip) {
					return
				}
			}
			yield(westPod)
		}
	}
	socket := serveAgent(t, agent)
	for _, tc := range []struct {
		typed string // what is completed is after the last space
		want  []string
	}{
		{"clusters get ", []string{"west\tready", "east\tready"}},
		{"clusters get e", []string{"east\tready"}},
		{"clusters get west ", nil},
		{"clusters rejected w", []string{"west\tready"}},
		{"troubleshoot kvstore west e", []string{"east\tready"}},
		{"service get s", []string{"shop/web\twest?reboot? 2"}},
		{"endpoint get ", []string{"shop/web-0\t10.1.1.10,fd00:10:1:1::10"}},
		{"identity get 13", []string{"131329\tshop/app=web @west"}},
		{"explain 10.2.", []string{"10.2.1.10\tshop/web-0 @west"}},
		{"bpf ipcache get 10.2.", []string{"10.2.1.10\tshop/web-0 @west"}},
		{"flows --cluster west,e", []string{"west,east\tready"}},
		{"flows --identity 6579", []string{"65793\tapp=web @east", "65794\tapp=db @east"}},
		{"flows --verdict not", []string{"not-ip"}},
		{"identity list --cluster w", []string{"west\tready"}},
		{"kvstore get --cluster w", []string{"west\tready"}},
	} {
		args := append([]string{"__complete"}, strings.Split(tc.typed, " ")...)
		code, stdout, _ := weft(t, map[string]string{"WEFT_API_SOCKET": socket}, args...)
		offered := strings.Split(strings.TrimSpace(stdout), "\n")
		offered = slices.DeleteFunc(offered, func(line string) bool { return strings.HasPrefix(line, ":") }) // the directive
		if diff := cmp.Diff(tc.want, slices.Clip(offered)); diff != "" && len(tc.want)+len(offered) > 0 || code != exitOK {
			t.Errorf("weft %s: exit code %d (-want +got)\n%s", tc.typed, code, diff)
		}
	}
	_, stdout, _ := weft(t, map[string]string{"WEFT_API_SOCKET": socket}, "__complete", "explain", "")
	if n := strings.Count(stdout, "@west"); n != completionMost {
		t.Errorf("%d addresses are offered, want %d", n, completionMost)
	}
	if code, stdout, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": "/nonexistent"}, "__complete", "explain", ""); code != exitOK || stdout != ":4\n" {
		t.Errorf("without an agent: exit code %d, %q, %q", code, stdout, stderr)
	}
}

// A command line that is wrong is told what is missing, what is too much, and what was meant.
func TestUsageErrors(t *testing.T) {
	for args, want := range map[string]string{
		"explain":              "weft: ADDRESS is missing (see `weft explain --help`)",
		"clusters get a b":     "weft: there is an argument too many: \"b\" (see `weft clusters get --help`)",
		"flows web":            "weft: there is an argument too many: \"web\" (see `weft flows --help`)",
		"log-level a b":        "weft: there is an argument too many: \"b\" (see `weft log-level --help`)",
		"ip lst":               "unknown command \"lst\" for \"weft ip\": did you mean list? (see `weft ip --help`)",
		"stats":                "unknown command \"stats\" for \"weft\": did you mean status? (see `weft --help`)",
		"frobnicate":           "unknown command \"frobnicate\" for \"weft\" (see `weft --help`)",
		"bpf ipcache get":      "weft: ADDRESS is missing (see `weft bpf ipcache get --help`)",
		"status --foo":         "unknown flag: --foo (see `weft status --help`)",
		"flows --verdict drop": "want one of identified, world, not-ip, malformed, no-endpoint, wrong-node, wrong-identity, no-backend, spoofed (see `weft flows --help`)",
		"flows -l app==":       "",
	} {
		code, _, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": "/nonexistent"}, strings.Fields(args)...)
		if want == "" {
			if code != exitUnreachable {
				t.Errorf("weft %s: exit code %d, %s", args, code, stderr)
			}
			continue
		}
		if code != exitUsage || !strings.HasSuffix(stderr, want+"\n") {
			t.Errorf("weft %s: exit code %d, %q, want %q", args, code, stderr, want)
		}
	}
}

// A cluster that nobody knows is no empty list.
func TestUnknownCluster(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, lab(true))}
	for _, args := range []string{"identity list", "ip list", "node list", "flows"} {
		code, stdout, stderr := weft(t, env, append(strings.Fields(args), "--cluster", "wset")...)
		if want := "weft: cluster wset is not followed: not found: there are west, east\n"; code != exitNot || stdout != "" || stderr != want {
			t.Errorf("weft %s: exit code %d, %q, %q, want %q", args, code, stdout, stderr, want)
		}
		if code, stdout, stderr := weft(t, env, append(strings.Fields(args), "--cluster", "west")...); code != exitOK || stdout == "" {
			t.Errorf("weft %s: exit code %d, %q, %q", args, code, stdout, stderr)
		}
	}
}

func TestLabelSelector(t *testing.T) {
	labels := []string{"k8s:app=web", "k8s:tier=front", "reserved:host"}
	for text, want := range map[string]bool{
		"app=web": true, "app==web": true, "app=db": false, "app!=db": true, "app!=web": false, "app": true, "!app": false, "!zone": true,
		"k8s:app=web": true, "k8s:app": true, "host": true, "reserved:host": true, "app in (db, web)": true, "app in (db)": false,
		"app notin (db,web)": false, "zone notin (a)": true, "app=web,tier=front": true, "app=web,tier!=front": false,
		"app in (db,web),tier": true, "app in (db,web), !tier": false, "tier,app in (web)": true, "app=": false,
	} {
		var s labelSelector
		if err := s.Set(text); err != nil || s.matches(labels) != want {
			t.Errorf("%q: %v, %v, want %v", text, s.matches(labels), err, want)
		}
		var again labelSelector // what is shown means the same
		if err := again.Set(s.String()); err != nil || again.matches(labels) != want {
			t.Errorf("%q, shown as %q: %v, %v, want %v", text, s.String(), again.matches(labels), err, want)
		}
	}
	for _, text := range []string{"", ",", "app=web,", "=web", "app in web", "app in (web", "app like (web)", "app in (a)b", "a b", "!", "app=(x", "!app=web"} {
		var s labelSelector
		if err := s.Set(text); err == nil {
			t.Errorf("%q is taken for %s", text, fmt.Sprint(&s))
		}
	}
}
