// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"fmt"
	"maps"
	"regexp"
	"strings"
)

// labelNamespacePrefix precedes the labels of a workload's namespace.
const labelNamespacePrefix = "io.cilium.k8s.namespace.labels."

// defaultPatterns are those of Cilium, so that both find the same labels of a workload to matter: the documented ones of
// 1.16, and the topology of nodes, which Kubernetes gives to pods from 1.35 on (Cilium's issue 43723).
var defaultPatterns = []string{
	`reserved:.*`, `io\.kubernetes\.pod\.namespace`, `io\.cilium\.k8s\.namespace\.labels`, `io\.cilium\.k8s\.policy\.cluster`,
	`io\.cilium\.k8s\.policy\.serviceaccount`, `app\.kubernetes\.io`, `!io\.kubernetes`, `!kubernetes\.io`,
	`!statefulset\.kubernetes\.io/pod-name`, `!apps\.kubernetes\.io/pod-index`, `!batch\.kubernetes\.io/job-completion-index`,
	`!batch\.kubernetes\.io/controller-uid`, `!topology\.kubernetes\.io`, `!.*beta\.kubernetes\.io`, `!k8s\.io`,
	`!pod-template-generation`, `!pod-template-hash`, `!controller-revision-hash`, `!annotation.*`, `!controller-uid`, `!etcd_node`,
}

// pattern is one rule of a [Filter]: keys of a source that begin with what the expression matches.
type pattern struct {
	source  string // empty: any
	exclude bool
	expr    *regexp.Regexp
}

// Filter decides which labels of a workload make its identity. The zero Filter takes all.
type Filter struct {
	patterns []pattern
	listed   bool // only labels that some pattern includes are taken
}

// NewFilter returns the default filter with more patterns: [source:][!]expression, where the source "any" is the same as
// none, "!" excludes, and the regular expression is matched against the beginning of a label's key. Once a pattern of
// these includes, labels that none includes are not taken. Of the patterns that match one key, the longest match that
// includes counts against the shortest that excludes, and loses a tie: so the defaults can be excluded.
func NewFilter(patterns ...string) (Filter, error) {
	var f Filter
	for i, text := range append(append([]string(nil), defaultPatterns...), patterns...) {
		p, err := parsePattern(text)
		if err != nil {
			return Filter{}, err
		}
		f.patterns = append(f.patterns, p)
		if i >= len(defaultPatterns) && !p.exclude {
			f.listed = true
		}
	}
	return f, nil
}

func parsePattern(text string) (p pattern, err error) {
	rest := text
	if source, after, ok := strings.Cut(text, ":"); ok {
		p.source, rest = source, after
		if source == "any" {
			p.source = ""
		}
	}
	rest, p.exclude = strings.CutPrefix(rest, "!")
	if rest == "" {
		return pattern{}, fmt.Errorf("label pattern %q: want [source:][!]expression", text)
	}
	if p.expr, err = regexp.Compile(rest); err != nil {
		return pattern{}, fmt.Errorf("label pattern %q: %w", text, err)
	}
	return p, nil
}

// Takes reports whether a label is one that makes an identity.
func (f Filter) Takes(l Label) bool {
	include, exclude := 0, 0 // a match of nothing is none
	for _, p := range f.patterns {
		if p.source != "" && p.source != l.Source {
			continue
		}
		at := p.expr.FindStringIndex(l.Key)
		switch {
		case at == nil || at[0] != 0:
		case p.exclude && (exclude == 0 || at[1] < exclude):
			exclude = at[1]
		case !p.exclude && at[1] > include:
			include = at[1]
		}
	}
	return include > exclude || !f.listed && exclude == 0
}

// Workload is what of a workload its identity follows from.
type Workload struct {
	Cluster, Namespace, ServiceAccount string
	Labels, NamespaceLabels            map[string]string // as Kubernetes writes them, without a source
}

// Equal reports whether w and o say the same.
func (w Workload) Equal(o Workload) bool {
	return w.Cluster == o.Cluster && w.Namespace == o.Namespace && w.ServiceAccount == o.ServiceAccount &&
		maps.Equal(w.Labels, o.Labels) && maps.Equal(w.NamespaceLabels, o.NamespaceLabels)
}

// Labels returns the labels that make a workload's identity. Those that tell where it runs are always among them, and
// cannot be given by the workload: what it says of them itself is left out. The error says which label cannot stand in
// the canonical form.
func (f Filter) Labels(w Workload) (Labels, error) {
	var set []Label
	add := func(key, value string) error {
		l := Label{Source: SourceK8s, Key: key, Value: value}
		if !f.Takes(l) {
			return nil
		}
		set = append(set, l)
		return checkLabel(key, value)
	}
	for key, value := range w.Labels {
		if assigned(key) {
			continue
		}
		if err := add(key, value); err != nil {
			return nil, err
		}
	}
	for key, value := range w.NamespaceLabels {
		if err := add(labelNamespacePrefix+key, value); err != nil {
			return nil, err
		}
	}
	for _, l := range []Label{
		{SourceK8s, LabelCluster, w.Cluster}, {SourceK8s, LabelNamespace, w.Namespace},
		{SourceK8s, LabelServiceAccount, w.ServiceAccount}, {SourceK8s, LabelNamespaceName, w.Namespace},
	} {
		switch {
		case l.Key == LabelServiceAccount && l.Value == "":
		case l.Key == LabelNamespaceName && !f.Takes(l): // a label of the namespace like others
		default:
			set = append(set, l)
		}
	}
	return MakeLabels(set...), nil
}

// assigned reports whether a key is one that a workload must not give itself.
func assigned(key string) bool {
	return key == LabelCluster || key == LabelServiceAccount || key == LabelNamespace || strings.HasPrefix(key, labelNamespacePrefix)
}

// checkLabel refuses what the canonical form, which has no quoting, would confuse: with another label, or, in the keys of
// etcd, where runs of slashes are one, with the same label of another text.
func checkLabel(key, value string) error {
	unfit := func(r rune) bool { return r <= ' ' || r > '~' || r == ';' }
	switch {
	case key == "" || key[0] == '$' || strings.ContainsFunc(key, unfit) || strings.ContainsAny(key, ":="):
		return fmt.Errorf("label key %q: want printable ASCII characters without space, ';', ':' and '=', and no '$' at the beginning", key)
	case strings.ContainsFunc(value, unfit):
		return fmt.Errorf("label %s has the value %q: want printable ASCII characters without space and ';'", key, value)
	case strings.Contains(key, "//") || strings.Contains(value, "//"):
		return fmt.Errorf("label %s has the value %q: %q cannot be told from %q in the keys of etcd", key, value, "//", "/")
	}
	return nil
}
