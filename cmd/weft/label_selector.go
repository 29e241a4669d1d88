// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// labelSelector is what labels must be, as Kubernetes has it: app=web, app!=web, app, !app, app in (web, db), app notin (web, db),
// several with commas. A key may be given with its source, k8s:app, or without.
type labelSelector []labelRequirement

// labelRequirement is one of a selector's: the label of a key has one of the values; of any, if there are none.
type labelRequirement struct {
	key    string
	values []string
	not    bool
}

func (s *labelSelector) Type() string { return "selector" }

func (s *labelSelector) String() string {
	var texts []string
	for _, r := range *s {
		texts = append(texts, r.String())
	}
	return strings.Join(texts, ",")
}

func (r *labelRequirement) String() string {
	switch {
	case len(r.values) == 0 && r.not:
		return "!" + r.key
	case len(r.values) == 0:
		return r.key
	case r.not:
		return r.key + " notin (" + strings.Join(r.values, ",") + ")"
	}
	return r.key + " in (" + strings.Join(r.values, ",") + ")"
}

// Set adds the requirements of a text.
func (s *labelSelector) Set(text string) error {
	for rest := text; ; {
		one := rest
		end := strings.IndexByte(rest, ',')
		if open := strings.IndexByte(rest, '('); open >= 0 && open < end { // the comma parts values
			if end = strings.IndexByte(rest[open:], ')'); end < 0 {
				return fmt.Errorf("%q: a ) is missing", text)
			}
			end += open + 1
			if end == len(rest) {
				end = -1
			}
		}
		if end >= 0 {
			if rest[end] != ',' {
				return fmt.Errorf("%q: want a comma before %q", text, rest[end:])
			}
			one, rest = rest[:end], rest[end+1:]
		}
		r, err := parseLabelRequirement(one)
		if err != nil {
			return err
		}
		*s = append(*s, r)
		if end < 0 {
			return nil
		}
	}
}

func parseLabelRequirement(text string) (labelRequirement, error) {
	text = strings.TrimSpace(text)
	var r labelRequirement
	if set, ok := strings.CutSuffix(text, ")"); ok {
		of, values, _ := strings.Cut(set, "(")
		words := strings.Fields(of)
		if len(words) != 2 || words[1] != "in" && words[1] != "notin" {
			return r, wrongSelector(text)
		}
		r.key, r.not = words[0], words[1] == "notin"
		for value := range strings.SplitSeq(values, ",") {
			r.values = append(r.values, strings.TrimSpace(value))
		}
	} else if key, value, ok := strings.Cut(text, "="); ok {
		key, r.not = strings.CutSuffix(key, "!")
		r.key, r.values = strings.TrimSpace(key), []string{strings.TrimSpace(strings.TrimPrefix(value, "="))}
	} else {
		r.key, r.not = strings.CutPrefix(text, "!")
	}
	for _, part := range append([]string{r.key}, r.values...) {
		if strings.ContainsAny(part, " ()!=,") {
			return r, wrongSelector(text)
		}
	}
	if r.key == "" {
		return r, wrongSelector(text)
	}
	return r, nil
}

func wrongSelector(text string) error {
	return fmt.Errorf("label selector %q: want key=value, key!=value, key, !key, key in (value, …) or key notin (value, …)", text)
}

// matches reports whether labels, each as source:key=value, are as the selector wants them.
func (s labelSelector) matches(labels []string) bool {
	return !slices.ContainsFunc(s, func(r labelRequirement) bool { return slices.ContainsFunc(labels, r.met) == r.not })
}

// met reports whether a label has the key, and one of the values.
func (r *labelRequirement) met(label string) bool {
	_, bare, _ := strings.Cut(label, ":")
	for _, text := range []string{label, bare} {
		key, value, _ := strings.Cut(text, "=")
		if key == r.key && (len(r.values) == 0 || slices.Contains(r.values, value)) {
			return true
		}
	}
	return false
}
