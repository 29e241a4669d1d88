// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/internal/certificate"
	"github.com/weftmesh/weft/internal/kubeapiserver"
)

const (
	kubePort = 6443
	// kubePatience is long: on a busy machine an API server takes a minute.
	kubePatience = 4 * time.Minute
)

// kubernetes reports whether each cluster of the lab has an API server, from which its services come.
func (l *lab) kubernetes() bool { return l.apiserver != "" }

func (l *lab) kubeFile(cluster, name string) string {
	return filepath.Join(l.dir, "kubernetes", cluster, name)
}
func (l *lab) kubeconfig(cluster string) string { return l.kubeFile(cluster, "kubeconfig") }

// findAPIServer returns the program of Kubernetes' API server: the one given, else the one beside weft-lab, else the one that
// `make kube-apiserver` builds, else the one in PATH.
func findAPIServer(given, self string) (string, error) {
	const name = "kube-apiserver"
	if given != "" {
		path, err := exec.LookPath(given)
		if err != nil {
			return "", usage(fmt.Errorf("--kube-apiserver: %w", err))
		}
		return filepath.Abs(path)
	}
	dir := filepath.Dir(self)
	for _, candidate := range []string{filepath.Join(dir, name), filepath.Join(dir, "..", ".cache", name), name} {
		if path, err := exec.LookPath(candidate); err == nil {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("no %s beside %s, in %s nor in PATH: build it with `make kube-apiserver`, or give --kube-apiserver PATH",
		name, self, filepath.Join(filepath.Dir(dir), ".cache"))
}

// kubeServer says how a cluster's API server runs: beside its etcd, which keeps its objects.
func (l *lab) kubeServer(c clusterPlan) kubeapiserver.Server {
	return kubeapiserver.Server{
		Dir: l.kubeFile(c.Name, ""), Addr: c.kubeAddr(), Etcd: c.Etcd.endpoint(),
		Services: []netip.Prefix{netip.PrefixFrom(c.Service4, 24).Masked(), netip.PrefixFrom(c.Service6, 112).Masked()},
	}
}

func (c clusterPlan) kubeAddr() netip.AddrPort {
	return netip.AddrPortFrom(c.Etcd.Address.Addr(), kubePort)
}

// writeKubeFiles writes what a cluster's API server needs, and the kubeconfig of all who use it: its administrator's.
func (l *lab) writeKubeFiles(c clusterPlan) error {
	server, token := l.kubeServer(c), rand.Text()
	if err := os.MkdirAll(server.Dir, 0o700); err != nil {
		return err
	}
	authority, err := certificate.NewAuthority("kubernetes " + c.Name)
	if err != nil {
		return err
	}
	return errors.Join(
		server.WriteFiles(authority, token),
		os.WriteFile(l.kubeFile(c.Name, "ca.crt"), authority.PEM, 0o600),
		os.WriteFile(l.kubeFile(c.Name, "token"), []byte(token), 0o600),
		os.WriteFile(l.kubeconfig(c.Name), kubeapiserver.Kubeconfig(c.kubeAddr().String(), authority.PEM, token), 0o600))
}

func (l *lab) kubeDaemon(c clusterPlan) daemon {
	return daemon{
		name:    "the API server of " + c.Name,
		path:    l.apiserver,
		args:    l.kubeServer(c).Args(),
		marker:  l.kubeFile(c.Name, "tokens.csv"),
		netNS:   c.Etcd.NetNS,
		logFile: l.kubeFile(c.Name, "kube-apiserver.log"),
		pidFile: l.kubeFile(c.Name, "kube-apiserver.pid"),
	}
}

// kubeClient returns a client of a cluster's API server, which asks from inside the server's network namespace.
func (l *lab) kubeClient(c clusterPlan) (*kubeapiserver.Client, error) {
	authority, err := os.ReadFile(l.kubeFile(c.Name, "ca.crt"))
	if err != nil {
		return nil, err
	}
	token, err := os.ReadFile(l.kubeFile(c.Name, "token"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	return &kubeapiserver.Client{Addr: c.kubeAddr().String(), Token: string(token), HTTP: &http.Client{
		Timeout: 30 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				return dialIn(ctx, c.Etcd.NetNS, network, address)
			},
		},
	}}, nil
}

// askKubernetes makes one request to a cluster's API server.
func (l *lab) askKubernetes(ctx context.Context, c clusterPlan, call kubeapiserver.Call) ([]byte, error) {
	client, err := l.kubeClient(c)
	if err != nil {
		return nil, err
	}
	return client.Do(ctx, call)
}

// waitKubernetes waits until a cluster's API server is ready.
func (l *lab) waitKubernetes(ctx context.Context, c clusterPlan) error {
	return waitDaemon(ctx, l.kubeDaemon(c), "is not ready", kubePatience, func(ctx context.Context) error {
		_, err := l.askKubernetes(ctx, c, kubeapiserver.Call{Method: http.MethodGet, Path: "/readyz"})
		return err
	})
}

// Paths and names of the objects of a cluster.
const (
	kubeNamespace = "/api/v1/namespaces/" + namespace
	kubeWeb       = kubeNamespace + "/services/web"
	kubeSlices    = "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices/"
	// declaredLabel marks the namespace when all is in it: what becomes of it then is the user's affair.
	declaredLabel = "weft-lab/declared"
)

// declareObjects makes the namespace, the global service and its slices in a cluster, once in the lab's life.
func (l *lab) declareObjects(ctx context.Context, c clusterPlan) error {
	space := map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}}
	if err := l.apply(ctx, c, kubeNamespace, space); err != nil {
		return err
	}
	answer, err := l.askKubernetes(ctx, c, kubeapiserver.Call{Method: http.MethodGet, Path: kubeNamespace})
	if err != nil {
		return err
	}
	var found struct {
		Metadata struct{ Labels map[string]string }
	}
	if err := json.Unmarshal(answer, &found); err != nil {
		return fmt.Errorf("read namespace %s of %s: %w", namespace, c.Name, err)
	}
	if found.Metadata.Labels[declaredLabel] != "" {
		return nil
	}
	web := c.web()
	if err := l.apply(ctx, c, kubeWeb, web.object()); err != nil {
		return err
	}
	for _, slice := range web.slices() {
		if err := l.apply(ctx, c, kubeSlices+slice.name, slice.object(web.Ports)); err != nil {
			return err
		}
	}
	label := fmt.Sprintf(`{"metadata":{"labels":{%q:"true"}}}`, declaredLabel)
	_, err = l.askKubernetes(ctx, c, kubeapiserver.Call{Method: http.MethodPatch, Path: kubeNamespace, Body: label})
	return err
}

func (l *lab) apply(ctx context.Context, c clusterPlan, path string, object map[string]any) error {
	content, err := json.Marshal(object) // which is YAML, too
	if err != nil {
		return err
	}
	_, err = l.askKubernetes(ctx, c, kubeapiserver.Apply(path, string(content), "weft-lab"))
	return err
}

// object is a service as Kubernetes has it.
func (s serviceFile) object() map[string]any {
	var ports []map[string]any
	for _, p := range s.Ports {
		ports = append(ports, map[string]any{"name": p.Name, "port": p.Port, "targetPort": p.Target, "protocol": p.Protocol})
	}
	return map[string]any{
		"apiVersion": "v1", "kind": "Service",
		"metadata": map[string]any{
			"name": s.Name, "namespace": s.Namespace,
			"annotations": map[string]string{
				"service.cilium.io/global": fmt.Sprint(s.Global), "service.cilium.io/shared": fmt.Sprint(s.Shared),
				"service.cilium.io/affinity": s.Affinity,
			},
		},
		"spec": map[string]any{
			"clusterIP": s.Addresses[0], "clusterIPs": s.Addresses, "ipFamilies": []string{"IPv4", "IPv6"}, "ipFamilyPolicy": "RequireDualStack",
			"ports": ports,
		},
	}
}

// endpointSlice is the backends of one family.
type endpointSlice struct {
	name, service, family string
	addrs                 []netip.Addr
}

// slices are the backends of a service as Kubernetes has them.
func (s serviceFile) slices() []endpointSlice {
	v4, v6 := endpointSlice{s.Name + "-4", s.Name, "IPv4", nil}, endpointSlice{s.Name + "-6", s.Name, "IPv6", nil}
	for _, b := range s.Backends {
		if b.IP.Is4() {
			v4.addrs = append(v4.addrs, b.IP)
		} else {
			v6.addrs = append(v6.addrs, b.IP)
		}
	}
	return []endpointSlice{v4, v6}
}

func (e endpointSlice) object(of []filePort) map[string]any {
	var ports []map[string]any
	for _, p := range of {
		ports = append(ports, map[string]any{"name": p.Name, "port": p.Target, "protocol": p.Protocol})
	}
	return map[string]any{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
		"metadata": map[string]any{
			"name": e.name, "namespace": namespace, "labels": map[string]string{"kubernetes.io/service-name": e.service},
		},
		"addressType": e.family, "ports": ports, "endpoints": e.endpoints(),
	}
}

func (e endpointSlice) endpoints() []map[string]any {
	all := []map[string]any{}
	for _, addr := range e.addrs {
		all = append(all, map[string]any{"addresses": []netip.Addr{addr}, "conditions": map[string]bool{"ready": true}})
	}
	return all
}

func (l *lab) startKubernetes(ctx context.Context) error {
	if !l.kubernetes() {
		return nil
	}
	l.say("Starting an API server of Kubernetes for each cluster (%s)", l.apiserver)
	started := make(map[string]string)
	for _, c := range l.Clusters {
		isNew, err := l.kubeDaemon(c).ensure()
		if err != nil {
			return err
		}
		started[c.Name] = startedWord(isNew)
	}
	for _, c := range l.Clusters {
		since := time.Now()
		if err := l.waitKubernetes(ctx, c); err != nil {
			return err
		}
		if err := l.declareObjects(ctx, c); err != nil {
			return err
		}
		l.done("%s: https://%s has the service %s/web%s%s", c.Name, c.kubeAddr(), namespace, started[c.Name], took(since))
	}
	return nil
}

func newKubernetesCommand(env *environment) *cobra.Command {
	methods := map[string]string{
		"get": http.MethodGet, "create": http.MethodPost, "apply": "", "patch": http.MethodPatch, "delete": http.MethodDelete,
	}
	return &cobra.Command{
		Use:   "kubernetes CLUSTER get|create|apply|patch|delete PATH [BODY]",
		Short: "Ask the API server of a cluster, in a lab with --kubernetes",
		Long: `kubernetes makes one request as the administrator, and prints the answer. BODY is JSON, of patch a merge patch, of apply YAML;
- reads it from standard input. Where kubectl is installed, run it with "weft-lab exec": KUBECONFIG leads it to the node's cluster.`,
		Example: `  weft-lab kubernetes east get /api/v1/namespaces/shop/services/web
  weft-lab kubernetes east patch /api/v1/namespaces/shop/services/web '{"metadata":{"annotations":{"service.cilium.io/affinity":"remote"}}}'`,
		Args: cobra.RangeArgs(3, 4),
		RunE: func(cmd *cobra.Command, args []string) error {
			method, known := methods[args[1]]
			if !known {
				return usage(fmt.Errorf("%q: give get, create, apply, patch or delete", args[1]))
			}
			body := ""
			if len(args) == 4 {
				body = args[3]
			}
			if body == "-" {
				content, err := io.ReadAll(cmd.InOrStdin())
				if err != nil {
					return err
				}
				body = string(content)
			}
			call := kubeapiserver.Call{Method: method, Path: args[2], Body: body}
			if args[1] == "apply" {
				call = kubeapiserver.Apply(args[2], body, "weft-lab")
			}
			return env.runKubernetes(cmd.Context(), args[0], call)
		},
	}
}

func (env *environment) runKubernetes(ctx context.Context, cluster string, call kubeapiserver.Call) error {
	l, err := env.lab()
	if err != nil {
		return err
	}
	c, err := l.cluster(cluster)
	if err != nil {
		return err
	}
	if !l.kubernetes() {
		return errors.New("this lab has no Kubernetes: build one with `weft-lab up --kubernetes`")
	}
	answer, err := l.askKubernetes(ctx, c, call)
	if err != nil {
		return fmt.Errorf("%s: %w", cluster, err)
	}
	fmt.Fprintln(env.stdout, strings.TrimSpace(string(answer)))
	return nil
}
