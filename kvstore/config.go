// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

const (
	defaultKeepAliveInterval = 15 * time.Second
	defaultKeepAliveTimeout  = 25 * time.Second
	defaultPageSize          = 10_000
	defaultMaxMessageBytes   = 64 << 20
)

// Config says which etcd to reach and how. The zero value of a field beyond
// Endpoints means its default. It is plain data, to be copied freely.
type Config struct {
	// Endpoints are URLs, http://host:port or https://host:port, all of the
	// same scheme; a bare host:port is taken as https.
	Endpoints []string

	// CAFile, CertFile and KeyFile are PEM files, read again at every TLS
	// handshake. Without CAFile the system's authorities count; CertFile and
	// KeyFile come together or not at all.
	CAFile, CertFile, KeyFile string

	// InsecureTransport makes a bare host:port plain text.
	InsecureTransport bool
	// InsecureSkipVerify accepts any server certificate.
	InsecureSkipVerify bool

	Username, Password string

	// HostAliases are looked at before DNS.
	HostAliases []HostAlias

	// KeepAliveInterval and KeepAliveTimeout (15 s and 25 s): a connection
	// that was silent for the one is probed, and closed when the probe stays
	// unanswered for the other.
	KeepAliveInterval, KeepAliveTimeout time.Duration

	// PageSize is how many keys one request of a paged list asks for (10,000).
	// etcd counts the rest of the range for each page, so that small pages
	// cost quadratically.
	PageSize int64
	// Paged lists page by page even where the server could stream.
	Paged bool

	// MaxMessageBytes bounds one answer of the server (64 MiB).
	MaxMessageBytes int
}

// HostAlias gives a host name of an endpoint its addresses.
type HostAlias struct {
	Hostname string
	IPs      []netip.Addr
}

// configFile is the file format: the YAML form of etcd's client configuration
// and cilium-host-aliases. Of etcd's fields those that are absent here
// (auto-sync-interval, dial-timeout, dial-keep-alive-time, ca-file and so on)
// are accepted and have no effect, as in Cilium; so are unknown ones.
type configFile struct {
	Endpoints             []string    `json:"endpoints"`
	TrustedCAFile         string      `json:"trusted-ca-file"`
	CertFile              string      `json:"cert-file"`
	KeyFile               string      `json:"key-file"`
	InsecureTransport     bool        `json:"insecure-transport"`
	InsecureSkipTLSVerify bool        `json:"insecure-skip-tls-verify"`
	Username              string      `json:"username"`
	Password              string      `json:"password"`
	HostAliases           []fileAlias `json:"cilium-host-aliases"`
}

type fileAlias struct {
	Hostname string   `json:"hostname"`
	IPs      []string `json:"ips"`
}

// IsConfig reports whether content is meant to be a client configuration, and
// not a certificate or a key that lies beside one: whether it holds the text
// "endpoints:".
func IsConfig(content []byte) bool {
	return bytes.Contains(content, []byte("endpoints:"))
}

// LoadConfig reads and validates a configuration file. Its errors name the
// file.
func LoadConfig(file string) (Config, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return Config{}, fmt.Errorf("read etcd configuration: %w", err)
	}
	cfg, err := ParseConfig(content)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		return Config{}, fmt.Errorf("etcd configuration %s: %w", file, err)
	}
	return cfg, nil
}

// ParseConfig decodes the YAML of a configuration file. It checks the host
// aliases; whether the whole can be connected with is for Validate.
func ParseConfig(content []byte) (Config, error) {
	var f configFile
	if err := yaml.Unmarshal(content, &f); err != nil {
		return Config{}, fmt.Errorf("parse: %w", err)
	}
	cfg := Config{
		Endpoints:          f.Endpoints,
		CAFile:             f.TrustedCAFile,
		CertFile:           f.CertFile,
		KeyFile:            f.KeyFile,
		InsecureTransport:  f.InsecureTransport,
		InsecureSkipVerify: f.InsecureSkipTLSVerify,
		Username:           f.Username,
		Password:           f.Password,
	}
	seen := make(map[string]bool, len(f.HostAliases))
	for _, a := range f.HostAliases {
		alias, err := a.parse()
		if err != nil {
			return Config{}, err
		}
		if seen[alias.Hostname] {
			return Config{}, fmt.Errorf("cilium-host-aliases has two entries for hostname %q: join them", a.Hostname)
		}
		seen[alias.Hostname] = true
		cfg.HostAliases = append(cfg.HostAliases, alias)
	}
	return cfg, nil
}

func (a fileAlias) parse() (HostAlias, error) {
	if a.Hostname == "" {
		return HostAlias{}, errors.New("cilium-host-aliases entry has no hostname")
	}
	if len(a.IPs) == 0 {
		return HostAlias{}, fmt.Errorf("cilium-host-aliases entry for hostname %q has no IPs", a.Hostname)
	}
	alias := HostAlias{Hostname: strings.ToLower(a.Hostname)}
	for _, s := range a.IPs {
		ip, err := netip.ParseAddr(s)
		if err != nil {
			return HostAlias{}, fmt.Errorf("cilium-host-aliases entry for hostname %q: %w", a.Hostname, err)
		}
		alias.IPs = append(alias.IPs, ip)
	}
	return alias, nil
}

// Validate reports the first thing that would keep a client from being made.
// It reads no file and asks no name server.
func (c Config) Validate() error {
	if len(c.Endpoints) == 0 {
		return errors.New("no endpoints: name at least one, as in \"endpoints: [https://west.mesh.cilium.io:2379]\"")
	}
	secure, err := c.secureEndpoint(c.Endpoints[0])
	if err != nil {
		return err
	}
	for _, ep := range c.Endpoints[1:] {
		s, err := c.secureEndpoint(ep)
		if err != nil {
			return err
		}
		if s != secure {
			return fmt.Errorf("endpoints %s and %s: one is encrypted and the other is not", c.Endpoints[0], ep)
		}
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		return errors.New("cert-file and key-file must be given together")
	}
	if (c.Username == "") != (c.Password == "") {
		return errors.New("username and password must be given together")
	}
	return nil
}

// secureEndpoint reports whether TLS is spoken to an endpoint.
func (c Config) secureEndpoint(ep string) (bool, error) {
	scheme, rest, ok := strings.Cut(ep, "://")
	if !ok {
		scheme, rest = "https", ep
		if c.InsecureTransport {
			scheme = "http"
		}
	}
	if scheme != "http" && scheme != "https" {
		return false, fmt.Errorf("endpoint %q: scheme %q is not http or https", ep, scheme)
	}
	u, err := url.Parse(scheme + "://" + rest)
	if err != nil {
		return false, fmt.Errorf("endpoint %q: %w", ep, err)
	}
	if host, port, err := net.SplitHostPort(u.Host); err != nil || host == "" || port == "" {
		return false, fmt.Errorf("endpoint %q: it must name host and port, as in https://west.mesh.cilium.io:2379", ep)
	}
	return scheme == "https", nil
}

// withDefaults fills in what the zero values stand for.
func (c Config) withDefaults() Config {
	if c.KeepAliveInterval <= 0 {
		c.KeepAliveInterval = defaultKeepAliveInterval
	}
	if c.KeepAliveTimeout <= 0 {
		c.KeepAliveTimeout = defaultKeepAliveTimeout
	}
	if c.PageSize <= 0 {
		c.PageSize = defaultPageSize
	}
	if c.MaxMessageBytes <= 0 {
		c.MaxMessageBytes = defaultMaxMessageBytes
	}
	return c
}
