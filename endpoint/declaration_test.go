// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
)

func mustLayout(t testing.TB) identity.Layout {
	t.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	return layout
}

func east(t testing.TB) cluster {
	return cluster{name: "east", id: 1, layout: mustLayout(t)}
}

func TestParseForms(t *testing.T) {
	for name, tc := range map[string]struct {
		content string
		want    []string // "line namespace/name ips"
	}{
		"empty":        {"", nil},
		"comment only": {"# nothing yet\n", nil},
		"null":         {"---\n---\nnull\n", nil},
		"one":          {"name: a\nip: 10.1.1.1\nidentity: 65793\n", []string{"1 default/a [10.1.1.1]"}},
		"list":         {"- {name: a, ip: 10.1.1.1, identity: 65793}\n\n- {name: b, ip: 10.1.1.2, identity: 65793}\n", []string{"1 default/a [10.1.1.1]", "3 default/b [10.1.1.2]"}},
		"documents": {
			"name: a\nips: [10.1.1.1, 'fd00::1']\nidentity: 65793\n---\n- name: b\n  namespace: shop\n  ip: ::ffff:10.1.1.2\n  identity: 65793\n",
			[]string{"1 default/a [10.1.1.1 fd00::1]", "5 shop/b [10.1.1.2]"},
		},
		"no identity": {"name: a\nip: 10.1.1.1\n", []string{"1 default/a [10.1.1.1]"}},
		"alias":       {"- &a {name: a, ip: 10.1.1.1, identity: 65793}\n- *a\n", []string{"1 default/a [10.1.1.1]", "2 default/a [10.1.1.1]"}},
	} {
		t.Run(name, func(t *testing.T) {
			good, rejected, err := east(t).parse("f.yaml", []byte(tc.content))
			if err != nil || len(rejected) > 0 {
				t.Fatalf("error %v, rejected %v", err, rejected)
			}
			var got []string
			for i := range good {
				d := &good[i]
				got = append(got, fmt.Sprintf("%d %s %v", d.line, d, d.ips))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

// Each entry is wrong in one way; the entry after it must not suffer.
func TestParseRefuses(t *testing.T) {
	const good = "\n- {name: good, ip: 10.9.9.9, identity: 65793}\n"
	for _, tc := range []struct{ entry, want string }{
		{"- just text", "line 1: an endpoint is a mapping with the fields name, "},
		{"- [1, 2]", "line 1: an endpoint is a mapping"},
		{"- {name: a,\n   ipp: 10.1.1.1}", `line 2: unknown field "ipp"`},
		{"- {name: a, name: b}", `already defined at line 1`},
		{"- {ip: 10.1.1.1, identity: 65793}", `field "name" is missing`},
		{"- {name: a/b, ip: 10.1.1.1, identity: 65793}", `name "a/b": want`},
		{"- {name: a, namespace: \"x\\e[2J\", ip: 10.1.1.1, identity: 65793}", `namespace "x\x1b[2J": want`},
		{"- {name: a, identity: 65793}", `endpoint default/a: field "ip" or "ips" is missing`},
		{"- {name: a, ip: 10.1.1.1, ips: [10.1.1.2], identity: 65793}", "give either ip or ips"},
		{"- {name: a, ip: 10.1.1, identity: 65793}", `ip "10.1.1" is not an IP address`},
		{"- {name: a, ip: 10.1.1.1/32, identity: 65793}", `ip "10.1.1.1/32" is not an IP address`},
		{"- {name: a, ip: 127.0.0.1, identity: 65793}", "ip 127.0.0.1 cannot be a workload's"},
		{"- {name: a, ip: 'fe80::1%eth0', identity: 65793}", "cannot be a workload's"},
		{"- {name: a, ip: 224.0.0.1, identity: 65793}", "cannot be a workload's"},
		{"- {name: a, ip: 0.0.0.0, identity: 65793}", "cannot be a workload's"},
		{"- {name: a, ips: [10.1.1.1, '::ffff:10.1.1.1'], identity: 65793}", "ip 10.1.1.1 is given twice"},
		{"- {name: a, ip: 10.1.1.1, identity: web}", `identity "web": want a number`},
		{"- {name: a, ip: 10.1.1.1, identity: host}", "identity host is outside the range 65536 to 131071 of cluster east"},
		{"- {name: a, ip: 10.1.1.1, identity: 131329}", "identity 131329 is outside the range 65536 to 131071 of cluster east"},
		{"- {name: a, ip: 10.1.1.1, identity: -1}", `identity "-1": want a number`},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, id: 70000}", "line 1: cannot unmarshal !!int `70000` into uint16"},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, labels: web}", "line 1: cannot unmarshal !!str `web` into map"},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, labels: {app: 'a;b'}}", `label app has the value "a;b"`},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, labels: {'k8s:app': a}}", `label key "k8s:app": want`},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, labels: {io.cilium.k8s.policy.cluster: west}}", "label io.cilium.k8s.policy.cluster is set by weft: leave it out"},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, ports: [{name: http}]}", `port "http": field "port" is missing`},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, ports: [{name: http, prt: 1}]}", `unknown field "prt"`},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, ports: [{name: h, port: 1, protocol: ICMP}]}", `protocol "ICMP": want TCP, UDP or SCTP`},
		{"- {name: a, ip: 10.1.1.1, identity: 65793, ports: [{name: h, port: 1}, {name: h, port: 2}]}", `port name "h" is given twice`},
	} {
		t.Run(tc.entry, func(t *testing.T) {
			accepted, rejected, err := east(t).parse("f.yaml", []byte(tc.entry+good))
			if err != nil {
				t.Fatal(err)
			}
			if len(accepted) != 1 || accepted[0].name != "good" {
				t.Errorf("accepted %v, want the good entry alone", accepted)
			}
			if len(rejected) != 1 || rejected[0].Line != 1 || !strings.Contains(rejected[0].Message, tc.want) {
				t.Errorf("rejected %v, want one at line 1 with %q", rejected, tc.want)
			}
		})
	}
}

func TestParseRefusesFile(t *testing.T) {
	for content, want := range map[string]string{
		"- {name: a\n":                       "did not find expected",
		"- {name: good}\n\tx: 1\n":           "line 2",
		"name: a\n---\n\"unterminated":       "line 3",
		"a: &a [*a, *a]\nname: \x00garbage":  "control characters are not allowed",
		"- {name: \xff\xfe, ip: 10.1.1.1}\n": "invalid",
	} {
		if good, _, err := east(t).parse("f.yaml", []byte(content)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parse(%q) = %v, %v; want an error with %q", content, good, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"name: a\nip: 10.1.1.1\nidentity: 65793\n", "- *a\n", "- &a [*a]\n", "? [a]\n: b\n", "<<: {name: a}\n", "!!binary x",
		"- {name: a, ports: [*x]}", "ports: [1]", "--- !!null\n...\n---\n- !!map {}\n",
	} {
		f.Add([]byte(seed))
	}
	c := east(f)
	f.Fuzz(func(t *testing.T, content []byte) {
		good, rejected, err := c.parse("f.yaml", content)
		if err != nil && len(good)+len(rejected) > 0 {
			t.Fatalf("error %v together with %d results", err, len(good)+len(rejected))
		}
		for i := range good {
			d := &good[i]
			if !c.layout.Contains(c.id, d.identity) || len(d.ips) == 0 || d.name == "" {
				t.Fatalf("accepted %+v", d)
			}
			if parsed := identity.ParseLabels(d.labels.String()); parsed.String() != d.labels.String() {
				t.Fatalf("labels %q read back as %q", d.labels, parsed)
			}
		}
	})
}
