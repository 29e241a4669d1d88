// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"fmt"
	"strings"
	"time"
)

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
	switch n := int(d / (24 * time.Hour)); {
	case n == 0:
		return d.Round(time.Second).String()
	case n == 1:
		return "1 day"
	default:
		return fmt.Sprintf("%d days", n)
	}
}
