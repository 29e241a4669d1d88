// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"iter"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/weftmesh/weft/api"
)

// evil clears the screen, turns the text around, ends lines, and is no UTF-8 either.
const evil = "\x1b[2J\x1b]0;pwned\a\u202e\u009b31m\r\n\x00\t\U000e0001\xff"

// poison makes every text of an object evil, and every list and map have something evil in it.
func poison(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(evil + v.String())
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() && v.Type().Field(i).Type != reflect.TypeFor[api.Meta]() {
				poison(f)
			}
		}
	case reflect.Pointer:
		own := reflect.New(v.Type().Elem())
		if !v.IsNil() {
			own.Elem().Set(v.Elem())
		}
		v.Set(own)
		poison(v.Elem())
	case reflect.Slice:
		own := reflect.MakeSlice(v.Type(), max(v.Len(), 1), max(v.Len(), 1)) // the good lab goes on with its own
		reflect.Copy(own, v)
		v.Set(own)
		for i := range v.Len() {
			poison(v.Index(i))
		}
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		poison(key)
		poison(value)
		if value.CanUint() {
			value.SetUint(7)
		}
		m := reflect.MakeMap(v.Type())
		m.SetMapIndex(key, value)
		v.Set(m)
	}
}

// poisoned is an object all of whose text comes from a cluster that is not well-meaning.
func poisoned[T any](object T) T {
	poison(reflect.ValueOf(&object).Elem())
	return object
}

// evilLab is an agent that has nothing to show but what such a cluster has written.
func evilLab() api.Agent {
	good := lab(true)
	status := poisoned(good.Status())
	ip, a := poisoned(westPod), addr("10.2.1.10")
	detail, _ := good.IP(a)
	flows := api.NewFlowLog()
	flow := poisoned(api.Flow{Time: testNow})
	flow.Source.IP, flow.Destination.IP = a, a
	flows.Append([]api.Flow{flow})
	all := poisoned(good.Nodes())
	one, _ := good.Identity(131329)
	return api.Agent{
		Version: func() api.VersionInfo { return poisoned(good.Version()) },
		Status:  func() api.Status { return status },
		IPs:     func() iter.Seq[api.IP] { return slices.Values([]api.IP{ip}) },
		IP:      func(netip.Addr) (api.IPDetail, bool) { return poisoned(detail), true },
		Nodes:   func() []api.Node { return all },
		Identities: func() iter.Seq[api.Identity] {
			return slices.Values([]api.Identity{poisoned(one)})
		},
		Identity: func(uint32) (api.Identity, bool) { return poisoned(one), true },
		Explain:  func(a netip.Addr) api.Explanation { return poisoned(labExplanation(a)) },
		Conflicts: func() iter.Seq[api.Conflict] {
			return slices.Values([]api.Conflict{poisoned(api.Conflict{Prefix: westPod.Prefix})})
		},
		Services: func() iter.Seq[api.Service] { return slices.Values([]api.Service{poisoned(api.Service{})}) },
		Service:  func(string, string) (api.Service, bool) { return poisoned(api.Service{}), true },
		Describe: func([]api.Flow) {}, Flows: flows, Endpoints: evilStore{},
		Config: func() api.Config { return poisoned(api.Config{Items: []api.ConfigOption{{}}}) }, LogLevel: new(slog.LevelVar),
		Metrics: newHandler(slog.New(slog.DiscardHandler), newCollector(func() api.Status { return status }, labCounters)),
	}
}

// Whatever a cluster writes into keys and values, no command lets it drive the reader's terminal, in no format; nor does
// the answer to a probe.
//
// lesson: R13
func TestNothingDrivesTheTerminal(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, evilLab())}
	formats := []string{"table", "wide", "tsv", "json", "yaml", "jsonpath=$..*"}
	var tried []string
	for _, args := range []string{
		"status", "status --all-controllers", "ip list", "ip get 10.2.1.10", "ip conflicts", "explain 10.2.1.10", "node list",
		"identity list", "identity get 131329", "service list", "service get shop/web", "endpoint list", "endpoint get 10.1.1.10", "config view", "clusters list", "clusters rejected", "flows", "version --agent", "metrics", "metrics list",
	} {
		for _, format := range formats {
			_, stdout, stderr := weft(t, env, append(strings.Fields(args), "-o", format)...)
			if !strings.Contains(stdout, "pwned") {
				t.Errorf("weft %s -o %s shows nothing of what it was given: %q, %q", args, format, stdout, stderr)
			}
			checkHarmless(t, stdout+stderr)
			if format == "table" && !strings.HasPrefix(args, "status") && strings.Contains(stdout, "\t") {
				t.Errorf("weft %s: a tab parts columns that the table does not have: %q", args, stdout)
			}
		}
		tried = append(tried, args)
	}
	socket := serveOperator(t, poisoned(labOperator(true)))
	for _, format := range formats {
		_, stdout, stderr := weft(t, map[string]string{"WEFT_OPERATOR_SOCKET": socket}, "operator", "status", "-o", format)
		if !strings.Contains(stdout, "pwned") {
			t.Errorf("weft operator status -o %s shows nothing of what it was given: %q, %q", format, stdout, stderr)
		}
		checkHarmless(t, stdout+stderr)
	}
	checkTried(t, append(tried, "operator status"))
	code, stdout, stderr := weft(t, env, "clusters", "get", evil)
	if code != exitNot || stdout != "" || !strings.Contains(stderr, "pwned") {
		t.Errorf("an unknown name: exit code %d, %q, %q", code, stdout, stderr)
	}
	checkHarmless(t, stderr)
	for _, format := range formats {
		_, stdout, stderr := weft(t, env, "top", "--once", "--interval", "100ms", "-o", format)
		if !strings.Contains(stdout, "pwned") {
			t.Errorf("weft top -o %s shows nothing of what it was given: %q, %q", format, stdout, stderr)
		}
		checkHarmless(t, stdout+stderr)
	}
	for _, args := range []string{"endpoint add a --ip 10.1.1.1", "endpoint remove a"} {
		if _, stdout, stderr = weft(t, env, strings.Fields(args)...); stdout != "" || !strings.Contains(stderr, "pwned") {
			t.Errorf("weft %s: %q, %q", args, stdout, stderr)
		}
		checkHarmless(t, stderr)
	}
}

// evilStore refuses every change of an endpoint, with words of its own.
type evilStore struct{}

func (evilStore) PutEndpoint([]byte) (bool, error)    { return false, errors.New(evil) }
func (evilStore) RemoveEndpoint(string, string) error { return errors.New(evil) }

// checkTried finds commands that ask the agent and were not tried.
func checkTried(t *testing.T, tried []string) {
	t.Helper()
	root, _ := newRoot(environment{})
	others := []string{
		"agent", "bpf", "kvstore", "troubleshoot", "completion", "operator", // they ask no agent
		"clusters get", // its line is below
		"diagnose", "cleanup", "verify", "bench",
		"endpoint add", "endpoint remove", // theirs are, too
		"service watch",   // service list --watch
		"clusters watch",  // clusters list --watch
		"clusters add",    // what it prints of the etcd is what troubleshoot kvstore prints
		"clusters remove", // it asks nobody
		"gather",          // it prints what it asked; what it was told is in a file
		"top",             // its line is below
		"log-level",       // its answer is one of slog's words
		"page",            // its answer is the agent's own address
	}
	for _, cmd := range leaves(root) {
		path := strings.TrimPrefix(cmd.CommandPath(), "weft ")
		known := func(name string) bool { return path == name || strings.HasPrefix(path, name+" ") }
		if !slices.ContainsFunc(tried, func(args string) bool { return strings.HasPrefix(args+" ", path+" ") }) && !slices.ContainsFunc(others, known) {
			t.Errorf("weft %s is not tried with text that drives terminals", path)
		}
	}
}

func TestPrintable(t *testing.T) {
	for s, want := range map[string]string{
		"plain, ünïcödé └": "plain, ünïcödé └",
		"esc\x1b[2J":       `esc\x1b[2J`,
		"a\nb":             `a\nb`,
		"rtl\u202e":        `rtl\u202e`,
		"c1\u009b":         `c1\u009b`,
		"bad\xff":          `bad\xff`,
		"say \"hi\"\x00":   `say "hi"\x00`,
	} {
		if got := printable(s); got != want {
			t.Errorf("printable(%q) = %s, want %s", s, got, want)
		}
	}
	if got := harmless([]byte(`{"a":"x` + "\u009b\u202e\U000e0001" + `"}`)); got != `{"a":"x\u009b\u202e\udb40\udc01"}` {
		t.Errorf("harmless: %s", got)
	}
}
