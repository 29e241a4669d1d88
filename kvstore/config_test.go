// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"crypto/tls"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

type goldenConfig struct {
	File       string `json:"file"`
	Content    string `json:"content"`
	IsConfig   bool   `json:"is_config"`
	ParseError string `json:"parse_error"`
}

// goldenConfigs are files and what Cilium 1.20 makes of them.
func goldenConfigs(t testing.TB) []goldenConfig {
	t.Helper()
	return golden.Lines[goldenConfig](t, "config-files.jsonl")
}

func TestConfigGolden(t *testing.T) {
	for _, g := range goldenConfigs(t) {
		t.Run(g.File, func(t *testing.T) {
			if got := IsConfig([]byte(g.Content)); got != g.IsConfig {
				t.Errorf("IsConfig is %v, want %v", got, g.IsConfig)
			}
			_, err := ParseConfig([]byte(g.Content))
			if (err != nil) != (g.ParseError != "") {
				t.Fatalf("ParseConfig: %v, Cilium: %q", err, g.ParseError)
			}
			if i := strings.Index(g.ParseError, "cilium-host-aliases"); i >= 0 && err.Error() != g.ParseError[i:] {
				t.Errorf("error %q, want %q", err, g.ParseError[i:])
			}
		})
	}
}

func TestParseConfigAcceptsEveryField(t *testing.T) {
	got, err := ParseConfig([]byte(`
endpoints: [https://a:2379, https://b:2379]
trusted-ca-file: /ca
cert-file: /cert
key-file: /key
insecure-transport: true
insecure-skip-tls-verify: true
username: u
password: p
auto-sync-interval: 1000000000
dial-timeout: 5000000000
dial-keep-alive-time: 1
dial-keep-alive-timeout: 2
reject-old-cluster: true
permit-without-stream: true
max-unary-retries: 3
backoff-wait-between: 4
backoff-jitter-fraction: 0.5
ca-file: /old
something-unknown: {deep: [1, 2]}
cilium-host-aliases:
- hostname: B
  ips: [192.0.2.1, "2001:db8::1"]
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Endpoints: []string{"https://a:2379", "https://b:2379"},
		CAFile:    "/ca", CertFile: "/cert", KeyFile: "/key",
		InsecureTransport: true, InsecureSkipVerify: true,
		Username: "u", Password: "p",
		HostAliases: []HostAlias{{Hostname: "b", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}},
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
}

func TestBadConfigs(t *testing.T) {
	for name, c := range map[string]struct{ content, want string }{
		"no endpoints":        {"endpoints: []", "no endpoints"},
		"scheme":              {"endpoints: [ftp://a:1]", `scheme "ftp" is not http or https`},
		"no port":             {"endpoints: [https://a]", "must name host and port"},
		"no host":             {"endpoints: ['https://:2379']", "must name host and port"},
		"mixed":               {"endpoints: [https://a:1, http://b:1]", "one is encrypted and the other is not"},
		"certificate alone":   {"endpoints: [https://a:1]\ncert-file: c", "together"},
		"user alone":          {"endpoints: [https://a:1]\nusername: u", "together"},
		"alias without name":  {"endpoints: [https://a:1]\ncilium-host-aliases: [{ips: [1.2.3.4]}]", "has no hostname"},
		"alias with bad ip":   {"endpoints: [https://a:1]\ncilium-host-aliases: [{hostname: a, ips: [1.2.3]}]", `hostname "a"`},
		"alias twice":         {"endpoints: [https://a:1]\ncilium-host-aliases: [{hostname: a, ips: [1.2.3.4]}, {hostname: A, ips: [1.2.3.4]}]", "two entries"},
		"not a mapping":       {"endpoints: a", "parse"},
		"not YAML":            {"endpoints: [", "parse"},
		"endpoint is no URL":  {"endpoints: ['https://a b:1']", "endpoint"},
		"endpoint with noise": {"endpoints: ['https://a:1:2']", "endpoint"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "west")
			if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := LoadConfig(file)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v, want one with %q and the file's name", err, c.want)
			}
		})
	}
}

func TestLoadConfigNamesAMissingFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "absent")
	if _, err := LoadConfig(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("error %v", err)
	}
}

func FuzzParseConfig(f *testing.F) {
	for _, g := range goldenConfigs(f) {
		f.Add([]byte(g.Content))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		cfg, err := ParseConfig(content)
		if err != nil {
			return
		}
		for _, a := range cfg.HostAliases {
			if a.Hostname == "" || len(a.IPs) == 0 {
				t.Errorf("host alias %v", a)
			}
		}
		if cfg.Validate() == nil && len(cfg.Endpoints) == 0 {
			t.Error("valid without endpoints")
		}
	})
}

func TestConfigMinTLS(t *testing.T) {
	for text, want := range map[string]uint16{
		"": tls.VersionTLS13, "tls-min-version: TLS1.3": tls.VersionTLS13, "tls-min-version: 1.2": tls.VersionTLS12,
		"tls-min-version: TLS1.2": tls.VersionTLS12, "tls-min-version: TLS1.1": 0, "tls-min-version: 13": 0,
	} {
		cfg, err := ParseConfig([]byte("endpoints: [https://a:1]\n" + text))
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		got, err := cfg.minTLS()
		if got != want || (err == nil) != (want != 0) || (cfg.Validate() == nil) != (want != 0) {
			t.Errorf("%q: %#x, %v, want %#x", text, got, err, want)
		}
	}
}
