// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/internal/testutil"
)

// What is added is there after a restart; what is refused is told, and changes nothing.
func TestEndpointAddAndRemove(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	s := newSite(t)
	s.cli(t, exitUnreachable, "endpoint add db-1 --ip 10.1.1.20")
	agent := startAgent(t, "--config", s.config)
	testutil.Eventually(t, 20*time.Second, func() error { return s.healthy(t) })
	const add = "endpoint add db-1 --namespace shop --ip 10.1.1.20,fd00:10:1:1::20 --identity 65794 --label app=db --port postgres=5432 "
	for _, step := range []struct {
		code       int
		args, want string
	}{
		{exitOK, add, "endpoint shop/db-1 added\n"},
		{exitOK, add + "-o json", `{"apiVersion":"weft/v1","kind":"EndpointChange","change":"changed"}` + "\n"},
		{exitNot, "endpoint add db-1 --ip 10.1.1.20 --identity 1", "is outside the range 65536 to 131071 of cluster east"},
		{exitNot, "endpoint add db/1 --ip 10.1.1.20 --identity 65794", `name "db/1": want`},
		{exitNot, "endpoint remove db-1", "endpoint default/db-1 was not added through the API: not found"},
	} {
		got := s.cli(t, step.code, step.args)
		if strings.HasPrefix(step.want, "{") {
			var a, b any
			if json.Unmarshal([]byte(got), &a) == nil && json.Unmarshal([]byte(step.want), &b) == nil && cmp.Equal(a, b) {
				continue
			}
		}
		if !strings.Contains(got, step.want) {
			t.Errorf("weft %s: %q, want %q", step.args, got, step.want)
		}
	}
	agent.stop()
	agent = startAgent(t, "--config", s.config)
	testutil.Eventually(t, 20*time.Second, func() error { return s.healthy(t) })
	if got := s.cli(t, exitOK, "endpoint rm db-1 --namespace shop"); got != "endpoint shop/db-1 removed\n" {
		t.Errorf("after a restart: %q", got)
	}
	s.cli(t, exitNot, "endpoint rm db-1 --namespace shop")
	agent.stop()
}

// Mistakes on the command line are told before any agent is asked.
func TestEndpointUsage(t *testing.T) {
	for args, want := range map[string]string{
		"add":                                "NAME is missing (see `weft endpoint add --help`)",
		"add a":                              "--ip: an endpoint has at least one address",
		"add a --ip 10.1.1":                  `"10.1.1" is not an IP address`,
		"add a --ip 127.0.0.1":               "127.0.0.1 cannot be",
		"add a --ip 10.1.1.1 --label app":    `"app": want key=value`,
		"add a --ip 10.1.1.1 --label =x":     `"=x": want key=value`,
		"add a --ip 10.1.1.1 --port 80":      `"80": want name=number`,
		"add a --ip 10.1.1.1 --port http=0":  `"http=0": want name=number`,
		"add a --ip 10.1.1.1 --port h=70000": `"h=70000": want name=number`,
		"add a --ip 10.1.1.1 --id 65536":     "invalid argument",
		"remove":                             "NAME is missing (see `weft endpoint remove --help`)",
		"remove a b":                         `there is an argument too many: "b"`,
	} {
		code, stdout, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": "/nonexistent"}, append([]string{"endpoint"}, strings.Fields(args)...)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("weft endpoint %s: exit code %d, %q, want %q", args, code, stderr, want)
		}
	}
}

func TestEndpointFlags(t *testing.T) {
	var f endpointFlags
	flags := pflag.NewFlagSet("add", pflag.ContinueOnError)
	f.declare(flags)
	if err := flags.Parse(strings.Fields("--ip ::ffff:10.1.1.1,fd00::1 --label app=a=b --label empty= --port http=80,dns=53/UDP --id 7 --identity 65793")); err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(f.spec("a"))
	const want = `{"name":"a","namespace":"default","id":7,"ips":["10.1.1.1","fd00::1"],"identity":"65793","labels":{"app":"a=b","empty":""},` +
		`"ports":[{"name":"http","port":80},{"name":"dns","port":53,"protocol":"UDP"}]}`
	if err != nil || string(got) != want {
		t.Errorf("%s, %v\nwant %s", got, err, want)
	}
}

// An agent that is to follow Kubernetes and cannot know where it is says so at once.
func TestKubernetesNeedsAServer(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	const agent = "agent --node-name n --node-ip 10.0.0.1 --kubernetes"
	for args, want := range map[string]string{
		agent:                                "--kubernetes: kubernetes: unable to load in-cluster configuration",
		agent + " --kubeconfig /nonexistent": "--kubernetes: kubeconfig /nonexistent: stat /nonexistent: no such file",
	} {
		if code, _, stderr := weft(t, nil, strings.Fields(args)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("weft %s: exit code %d, %q, want %q", args, code, stderr, want)
		}
	}
}
