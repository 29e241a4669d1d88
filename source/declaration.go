// SPDX-License-Identifier: Apache-2.0

package source

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/service"
)

// declaration is the YAML of one service. Unknown fields are errors: a misspelt one must not be silently without effect.
type declaration struct {
	Name        string            `yaml:"name"`
	Namespace   string            `yaml:"namespace"`
	Addresses   []string          `yaml:"addresses"`
	Ports       []declaredPort    `yaml:"ports"`
	Backends    []declaredBackend `yaml:"backends"`
	Global      bool              `yaml:"global"`
	Shared      *bool             `yaml:"shared"`
	Affinity    string            `yaml:"affinity"`
	Algorithm   string            `yaml:"algorithm"`
	StickyFor   time.Duration     `yaml:"clientAffinity"`
	Labels      map[string]string `yaml:"labels"`
	Selector    map[string]string `yaml:"selector"`
	Annotations map[string]string `yaml:"annotations"`
}

type declaredPort struct {
	Name     string `yaml:"name"`
	Port     uint16 `yaml:"port"`
	Target   uint16 `yaml:"target"`
	Protocol string `yaml:"protocol"`
}

type declaredBackend struct {
	IP       string            `yaml:"ip"`
	Ports    map[string]uint16 `yaml:"ports"` // by name, where they are not the targets
	Draining bool              `yaml:"draining"`
	Hostname string            `yaml:"hostname"`
	Zone     string            `yaml:"zone"`
	Node     string            `yaml:"node"`
}

// longestAffinity is the most that Kubernetes allows.
const longestAffinity = 24 * time.Hour

// declare reads and checks one service.
func declare(node *yaml.Node) (Service, error) {
	var d declaration
	if err := decodeStrictly(node, &d); err != nil {
		return Service{}, err
	}
	s := Service{
		Name: service.Name{Namespace: cmp.Or(d.Namespace, "default"), Name: d.Name}, Labels: d.Labels, Selector: d.Selector, Affinity: d.StickyFor,
	}
	for field, name := range map[string]string{"name": s.Name.Name, "namespace": s.Namespace} {
		if err := checkName(field, name); err != nil {
			return Service{}, err
		}
	}
	targets, err := d.check(&s)
	if err != nil {
		return Service{}, fmt.Errorf("service %s: %w", s.Name, err)
	}
	for i := range d.Backends {
		b, err := d.Backends[i].make(targets)
		if err == nil && slices.ContainsFunc(s.Backends, func(other Backend) bool { return other.Addr == b.Addr }) {
			err = fmt.Errorf("backend %s is given twice", b.Addr)
		}
		if err != nil {
			return Service{}, fmt.Errorf("service %s: %w", s.Name, err)
		}
		s.Backends = append(s.Backends, b)
	}
	slices.SortFunc(s.Backends, func(a, b Backend) int { return a.Addr.Compare(b.Addr) })
	return s, nil
}

// decodeStrictly is what Decode is for a whole document: unknown fields are errors.
func decodeStrictly(node *yaml.Node, to any) error {
	text, err := yaml.Marshal(node)
	if err != nil {
		return err
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	err = decoder.Decode(to)
	var typed *yaml.TypeError
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("an empty entry is no service")
	case errors.As(err, &typed):
		for i, e := range typed.Errors { // lines are counted from the entry's first one here
			var line int
			if _, rest, ok := strings.Cut(e, ": "); ok {
				if _, err := fmt.Sscanf(e, "line %d:", &line); err == nil {
					typed.Errors[i] = "line " + strconv.Itoa(node.Line+line-1) + ": " + strings.ReplaceAll(rest, "type source.", "")
				}
			}
		}
		return typed
	}
	return err
}

// check completes s but for its backends, and returns at which ports these are reached.
func (d *declaration) check(s *Service) (targets []Port, err error) {
	for _, text := range d.Addresses {
		addr, err := checkAddr("address", text)
		if err == nil && slices.Contains(s.Addresses, addr) {
			err = fmt.Errorf("address %s is given twice", addr)
		}
		if err != nil {
			return nil, err
		}
		s.Addresses = append(s.Addresses, addr)
	}
	if len(d.Ports) == 0 {
		return nil, errors.New(`field "ports" is missing`)
	}
	for _, p := range d.Ports {
		protocol, err := service.ParseProtocol(cmp.Or(p.Protocol, "TCP"))
		switch {
		case err != nil:
			return nil, fmt.Errorf("port %q: %w", p.Name, err)
		case p.Port == 0:
			return nil, fmt.Errorf("port %q: field \"port\" is missing", p.Name)
		case slices.ContainsFunc(s.Ports, func(q Port) bool { return q.Name == p.Name }):
			return nil, fmt.Errorf("port name %q is given twice", p.Name)
		case slices.ContainsFunc(s.Ports, func(q Port) bool { return q.Port == p.Port && q.Protocol == protocol }):
			return nil, fmt.Errorf("port %d/%s is given twice", p.Port, protocol)
		}
		s.Ports = append(s.Ports, Port{p.Name, protocol, p.Port})
		targets = append(targets, Port{p.Name, protocol, cmp.Or(p.Target, p.Port)})
	}
	s.Ports = sortedPorts(s.Ports)
	if s.Affinity < 0 || s.Affinity > longestAffinity || s.Affinity%time.Second != 0 {
		return nil, fmt.Errorf("clientAffinity %s: want whole seconds, at most %s", s.Affinity, longestAffinity)
	}
	if _, err := service.ParseAffinity(cmp.Or(d.Affinity, "none")); err != nil {
		return nil, err
	}
	s.Annotations = d.annotations()
	_, err = service.ParseSettings(s.Annotations)
	return targets, err
}

// annotations are those given, and those that the fields stand for.
func (d *declaration) annotations() map[string]string {
	all := make(map[string]string)
	for key, value := range d.Annotations {
		all[key] = value
	}
	set := func(key, value string) {
		if value != "" {
			all[key] = value
		}
	}
	if d.Global {
		set("service.cilium.io/global", "true")
	}
	if d.Shared != nil {
		set("service.cilium.io/shared", strconv.FormatBool(*d.Shared))
	}
	set("service.cilium.io/affinity", d.Affinity)
	set("service.cilium.io/lb-algorithm", d.Algorithm)
	return all
}

// make makes a backend that is reached at targets, where it does not say something else.
func (d *declaredBackend) make(targets []Port) (b Backend, err error) {
	b = Backend{Ready: !d.Draining, Serving: true, Terminating: d.Draining, Hostname: d.Hostname, Zone: d.Zone, Node: d.Node}
	if b.Addr, err = checkAddr("backend", d.IP); err != nil {
		return b, err
	}
	b.Ports = slices.Clone(targets)
	for name, number := range d.Ports {
		i := slices.IndexFunc(b.Ports, func(p Port) bool { return p.Name == name })
		if i < 0 || number == 0 {
			return b, fmt.Errorf("backend %s: port %q: the service has no port of this name, or the number is 0", b.Addr, name)
		}
		b.Ports[i].Port = number
	}
	b.Ports = sortedPorts(b.Ports)
	return b, nil
}

func checkAddr(what, text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil || addr.Zone() != "" || addr.IsUnspecified() || addr.IsMulticast() || addr.IsLinkLocalUnicast() {
		return netip.Addr{}, fmt.Errorf("%s %q: want an IP address that packets can be sent to from anywhere", what, text)
	}
	return addr.Unmap(), nil
}

// checkName holds names to what can stand in an etcd key and a terminal.
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
