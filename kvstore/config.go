// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bytes"
	"crypto/tls"
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
	defaultQPS               = 20
	defaultBootstrapQPS      = 10_000
	defaultLivenessTimeout   = 30 * time.Second
	defaultHeartbeatTimeout  = 2 * time.Minute
	defaultInitialTimeout    = 15 * time.Minute
	defaultCompareInterval   = 10 * time.Minute
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
	// MinTLS is the lowest version of TLS that is spoken, "1.3" (the default)
	// or "1.2".
	MinTLS string

	Username string
	Password Secret

	// HostAliases are looked at before DNS.
	HostAliases []HostAlias

	// KeepAliveInterval and KeepAliveTimeout (15 s and 25 s): a connection
	// that was silent for the one is probed, and closed when the probe stays
	// unanswered for the other.
	KeepAliveInterval, KeepAliveTimeout time.Duration

	// PageSize is how many keys one request of a paged list asks for (10,000),
	// and later ones up to five times as many while the answers come quickly.
	// etcd counts the rest of the range for each page, so that small pages
	// cost quadratically.
	PageSize int64
	// Paged lists page by page even where the server could stream.
	Paged bool

	// MaxMessageBytes bounds one answer of the server (64 MiB).
	MaxMessageBytes int

	// QPS bounds the calls per second (20), each page of a list, each watch
	// and each renewal of a lease being one, and Burst (QPS) those that may
	// come at once after a while of rest. MaxInflight (QPS) bounds the calls
	// that wait for their answer; a watch or a streamed list counts until it
	// is open. BootstrapQPS takes the place of QPS and Burst while a Watcher
	// makes its first list (10,000).
	QPS, Burst, MaxInflight, BootstrapQPS int

	// LivenessTimeout is how long a connected server may leave unanswered what
	// it has the means to answer, before what waits is tried again (30 s).
	LivenessTimeout time.Duration
	// HeartbeatKey, where there is one, is a key that somebody in the cluster
	// writes every minute; see FollowHeartbeat. HeartbeatTimeout is how long it
	// may fail to appear (2 min).
	HeartbeatKey     string
	HeartbeatTimeout time.Duration
	// InitialTimeout is how long etcd may take to answer for the first time
	// before the log says so (15 min). The attempts go on.
	InitialTimeout time.Duration
	// CompareInterval is how often, on average, a Watcher compares what it
	// knows with a list (10 min); negative: never.
	CompareInterval time.Duration

	// LockTTL is how long a lock or a leadership outlives a holder that died
	// or was cut off (25 s), and LockTimeout how long Lock waits (1 min).
	LockTTL, LockTimeout time.Duration
}

// HostAlias gives a host name of an endpoint its addresses.
type HostAlias struct {
	Hostname string
	IPs      []netip.Addr
}

// configFile is the file format: the YAML form of etcd's client configuration,
// cilium-host-aliases and, as etcd's server has it, tls-min-version. Of etcd's fields those that are absent here
// (auto-sync-interval, dial-timeout, dial-keep-alive-time, ca-file and so on)
// are accepted and have no effect, as in Cilium; so are unknown ones.
type configFile struct {
	Endpoints             []string    `json:"endpoints"`
	TrustedCAFile         string      `json:"trusted-ca-file"`
	CertFile              string      `json:"cert-file"`
	KeyFile               string      `json:"key-file"`
	InsecureTransport     bool        `json:"insecure-transport"`
	InsecureSkipTLSVerify bool        `json:"insecure-skip-tls-verify"`
	MinTLS                string      `json:"tls-min-version"`
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
		MinTLS:             strings.TrimPrefix(f.MinTLS, "TLS"),
		Username:           f.Username,
		Password:           Secret(f.Password),
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
	if _, err := c.minTLS(); err != nil {
		return err
	}
	if (c.Username == "") != (c.Password == "") {
		return errors.New("username and password must be given together")
	}
	return nil
}

// minTLS returns the lowest version of TLS, as crypto/tls numbers them.
func (c Config) minTLS() (uint16, error) {
	switch c.MinTLS {
	case "", "1.3":
		return tls.VersionTLS13, nil
	case "1.2":
		return tls.VersionTLS12, nil
	}
	return 0, fmt.Errorf("lowest TLS version %q: it can be 1.3 or 1.2", c.MinTLS)
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
	if c.QPS <= 0 {
		c.QPS = defaultQPS
	}
	if c.Burst <= 0 {
		c.Burst = c.QPS
	}
	if c.MaxInflight <= 0 {
		c.MaxInflight = c.QPS
	}
	if c.BootstrapQPS <= 0 {
		c.BootstrapQPS = max(defaultBootstrapQPS, c.QPS)
	}
	if c.LivenessTimeout <= 0 {
		c.LivenessTimeout = defaultLivenessTimeout
	}
	if c.HeartbeatTimeout <= 0 {
		c.HeartbeatTimeout = defaultHeartbeatTimeout
	}
	if c.InitialTimeout <= 0 {
		c.InitialTimeout = defaultInitialTimeout
	}
	if c.CompareInterval == 0 {
		c.CompareInterval = defaultCompareInterval
	}
	if c.LockTTL <= 0 {
		c.LockTTL = defaultLockTTL
	}
	if c.LockTimeout <= 0 {
		c.LockTimeout = defaultLockTimeout
	}
	return c
}
