// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/yamldir"
	"github.com/weftmesh/weft/service"
)

const webFile = `# a service with all that it can have
name: web
namespace: shop
global: true
shared: false
affinity: local
algorithm: maglev
clientAffinity: 30s
addresses: [10.96.1.10, "fd00:96::10"]
ports:
- {name: http, port: 80, target: 8080}
- {name: dns, port: 53, protocol: udp}
backends:
- {ip: 10.1.1.11, draining: true, zone: z1, hostname: web-1, node: n1}
- {ip: 10.1.1.10, ports: {http: 9090}}
labels: {app: web}
`

func TestDeclaration(t *testing.T) {
	good, bad, err := parseFile("web.yaml", []byte(webFile))
	if err != nil || len(bad) != 0 || len(good) != 1 {
		t.Fatal(good, bad, err)
	}
	addr := netip.MustParseAddr
	want := Service{
		Name: service.Name{Namespace: "shop", Name: "web"}, Labels: map[string]string{"app": "web"}, Affinity: 30 * time.Second,
		Annotations: map[string]string{
			"service.cilium.io/global": "true", "service.cilium.io/shared": "false", "service.cilium.io/affinity": "local", "service.cilium.io/lb-algorithm": "maglev",
		},
		Addresses: []netip.Addr{addr("10.96.1.10"), addr("fd00:96::10")}, Ports: []Port{{"dns", service.UDP, 53}, {"http", service.TCP, 80}},
		Backends: []Backend{
			{Addr: addr("10.1.1.10"), Ports: []Port{{"dns", service.UDP, 53}, {"http", service.TCP, 9090}}, Ready: true, Serving: true},
			{
				Addr: addr("10.1.1.11"), Ports: []Port{{"dns", service.UDP, 53}, {"http", service.TCP, 8080}}, Serving: true, Terminating: true,
				Zone: "z1", Hostname: "web-1", Node: "n1",
			},
		},
	}
	if diff := cmp.Diff(want, good[0].Service, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestBadDeclarations(t *testing.T) {
	const ok = "name: web\nports: [{port: 80}]\n"
	for text, want := range map[string]string{
		"ports: [{port: 80}]\n":                                 `field "name" is missing`,
		"name: a/b\nports: [{port: 80}]\n":                      `name "a/b": want at most`,
		"name: web\n":                                           `field "ports" is missing`,
		"name: web\nports: [{name: http}]\n":                    `field "port" is missing`,
		"name: web\nports: [{port: 80}, {port: 81}]\n":          `port name "" is given twice`,
		"name: web\nports: [{port: 80}, {name: a, port: 80}]\n": `port 80/TCP is given twice`,
		"name: web\nports: [{port: 80, protocol: QUIC}]\n":      `"QUIC" is none of`,
		ok + "glbal: true\n":                                    `f.yaml:1: line 3: field glbal not found`,
		ok + "affinity: near\n":                                 `affinity "near"`,
		ok + "algorithm: best\n":                                `algorithm "best"`,
		ok + "clientAffinity: 1500ms\n":                         `want whole seconds`,
		ok + "clientAffinity: 48h\n":                            `want whole seconds, at most 24h`,
		ok + "addresses: [fe80::1]\n":                           `address "fe80::1"`,
		ok + "addresses: [10.0.0.1, '::ffff:10.0.0.1']\n":       `10.0.0.1 is given twice`,
		ok + "backends: [{ip: web-0}]\n":                        `backend "web-0"`,
		ok + "backends: [{ip: 10.0.0.1}, {ip: 10.0.0.1}]\n":     `backend 10.0.0.1 is given twice`,
		ok + "backends: [{ip: 10.0.0.1, ports: {http: 80}}]\n":  `port "http": the service has no port of this name`,
		"name: web\nports: [{port: 70000}]\n":                   `line 2: cannot unmarshal`,
		"- name: web\n  ports: [{port: 80}]\n- just a word\n":   `f.yaml:3: `,
		"[[]]": `f.yaml:1: `,
	} {
		_, bad, err := parseFile("f.yaml", []byte(text))
		var got string
		for _, p := range bad {
			got += p.Error() + "\n"
		}
		if err != nil || !strings.Contains(got, want) {
			t.Errorf("%q:\ngot %q, %v\nwant %q", text, got, err, want)
		}
	}
}

// Files come and go while the source runs; one that is bad leaves what it said last in force.
func TestFilesAreFollowed(t *testing.T) {
	dir := t.TempDir()
	put := func(name, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("a.yaml", webFile)
	f := NewFiles(dir)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	<-f.Ready()
	has := func() (names []string) {
		changes, _, _ := f.Changes(0)
		for _, c := range changes {
			names = append(names, fmt.Sprintf("%s %d", c.Name, len(c.Service.Backends)))
		}
		slices.Sort(names)
		return names
	}
	await := func(problem string, want ...string) {
		t.Helper()
		testutil.Eventually(t, 30*time.Second, func() error {
			if got := has(); !slices.Equal(got, want) {
				return fmt.Errorf("services %q, want %q", got, want)
			}
			if got := strings.Join(f.Problems(), "\n"); !strings.Contains(got, problem) || (problem == "") != (got == "") {
				return fmt.Errorf("problems %q, want %q", got, problem)
			}
			return nil
		})
	}
	await("", "shop/web 2")
	put("b.yaml", "- {name: db, ports: [{port: 5432}], backends: [{ip: 10.1.1.1}]}\n- {name: web, namespace: shop, ports: [{port: 80}]}\n")
	await(dir+"/b.yaml:2: service shop/web is declared already, in a.yaml", "default/db 1", "shop/web 2")
	put("b.yaml", "- {name: db, ports")
	await("its last good version stays in force", "default/db 1", "shop/web 2")
	put("b.yaml", "- {name: db, ports: [{port: 5432}]}")
	await("", "default/db 0", "shop/web 2")
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	await("", "default/db 0")
}

func FuzzDeclaration(f *testing.F) {
	f.Add([]byte(webFile))
	f.Add([]byte("- {name: db, ports: [{port: 5432}], backends: [{ip: 10.1.1.1}]}\n--- \n&a [*a]"))
	f.Fuzz(func(t *testing.T, content []byte) {
		good, bad, err := parseFile("f.yaml", content)
		var _ []yamldir.Problem = bad
		for _, d := range good {
			if err != nil || d.Name.Name == "" || len(d.Ports) == 0 {
				t.Errorf("accepted %+v beside %v", d, err)
			}
		}
	})
}
