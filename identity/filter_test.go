// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"slices"
	"strings"
	"testing"
)

func mustFilter(t *testing.T, patterns ...string) Filter {
	t.Helper()
	f, err := NewFilter(patterns...)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFilterTakes(t *testing.T) {
	always := []string{LabelNamespace, LabelNamespaceName, LabelCluster, LabelServiceAccount}
	without := func(key string) []string {
		return slices.DeleteFunc(slices.Clone(always), func(k string) bool { return k == key })
	}
	for _, v := range []struct {
		name           string
		patterns       []string
		taken, ignored []string
	}{
		{"the defaults", nil,
			[]string{"app", "app.kubernetes.io/name", "io.cilium.k8s.namespace.labels.team", "k8sXio", "zone"},
			[]string{"pod-template-hash", "controller-revision-hash", "statefulset.kubernetes.io/pod-name", "controller-uid",
				"apps.kubernetes.io/pod-index", "batch.kubernetes.io/controller-uid", "kubernetes.io/hostname", "io.kubernetes.x",
				"k8s.io/cluster", "topology.kubernetes.io/zone", "batch.kubernetes.io/job-completion-index", "failure-domain.beta.kubernetes.io/zone", "annotation.x", "etcd_node", "pod-template-generation"}},
		{"one more excluded", []string{"k8s:!zone"}, []string{"app"}, []string{"zone", "zone-a", "pod-template-hash"}},
		{"of another source", []string{"container:!zone"}, []string{"zone"}, nil},
		{"one included", []string{"k8s:app$"}, []string{"app", "app.kubernetes.io/name"}, []string{"apple", "zone", "pod-template-hash"}},
		{"the longer included", []string{"!team", "team-a"}, []string{"team-a"}, []string{"team", "team-b"}},
		{"a default excluded", []string{`!app\.kubernetes\.io`}, []string{"app"}, []string{"app.kubernetes.io/name"}},
		{"the namespace's labels excluded", []string{`!io\.cilium\.k8s\.namespace\.labels`}, []string{"app"},
			[]string{LabelNamespaceName, "io.cilium.k8s.namespace.labels.team"}},
	} {
		f := mustFilter(t, v.patterns...)
		here := always
		if slices.Contains(v.ignored, LabelNamespaceName) {
			here = without(LabelNamespaceName)
		}
		for _, key := range append(v.taken, here...) {
			if !f.Takes(Label{Source: SourceK8s, Key: key}) {
				t.Errorf("%s: %s is left out", v.name, key)
			}
		}
		for _, key := range v.ignored {
			if f.Takes(Label{Source: SourceK8s, Key: key}) {
				t.Errorf("%s: %s is taken", v.name, key)
			}
		}
	}
	for _, bad := range []string{"", "k8s:", "k8s:!", "a(b"} {
		if _, err := NewFilter(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

// What tells where a workload runs is not the workload's to say.
func TestLabelsOfAWorkload(t *testing.T) {
	w := Workload{Cluster: "east", Namespace: "shop", ServiceAccount: "web", Labels: map[string]string{
		"app": "web", "pod-template-hash": "1", LabelCluster: "west", LabelNamespace: "bank", LabelServiceAccount: "root",
		LabelNamespaceName: "bank", "io.cilium.k8s.namespace.labels.team": "bank",
	}, NamespaceLabels: map[string]string{"team": "a", "kubernetes.io/metadata.name": "shop"}}
	got, err := mustFilter(t).Labels(w)
	const want = "k8s:app=web;k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop;" +
		"k8s:io.cilium.k8s.namespace.labels.team=a;k8s:io.cilium.k8s.policy.cluster=east;" +
		"k8s:io.cilium.k8s.policy.serviceaccount=web;k8s:io.kubernetes.pod.namespace=shop;"
	if err != nil || got.String() != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	got, err = mustFilter(t, `!io\.cilium\.k8s\.namespace\.labels`, "!io.cilium.k8s.policy").Labels(w)
	const least = "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=east;k8s:io.cilium.k8s.policy.serviceaccount=web;k8s:io.kubernetes.pod.namespace=shop;"
	if err != nil || got.String() != least {
		t.Errorf("without labels of the namespace: got %q, %v, want %q", got, err, least)
	}
	for _, bad := range []Label{
		{Key: "reserved:host"}, {Key: "$host"}, {Key: "a=b"}, {Key: "a;b"}, {Key: ""}, {Key: "a", Value: "b;c"}, {Key: "u", Value: "http://h"},
		{Key: "a", Value: "b\n"},
	} {
		w := Workload{Cluster: "east", Namespace: "shop", Labels: map[string]string{bad.Key: bad.Value}}
		if got, err := mustFilter(t).Labels(w); err == nil {
			t.Errorf("%q=%q was accepted: %q", bad.Key, bad.Value, got)
		}
	}
}

// mechanism: J2
func TestPool(t *testing.T) {
	p := NewPool(100, 103)
	first := func(uint32) uint32 { return 0 }
	p.Bind(100, "a")
	p.Bind(102, "b")
	p.Bind(103, "b")
	p.Bind(999, "c")
	if id, ok := p.ID("b"); !ok || id != 102 || p.Free() != 1 {
		t.Errorf("b is %d, %v; %d free", id, ok, p.Free())
	}
	if _, ok := p.ID("c"); ok {
		t.Error("an identity out of the range is known")
	}
	if id, ok := p.Pick(first); !ok || id != 101 || p.Free() != 0 {
		t.Errorf("picked %d, %v; %d free", id, ok, p.Free())
	}
	if id, ok := p.Pick(first); ok {
		t.Errorf("picked %d of a pool without free ones", id)
	}
	p.Release(101)
	p.Unbind(102)
	p.Bind(100, "b")
	if id, _ := p.ID("b"); id != 100 {
		t.Errorf("b is %d, want the lowest", id)
	}
	if _, ok := p.ID("a"); ok {
		t.Error("a is still known")
	}
	last := func(n uint32) uint32 { return n - 1 }
	if id, ok := p.Pick(last); !ok || id != 101 {
		t.Errorf("picked %d, %v, want the search to go round", id, ok)
	}
	if s, ok := p.Labels(103); !ok || !strings.Contains(s, "b") {
		t.Errorf("103 stands for %q, %v", s, ok)
	}
}
