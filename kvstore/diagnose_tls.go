// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"time"
)

// files are the TLS files of a config, as they are now.
type files struct {
	roots    *x509.CertPool // nil: the system's
	rootsErr error
	pair     *tls.Certificate // nil: none
	pairErr  error
}

func readFiles(cfg Config) files {
	var f files
	if cfg.CAFile != "" {
		f.roots, f.rootsErr = readRoots(cfg.CAFile)
	}
	if cfg.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
		if err == nil {
			f.pair = &pair
		}
		f.pairErr = err
	}
	return f
}

// plain judges a connection without TLS.
func (t *trial) plain() {
	const step = "TLS"
	if ip, err := netip.ParseAddr(t.host); err == nil && ip.IsLoopback() || t.host == "localhost" {
		t.report(step, StepPassed, "plain text, which does not leave this machine", "")
	} else {
		t.report(step, StepWarning, "plain text: whoever is on the way can read and change everything", "have etcd speak TLS, and name it https://")
	}
}

// secure shakes hands over conn, which it closes, and judges both sides'
// certificates. The handshake itself verifies nothing, so that what the server
// presents can be shown.
func (t *trial) secure(ctx context.Context, conn net.Conn) bool {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	t.files = readFiles(t.Config)
	var asked *tls.CertificateRequestInfo
	cfg := t.tlsConfig()
	cfg.MinVersion, cfg.InsecureSkipVerify = tls.VersionTLS12, true
	cfg.GetClientCertificate = func(r *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		asked = r
		return t.present(), nil
	}
	session := tls.Client(conn, cfg)
	err := session.HandshakeContext(ctx)
	state := session.ConnectionState()
	ok := t.judgeServer(state, err)
	return t.judgeClient(asked, err == nil) && ok
}

// tlsConfig is what a Client uses, in this moment.
func (t *trial) tlsConfig() *tls.Config {
	lowest, err := t.Config.minTLS()
	if err != nil {
		lowest = tls.VersionTLS13 // refused by Validate
	}
	return &tls.Config{
		ServerName: t.host, RootCAs: t.files.roots, MinVersion: lowest, InsecureSkipVerify: t.Config.InsecureSkipVerify,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return t.present(), nil },
	}
}

// present returns the certificate to show, an empty one if there is none.
func (t *trial) present() *tls.Certificate {
	if t.files.pair == nil {
		return new(tls.Certificate)
	}
	return t.files.pair
}

// judgeServer reports on the server's side of a handshake.
func (t *trial) judgeServer(state tls.ConnectionState, err error) bool {
	const step = "TLS"
	chain := state.PeerCertificates
	shown := describeChain(chain, time.Now())
	lowest, _ := t.Config.minTLS()
	switch {
	case t.files.rootsErr != nil:
		t.report(step, StepFailed, t.files.rootsErr.Error(), "correct trusted-ca-file: it must hold the authority that signs this etcd's certificate", shown...)
		return false
	case err != nil && refusedCertificate(err):
		t.report(step, StepFailed, err.Error(), t.refusedAdvice(), shown...)
		return false
	case err != nil:
		t.report(step, StepFailed, "handshake: "+err.Error(), handshakeAdvice(err), shown...)
		return false
	case state.Version < lowest:
		t.report(step, StepFailed, fmt.Sprintf("the server speaks %s at most", tls.VersionName(state.Version)),
			"have it speak "+tls.VersionName(lowest)+", or allow the older one with tls-min-version in the config", shown...)
		return false
	}
	message := fmt.Sprintf("%s, certificate of %s", tls.VersionName(state.Version), subject(chain[0]))
	verified, err := t.verify(chain)
	if err != nil {
		if t.Config.InsecureSkipVerify {
			t.report(step, StepWarning, message+" is accepted unverified: "+err.Error(),
				"remove insecure-skip-tls-verify from the config: anybody on the way can be this server", shown...)
			return true
		}
		t.report(step, StepFailed, err.Error(), t.verifyAdvice(err, chain[0]), shown...)
		return false
	}
	for _, c := range t.Config.serverCertificates(t.host, chain, verified) {
		if level, text := c.Expiry(time.Now()); level != ExpiryFar {
			t.report(step, StepWarning, text, c.renewal(), shown...)
			return true
		}
	}
	t.report(step, StepPassed, message, "", shown...)
	return true
}

// verify checks the server's chain as the handshake of a Client does.
func (t *trial) verify(chain []*x509.Certificate) (verified [][]*x509.Certificate, err error) {
	options := x509.VerifyOptions{Roots: t.files.roots, DNSName: t.host, Intermediates: x509.NewCertPool()}
	for _, c := range chain[1:] {
		options.Intermediates.AddCert(c)
	}
	return chain[0].Verify(options)
}

func (t *trial) verifyAdvice(err error, leaf *x509.Certificate) string {
	var (
		invalid x509.CertificateInvalidError
		host    x509.HostnameError
		unknown x509.UnknownAuthorityError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && time.Now().Before(leaf.NotBefore):
		return "the certificate is not valid yet: see whether the clocks here and there are right"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "renew the server's certificate, and see whether the clock here is right"
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return "the certificate is not for servers: issue it with extended key usage serverAuth"
	case errors.As(err, &host):
		return fmt.Sprintf("the certificate is for %s: name the server so, if need be with cilium-host-aliases, or issue one for %s", names(leaf), t.host)
	case errors.As(err, &unknown) && t.Config.CAFile == "":
		return "name the file of the authority that signed the certificate as trusted-ca-file: without, the system's authorities count"
	case errors.As(err, &unknown):
		return fmt.Sprintf("put the authority that signed the certificate, %s, into %s, if it is the right one", leaf.Issuer, t.Config.CAFile)
	}
	return "have the server show a certificate that can be verified"
}

// refusedCertificate reports whether the server broke off because of the
// client's certificate. crypto/tls does not export its alerts.
func refusedCertificate(err error) bool {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "remote error" {
		return false
	}
	return strings.Contains(op.Err.Error(), "certificate")
}

func (t *trial) refusedAdvice() string {
	if t.files.pair == nil {
		return "the server lets in nobody without a client certificate: name one as cert-file, and its key as key-file"
	}
	return "the server refuses the client certificate: have it signed by an authority that the server trusts, and see the log of etcd"
}

func handshakeAdvice(err error) string {
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &record), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return "the server does not speak TLS, or is a proxy whose server is away: name it http:// if it is plain text by intention"
	case errors.Is(err, context.DeadlineExceeded):
		return "something accepts connections there and does not answer: a server that hangs, or a proxy whose server is away"
	}
	return "see which versions and ciphers the server offers"
}

// judgeClient reports on what the server asked for, if the handshake came so
// far, and what the config has.
func (t *trial) judgeClient(asked *tls.CertificateRequestInfo, shook bool) bool {
	const step = "client certificate"
	if asked != nil {
		t.report("accepted authorities", StepPassed, acceptable(asked.AcceptableCAs), "")
	}
	switch {
	case t.files.pairErr != nil:
		t.report(step, StepFailed, t.files.pairErr.Error(), "cert-file and key-file must be PEM files of a certificate and of its own key")
		return false
	case t.files.pair == nil && asked == nil && !shook:
		return true
	case t.files.pair == nil && asked == nil:
		t.report(step, StepPassed, "none, and the server asks for none", "")
		return true
	case t.files.pair == nil:
		t.report(step, StepWarning, "none, and the server asks for one", "name one as cert-file, and its key as key-file")
		return true
	}
	chain := parsed(t.files.pair)
	leaf, shown := chain[0], describeChain(chain, time.Now())
	t.user = leaf.Subject.CommonName
	message := "certificate of " + subject(leaf)
	client := t.Config.clientCertificate(leaf)
	level, expiry := client.Expiry(time.Now())
	switch {
	case level == Expired:
		t.report(step, StepFailed, expiry, client.renewal(), shown...)
		return false
	case time.Now().Before(leaf.NotBefore):
		t.report(step, StepFailed, message+" is not valid yet", "see whether the clock here is right", shown...)
		return false
	case !forClients(leaf):
		t.report(step, StepFailed, message+" is not for clients", "issue it with extended key usage clientAuth", shown...)
		return false
	case asked == nil && shook:
		t.report(step, StepWarning, message+", for which the server does not ask", "unless etcd knows readers by password, have it ask: --client-cert-auth", shown...)
	case asked != nil && asked.SupportsCertificate(t.files.pair) != nil:
		t.report(step, StepFailed, message+" is signed by none of the accepted authorities", t.refusedAdvice(), shown...)
		return false
	case level != ExpiryFar:
		t.report(step, StepWarning, expiry, client.renewal(), shown...)
	default:
		t.report(step, StepPassed, message+", which fits its key", "", shown...)
	}
	return true
}

func parsed(pair *tls.Certificate) []*x509.Certificate {
	var chain []*x509.Certificate
	for _, der := range pair.Certificate {
		if c, err := x509.ParseCertificate(der); err == nil {
			chain = append(chain, c)
		}
	}
	return chain
}

func forClients(c *x509.Certificate) bool {
	if len(c.ExtKeyUsage) == 0 && len(c.UnknownExtKeyUsage) == 0 {
		return true
	}
	for _, usage := range c.ExtKeyUsage {
		if usage == x509.ExtKeyUsageClientAuth || usage == x509.ExtKeyUsageAny {
			return true
		}
	}
	return false
}

// acceptable names the authorities whose certificates a server wants.
func acceptable(authorities [][]byte) string {
	if len(authorities) == 0 {
		return "the server does not say which"
	}
	var texts []string
	for _, raw := range authorities {
		var sequence pkix.RDNSequence
		if _, err := asn1.Unmarshal(raw, &sequence); err != nil {
			texts = append(texts, fmt.Sprintf("%x", raw))
			continue
		}
		texts = append(texts, sequence.String())
	}
	return strings.Join(texts, "; ")
}

// version asks for etcd's version by HTTP. With TLS 1.3 the handshake is over
// before the server has looked at the client's certificate: that it refuses
// it shows only with the first answer, and gRPC does not tell.
func (t *trial) version(ctx context.Context, secure bool) bool {
	const step = "version"
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", t.reached)
		},
	}
	url := "http://" + net.JoinHostPort(t.host, t.port) + "/version"
	if secure {
		url = "https" + strings.TrimPrefix(url, "http")
		transport.TLSClientConfig = t.tlsConfig()
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.report(step, StepFailed, err.Error(), "correct the endpoint")
		return false
	}
	response, err := transport.RoundTrip(request)
	switch {
	case err != nil && refusedCertificate(err):
		t.report(step, StepFailed, err.Error(), t.refusedAdvice())
		return false
	case err != nil:
		t.report(step, StepFailed, err.Error(), "something accepts connections there that is no etcd, or an etcd that hangs: see its log")
		return false
	}
	defer response.Body.Close()
	var v struct{ EtcdServer, EtcdCluster string }
	const longest = 4096
	if err := json.NewDecoder(io.LimitReader(response.Body, longest)).Decode(&v); err != nil || v.EtcdServer == "" {
		t.report(step, StepWarning, fmt.Sprintf("%s says HTTP status %s and no version", url, response.Status),
			"nothing to do if the next steps pass: some etcds serve HTTP elsewhere (--listen-client-http-urls)")
		return true
	}
	t.report(step, StepPassed, fmt.Sprintf("etcd %s, cluster version %s", v.EtcdServer, v.EtcdCluster), "")
	return true
}

// describeChain tells of each certificate of a chain what matters, the leaf
// first.
func describeChain(chain []*x509.Certificate, now time.Time) []string {
	var lines []string
	for _, c := range chain {
		var b bytes.Buffer
		fmt.Fprintf(&b, "subject %s, issuer %s", subject(c), c.Issuer)
		if n := names(c); n != "" {
			fmt.Fprintf(&b, ", for %s", n)
		}
		fmt.Fprintf(&b, ", valid %s to %s", c.NotBefore.UTC().Format(time.DateTime), c.NotAfter.UTC().Format(time.DateTime))
		if left := c.NotAfter.Sub(now); left < 0 {
			fmt.Fprintf(&b, " (ended %s ago)", days(-left))
		} else {
			fmt.Fprintf(&b, " (%s left)", days(left))
		}
		fmt.Fprintf(&b, ", %s", keyType(c))
		lines = append(lines, b.String())
	}
	return lines
}
