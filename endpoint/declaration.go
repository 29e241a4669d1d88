// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/yamldir"
	"github.com/weftmesh/weft/ipcache"
)

// declaration is one endpoint as a file declares it, complete and checked by itself: what other entries and files say
// is not considered yet.
type declaration struct {
	file string
	line int

	namespace, name, serviceAccount string
	id                              uint32 // 0: not given
	ips                             []netip.Addr
	identity                        identity.ID
	given                           map[string]string // labels, as declared
	labels                          identity.Labels   // as other clusters see them
	ports                           []ipcache.NamedPort
}

func (d *declaration) String() string { return d.namespace + "/" + d.name }

// entry is the YAML of one endpoint.
type entry struct {
	Name           string            `yaml:"name"`
	Namespace      string            `yaml:"namespace"`
	ServiceAccount string            `yaml:"serviceAccount"`
	ID             uint16            `yaml:"id"`
	IP             string            `yaml:"ip"`
	IPs            []string          `yaml:"ips"`
	Identity       string            `yaml:"identity"`
	Labels         map[string]string `yaml:"labels"`
	Ports          []port            `yaml:"ports"`
}

type port struct {
	Name     string `yaml:"name"`
	Port     uint16 `yaml:"port"`
	Protocol string `yaml:"protocol"`
}

// Fields of an entry and of one of its ports. Others are errors: a misspelt field must not be silently without effect.
var (
	entryFields = []string{"name", "namespace", "serviceAccount", "id", "ip", "ips", "identity", "labels", "ports"}
	portFields  = []string{"name", "port", "protocol"}
)

// defaultName is the namespace and the service account of workloads that name none, as in Kubernetes.
const defaultName = "default"

// cluster is what the checks of a declaration need to know of the cluster that it is made in.
type cluster struct {
	name   string
	id     identity.ClusterID
	layout identity.Layout
}

// parse reads a file.
func (c cluster) parse(file string, content []byte) ([]declaration, []SourceError, error) {
	return yamldir.Parse(file, content, func(node *yaml.Node) (declaration, error) {
		d, err := c.declare(node)
		d.file, d.line = file, node.Line
		return d, err
	})
}

// declare reads and checks one entry.
func (c cluster) declare(node *yaml.Node) (declaration, error) {
	if err := checkFields(node, entryFields, "an endpoint"); err != nil {
		return declaration{}, err
	}
	var e entry
	if err := node.Decode(&e); err != nil {
		return declaration{}, err
	}
	d := declaration{
		namespace: cmp.Or(e.Namespace, defaultName), name: e.Name, id: uint32(e.ID), given: e.Labels,
		serviceAccount: cmp.Or(e.ServiceAccount, defaultName),
	}
	for field, name := range map[string]string{"name": d.name, "namespace": d.namespace, "serviceAccount": d.serviceAccount} {
		if err := checkName(field, name); err != nil {
			return declaration{}, err
		}
	}
	var err error
	if d.ips, err = e.addresses(); err != nil {
		return declaration{}, fmt.Errorf("endpoint %s: %w", &d, err)
	}
	if d.identity, err = c.checkIdentity(e.Identity); err != nil {
		return declaration{}, fmt.Errorf("endpoint %s: %w", &d, err)
	}
	if d.labels, err = c.labels(&d, e.Labels); err != nil {
		return declaration{}, fmt.Errorf("endpoint %s: %w", &d, err)
	}
	if d.ports, err = e.namedPorts(); err != nil {
		return declaration{}, fmt.Errorf("endpoint %s: %w", &d, err)
	}
	return d, nil
}

// checkFields refuses what a struct would swallow: fields that are not known, in the entry and in its ports.
func checkFields(node *yaml.Node, known []string, what string) error {
	if node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	if node.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: %s is a mapping with the fields %s", node.Line, what, strings.Join(known, ", "))
	}
	for i := 0; i < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if !slices.Contains(known, key.Value) {
			return fmt.Errorf("line %d: unknown field %q: %s has the fields %s", key.Line, key.Value, what, strings.Join(known, ", "))
		}
		if key.Value == "ports" && value.Kind == yaml.SequenceNode {
			for _, p := range value.Content {
				if err := checkFields(p, portFields, "a port"); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// checkName holds names to what can stand in an etcd key, a label and a terminal.
func checkName(field, name string) error {
	if name == "" {
		return fmt.Errorf("field %q is missing", field)
	}
	if len(name) > 253 || strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_.", r)
	}) {
		return fmt.Errorf("%s %q: want at most 253 letters, digits, '-', '_' and '.'", field, name)
	}
	return nil
}

func (e entry) addresses() ([]netip.Addr, error) {
	texts := e.IPs
	switch {
	case e.IP != "" && len(e.IPs) > 0:
		return nil, errors.New("give either ip or ips")
	case e.IP != "":
		texts = []string{e.IP}
	case len(e.IPs) == 0:
		return nil, errors.New("field \"ip\" or \"ips\" is missing")
	}
	var addrs []netip.Addr
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("ip %q is not an IP address", text)
		}
		addr = addr.Unmap()
		switch {
		case addr.Zone() != "" || !addr.IsGlobalUnicast():
			return nil, fmt.Errorf("ip %s cannot be a workload's: want a global unicast address", addr)
		case slices.Contains(addrs, addr):
			return nil, fmt.Errorf("ip %s is given twice", addr)
		}
		addrs = append(addrs, addr)
	}
	return addrs, nil
}

func (c cluster) checkIdentity(text string) (identity.ID, error) {
	if text == "" {
		return identity.Invalid, nil // to be allocated
	}
	id, err := identity.ParseID(text)
	if err != nil {
		return identity.Invalid, err
	}
	if !c.layout.Contains(c.id, id) {
		lo, hi := c.layout.Range(c.id)
		return identity.Invalid, fmt.Errorf("identity %s is outside the range %d to %d of cluster %s", text, uint32(lo), uint32(hi), c.name)
	}
	return id, nil
}

// labels completes the labels of a workload with those that say where it runs.
func (c cluster) labels(d *declaration, given map[string]string) (identity.Labels, error) {
	set := []identity.Label{
		{Source: identity.SourceK8s, Key: identity.LabelCluster, Value: c.name},
		{Source: identity.SourceK8s, Key: identity.LabelNamespace, Value: d.namespace},
		{Source: identity.SourceK8s, Key: identity.LabelNamespaceName, Value: d.namespace},
		{Source: identity.SourceK8s, Key: identity.LabelServiceAccount, Value: d.serviceAccount},
	}
	own := len(set)
	for key, value := range given {
		switch {
		case key == "" || len(key) > 317 || !labelText(key) || strings.ContainsAny(key, ":="):
			return nil, fmt.Errorf("label key %q: want 1 to 317 printable ASCII characters without space, ';', ':' and '='", key)
		case len(value) > 253 || !labelText(value):
			return nil, fmt.Errorf("label %s has the value %q: want at most 253 printable ASCII characters without space and ';'", key, value)
		case slices.ContainsFunc(set[:own], func(l identity.Label) bool { return l.Key == key }):
			return nil, fmt.Errorf("label %s is set by weft: leave it out", key)
		}
		set = append(set, identity.Label{Source: identity.SourceK8s, Key: key, Value: value})
	}
	return identity.MakeLabels(set...), nil
}

// labelText reports whether s survives the canonical form of labels, which has no quoting.
func labelText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == ';' })
}

func (e entry) namedPorts() ([]ipcache.NamedPort, error) {
	var ports []ipcache.NamedPort
	for _, p := range e.Ports {
		protocol := strings.ToUpper(cmp.Or(p.Protocol, "TCP"))
		switch {
		case p.Port == 0:
			return nil, fmt.Errorf("port %q: field \"port\" is missing", p.Name)
		case !slices.Contains([]string{"TCP", "UDP", "SCTP"}, protocol):
			return nil, fmt.Errorf("port %q: protocol %q: want TCP, UDP or SCTP", p.Name, p.Protocol)
		case slices.ContainsFunc(ports, func(q ipcache.NamedPort) bool { return q.Name == p.Name }):
			return nil, fmt.Errorf("port name %q is given twice", p.Name)
		}
		if err := checkName("port name", p.Name); err != nil {
			return nil, err
		}
		ports = append(ports, ipcache.NamedPort{Name: p.Name, Port: p.Port, Protocol: protocol})
	}
	slices.SortFunc(ports, func(a, b ipcache.NamedPort) int { return strings.Compare(a.Name, b.Name) })
	return ports, nil
}
