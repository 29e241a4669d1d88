// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"
	"time"
)

// CertificateRole says what a certificate is for.
type CertificateRole string

const (
	ClientCertificate CertificateRole = "client" // what we show
	ServerCertificate CertificateRole = "server" // what an etcd shows, or one in between that ends sooner
	CACertificate     CertificateRole = "ca"     // the authority by which the server was believed
)

// Certificate is one of those that a connection depends on.
type Certificate struct {
	Role     CertificateRole
	Of       string // the file; for ServerCertificate the endpoint
	Subject  string
	NotAfter time.Time
}

// ExpiryLevel says how near the end of a certificate is.
type ExpiryLevel uint8

const (
	ExpiryFar   ExpiryLevel = iota
	ExpiryMonth             // at most 30 days
	ExpiryWeek              // at most 7 days
	ExpiryDay               // at most 1 day
	Expired
)

const day = 24 * time.Hour

// Expiry tells how near the end is, and says so in a sentence, which is empty
// for ExpiryFar.
func (c Certificate) Expiry(now time.Time) (ExpiryLevel, string) {
	left := c.NotAfter.Sub(now)
	level := ExpiryFar
	switch {
	case left <= 0:
		level = Expired
	case left <= day:
		level = ExpiryDay
	case left <= 7*day:
		level = ExpiryWeek
	case left <= 30*day:
		level = ExpiryMonth
	default:
		return level, ""
	}
	end := "ends in " + days(left)
	if level == Expired {
		end = "ended " + days(-left) + " ago"
	}
	return level, fmt.Sprintf("%s %s, on %s", c, end, c.NotAfter.UTC().Format(time.DateTime))
}

// String names the certificate.
func (c Certificate) String() string {
	switch c.Role {
	case ClientCertificate:
		return fmt.Sprintf("client certificate %s of %s", c.Of, c.Subject)
	case CACertificate:
		return fmt.Sprintf("certificate authority %s of %s", c.Subject, c.Of)
	}
	return fmt.Sprintf("certificate of server %s, of %s,", c.Of, c.Subject)
}

// renewal says what to do before a certificate ends.
func (c Certificate) renewal() string {
	switch c.Role {
	case ClientCertificate:
		return "renew it: the file is read again for each connection"
	case CACertificate:
		return "add its successor to the file, and have the server's certificate signed by that"
	}
	return "renew the server's certificate, unless it was done since the last connection"
}

// clientCertificate tells of the client's own pair, which is not nil.
func (c Config) clientCertificate(leaf *x509.Certificate) Certificate {
	return Certificate{ClientCertificate, c.CertFile, subject(leaf), leaf.NotAfter}
}

// serverCertificates tells of what a server at an endpoint has shown: of that
// part of it which ends first, and, where it was verified, of the authority.
// Of several ways to verify it the one that lasts longest counts, as a bundle
// holds old authorities too.
func (c Config) serverCertificates(endpoint string, shown []*x509.Certificate, verified [][]*x509.Certificate) []Certificate {
	var best []Certificate
	var until time.Time
	for _, chain := range verified {
		root := chain[len(chain)-1]
		of := c.CAFile
		if of == "" {
			of = "the system's authorities"
		}
		first := firstToEnd(chain[:max(1, len(chain)-1)])
		end := first.NotAfter
		if root.NotAfter.Before(end) {
			end = root.NotAfter
		}
		if best == nil || end.After(until) {
			until = end
			best = []Certificate{
				{ServerCertificate, endpoint, subject(first), first.NotAfter},
				{CACertificate, of, subject(root), root.NotAfter},
			}
		}
	}
	if best == nil && len(shown) > 0 {
		best = []Certificate{{ServerCertificate, endpoint, subject(shown[0]), shown[0].NotAfter}}
	}
	return best
}

func firstToEnd(chain []*x509.Certificate) *x509.Certificate {
	return slices.MinFunc(chain, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
}

// subject is whose a certificate is; "no name" if it does not say.
func subject(c *x509.Certificate) string {
	if name := c.Subject.String(); name != "" {
		return name
	}
	return "no name"
}

// names are those that a server may have that shows a certificate.
func names(c *x509.Certificate) string {
	all := append([]string(nil), c.DNSNames...)
	for _, ip := range c.IPAddresses {
		all = append(all, ip.String())
	}
	return strings.Join(all, " ")
}

// keyType tells the kind and size of a certificate's key.
func keyType(c *x509.Certificate) string {
	switch key := c.PublicKey.(type) {
	case *ecdsa.PublicKey:
		return "ECDSA " + key.Curve.Params().Name
	case *rsa.PublicKey:
		return fmt.Sprintf("RSA %d", key.N.BitLen())
	case ed25519.PublicKey:
		return "Ed25519"
	}
	return c.PublicKeyAlgorithm.String()
}

// days is a duration of certificates.
func days(d time.Duration) string {
	switch n := int(d / day); {
	case n == 0:
		return d.Round(time.Second).String()
	case n == 1:
		return "1 day"
	default:
		return fmt.Sprintf("%d days", n)
	}
}
