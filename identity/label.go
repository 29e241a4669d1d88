// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"slices"
	"strings"
)

// Keys and sources of the labels that every workload's identity carries.
const (
	SourceK8s           = "k8s"
	SourceReserved      = "reserved"
	sourceUnspec        = "unspec"
	LabelCluster        = "io.cilium.k8s.policy.cluster"
	LabelServiceAccount = "io.cilium.k8s.policy.serviceaccount"
	LabelNamespace      = "io.kubernetes.pod.namespace"
	LabelNamespaceName  = "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name"
)

// Label is one label with the system that it came from.
type Label struct{ Source, Key, Value string }

// String is source:key=value, or source:key where there is no value.
func (l Label) String() string {
	if l.Value == "" {
		return l.Source + ":" + l.Key
	}
	return l.Source + ":" + l.Key + "=" + l.Value
}

// ParseLabel reads source:key=value. A missing source is "unspec", a missing value empty; $x stands for reserved:x.
func ParseLabel(s string) Label {
	if rest, ok := strings.CutPrefix(s, "$"); ok {
		s = SourceReserved + ":" + rest
	}
	source, rest, ok := strings.Cut(s, ":")
	if !ok {
		source, rest = sourceUnspec, s
	}
	key, value, _ := strings.Cut(rest, "=")
	return Label{Source: source, Key: key, Value: value}
}

// Labels is a set of labels: sorted bytewise by key, each key once. Make it with [MakeLabels] or [ParseLabels].
type Labels []Label

// MakeLabels returns the set of the labels given; of several with the same key the last stays.
func MakeLabels(labels ...Label) Labels {
	set := slices.Clone(labels)
	slices.SortStableFunc(set, func(a, b Label) int { return strings.Compare(a.Key, b.Key) })
	last := 0
	for i := range set {
		if i > 0 && set[i].Key != set[last].Key {
			last++
		}
		set[last] = set[i]
	}
	if len(set) == 0 {
		return nil
	}
	return Labels(set[:last+1])
}

// ParseLabels reads the form that [Labels.String] writes, in any order.
func ParseLabels(s string) Labels {
	var labels []Label
	for item := range strings.SplitSeq(s, ";") {
		if item != "" {
			labels = append(labels, ParseLabel(item))
		}
	}
	return MakeLabels(labels...)
}

// String is the canonical form under which clusters agree on an identity: "source:key=value;" for each label in order.
func (l Labels) String() string {
	const punctuation = len(":=;")
	size := 0
	for _, label := range l {
		size += len(label.Source) + len(label.Key) + len(label.Value) + punctuation
	}
	var b strings.Builder
	b.Grow(size) // what a table keeps of thousands of these has no slack
	for _, label := range l {
		b.WriteString(label.Source)
		b.WriteByte(':')
		b.WriteString(label.Key)
		b.WriteByte('=')
		b.WriteString(label.Value)
		b.WriteByte(';')
	}
	return b.String()
}

// Get returns the value of the label with this source and key.
func (l Labels) Get(source, key string) (value string, ok bool) {
	for _, label := range l {
		if label.Key == key {
			return label.Value, label.Source == source
		}
	}
	return "", false
}
