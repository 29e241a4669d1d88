// SPDX-License-Identifier: Apache-2.0

// Package kubeapiserver owns how an API server of Kubernetes is run beside weft, by tests and by the lab: its files, its
// arguments, and requests to it. Nothing else of Kubernetes runs: no pod starts, no controller fills an EndpointSlice. Who
// starts the process, and ends it, is the caller.
package kubeapiserver

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/weftmesh/weft/internal/certificate"
)

// lifetime is how long the certificate of a server is good: longer than any test or lab.
const lifetime = 365 * 24 * time.Hour

// Server says how an API server is to run. It authenticates by tokens and by service accounts, and authorises by RBAC.
type Server struct {
	Dir      string         // of its files, which exists
	Addr     netip.AddrPort // at which it serves
	Etcd     string         // the URL of the etcd that keeps its objects
	Services []netip.Prefix // from which services get addresses, of one family or both
}

func (s Server) file(name string) string { return filepath.Join(s.Dir, name) }

// WriteFiles writes what the server needs before it starts: a certificate of an authority, and who has the token is its
// administrator. Nobody else may read them.
func (s Server) WriteFiles(authority *certificate.Authority, token string) error {
	cert, key, err := authority.Issue(certificate.Request{
		CommonName: "kube-apiserver", Hosts: []string{s.Addr.Addr().String()}, NotAfter: time.Now().Add(lifetime),
	})
	if err != nil {
		return err
	}
	var errs []error
	for name, content := range map[string]string{
		"server.crt": string(cert), "server.key": string(key), "tokens.csv": token + `,admin,admin,"system:masters"` + "\n",
	} {
		errs = append(errs, os.WriteFile(s.file(name), []byte(content), 0o600))
	}
	return errors.Join(errs...)
}

// Args are the arguments of the server.
func (s Server) Args() []string {
	host, port := s.Addr.Addr().String(), fmt.Sprint(s.Addr.Port())
	var services []string
	for _, p := range s.Services {
		services = append(services, p.String())
	}
	return []string{
		"--bind-address", host, "--secure-port", port, "--advertise-address", host, "--etcd-servers", s.Etcd,
		"--cert-dir", s.Dir, "--tls-cert-file", s.file("server.crt"), "--tls-private-key-file", s.file("server.key"),
		"--token-auth-file", s.file("tokens.csv"), "--authorization-mode", "RBAC",
		"--service-account-issuer", "https://kubernetes.test", "--service-account-key-file", s.file("server.crt"),
		"--service-account-signing-key-file", s.file("server.key"), "--service-cluster-ip-range", strings.Join(services, ","),
		// Pods are made here before any controller has made their service account.
		"--disable-admission-plugins", "ServiceAccount", "--endpoint-reconciler-type", "none",
	}
}

// Kubeconfig is the file of a client that is to reach a server at addr, host:port, by a token.
func Kubeconfig(addr string, authority []byte, token string) []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: weft
contexts: [{name: weft, context: {cluster: weft, user: weft}}]
clusters: [{name: weft, cluster: {server: "https://%s", certificate-authority-data: %q}}]
users: [{name: weft, user: {token: %q}}]
`, addr, base64.StdEncoding.EncodeToString(authority), token)
}

// Client asks a server. It is safe for concurrent use.
type Client struct {
	Addr  string // host:port
	Token string
	HTTP  *http.Client // trusts the server's certificate
}

// Call is one request.
type Call struct {
	Method, Path, Body string
	Token              string // "": the client's
	ContentType        string // "": JSON; of a PATCH: a merge patch
}

// Apply makes the object at path what a manifest in YAML says, as `kubectl apply --server-side` does; fields that the server
// does not know are errors.
func Apply(path, manifest, manager string) Call {
	return Call{
		Method: http.MethodPatch, Path: path + "?fieldManager=" + manager + "&force=true&fieldValidation=Strict",
		Body: manifest, ContentType: "application/apply-patch+yaml",
	}
}

// Do makes a request and returns the body of the answer. An answer other than 2xx is an error that has it.
func (c *Client) Do(ctx context.Context, call Call) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, call.Method, "https://"+c.Addr+call.Path, strings.NewReader(call.Body))
	if err != nil {
		return nil, err
	}
	if call.ContentType == "" {
		call.ContentType = "application/json"
		if call.Method == http.MethodPatch {
			call.ContentType = "application/merge-patch+json"
		}
	}
	if call.Token == "" {
		call.Token = c.Token
	}
	request.Header.Set("Content-Type", call.ContentType)
	request.Header.Set("Authorization", "Bearer "+call.Token)
	response, err := c.HTTP.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", call.Method, call.Path, response.Status, answer)
	}
	return answer, err
}
