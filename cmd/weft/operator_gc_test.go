// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// An interval of 0 leaves a duty out, and without Kubernetes there are none for its objects.
//
// mechanism: J8 O1 N1 K7 M3
func TestGCDuties(t *testing.T) {
	etcd := writeFile(t, "etcd.yaml", "endpoints: [http://127.0.0.1:1]\n")
	kubeconfig := writeFile(t, "kubeconfig", "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n"+
		"clusters: [{name: a, cluster: {server: \"https://127.0.0.1:1\"}}]\nusers: [{name: a, user: {token: a}}]\n")
	const kubernetes = "--cluster-name east --cluster-id 1 --kubernetes --kubeconfig "
	for args, want := range map[string]string{
		"":                         "lock-gc identity-gc endpoint-gc",
		"--identity-gc-interval 0": "lock-gc endpoint-gc",
		"--identity-gc-interval 0 --endpoint-gc-interval 0": "lock-gc",
		kubernetes + kubeconfig:                             "lock-gc identity-gc endpoint-gc kube-dns cilium-endpoint-gc policy-gc",
		kubernetes + kubeconfig + " --cilium-endpoint-gc-interval 0 --cnp-node-status-gc-interval 0": "lock-gc identity-gc endpoint-gc kube-dns",
	} {
		cfg, err := parseOperator(t, nil, append(strings.Fields(args), "--kvstore-config", etcd)...)
		if err != nil {
			t.Fatal(err)
		}
		duties, err := cfg.gcDuties()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, d := range duties {
			names = append(names, d.String())
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s: %s\nwant %s", args, got, want)
		}
	}
	cfg, err := parseOperator(t, nil, append(strings.Fields(kubernetes), "/nonexistent", "--kvstore-config", etcd)...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cfg.gcDuties(); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("without a kubeconfig: %v", err)
	}
}
