// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// ErrPartial indicates a value of which something cannot be used, and the rest can.
var ErrPartial = errors.New("not all of it is used")

// wireOffer is a [Service] without what is of no use to an offer.
type wireOffer struct {
	Cluster         string                                `json:"cluster"`
	Namespace       string                                `json:"namespace"`
	Name            string                                `json:"name"`
	Frontends       map[netip.Addr]map[string]wireOffered `json:"frontends"`
	Backends        map[netip.Addr]map[string]wireOffered `json:"backends"`
	IncludeExternal bool                                  `json:"includeExternal"`
	Shared          bool                                  `json:"shared"`
	ClusterID       uint32                                `json:"clusterID"`
}

type wireOffered struct {
	Protocol string
	Port     uint16
}

// ParseOffer decodes what a cluster publishes under [StatePrefix]. Every key of frontends and backends must be an address,
// without a zone or a prefix length. An error that wraps [ErrPartial] says what of the offer is left out.
func ParseOffer(value []byte) (Offer, error) {
	o, ok := scanOffer(value)
	if ok {
		return o, nil
	}
	o, strange, err := decodeOffer(value)
	switch {
	case err != nil:
		return Offer{}, fmt.Errorf("service: %w", err)
	case strange > 0:
		return o, fmt.Errorf("service: %w: %d ports are of a protocol other than TCP, UDP and SCTP, or have no number", ErrPartial, strange)
	}
	return o, nil
}

// decodeOffer decodes any JSON. strange counts ports that cannot be used.
func decodeOffer(value []byte) (o Offer, strange int, err error) {
	var w wireOffer
	if err := json.Unmarshal(value, &w); err != nil {
		return Offer{}, 0, err
	}
	o = Offer{
		Service: Name{w.Namespace, w.Name}, Cluster: w.Cluster, ClusterID: w.ClusterID, Shared: w.Shared, IncludeExternal: w.IncludeExternal,
	}
	for _, side := range []struct {
		from map[netip.Addr]map[string]wireOffered
		to   *[]Subset
	}{{w.Frontends, &o.Frontends}, {w.Backends, &o.Backends}} {
		odd, err := gather(side.from, side.to)
		if err != nil {
			return Offer{}, 0, err
		}
		strange += odd
	}
	return o, strange, nil
}

// gather turns ports by address into addresses by ports.
func gather(from map[netip.Addr]map[string]wireOffered, to *[]Subset) (strange int, err error) {
	alike := make(map[string]int)
	for _, addr := range slices.SortedFunc(maps.Keys(from), netip.Addr.Compare) {
		if !addr.IsValid() || addr.Zone() != "" {
			return 0, fmt.Errorf("invalid IP address: %q", addr)
		}
		ports := make([]NamedPort, 0, len(from[addr]))
		for name, p := range from[addr] {
			protocol, err := ParseProtocol(p.Protocol)
			if err != nil || p.Port == 0 {
				strange++
				continue
			}
			ports = append(ports, NamedPort{name, protocol, p.Port})
		}
		sortPorts(&ports)
		text := textOf(ports)
		i, ok := alike[text]
		if !ok {
			i = len(*to)
			alike[text] = i
			*to = append(*to, Subset{Ports: ports})
		}
		(*to)[i].Addrs = append((*to)[i].Addrs, addr.Unmap())
	}
	*to = normalize(*to)
	sortSubsets(*to)
	return strange, nil
}

// textOf tells sets of ports apart.
func textOf(ports []NamedPort) string {
	var text []byte
	for _, p := range ports {
		text = strconv.AppendQuote(text, p.Name)
		text = append(text, byte(p.Protocol), byte(p.Port>>8), byte(p.Port))
	}
	return string(text)
}

// sortSubsets orders subsets by their first address, so that one form of an offer is enough.
func sortSubsets(subsets []Subset) {
	slices.SortFunc(subsets, func(a, b Subset) int {
		return cmp.Or(a.Addrs[0].Compare(b.Addrs[0]), slices.CompareFunc(a.Ports, b.Ports, comparePorts))
	})
}

// Validate checks that the offer is what cluster, known by clusterID, may publish under key ("namespace/name").
func (o *Offer) Validate(key, cluster string, clusterID uint32) error {
	switch {
	case o.Cluster != cluster:
		return fmt.Errorf("unexpected cluster name: got %q, expected %q", o.Cluster, cluster)
	case !strings.HasPrefix(key, o.Service.Namespace) || key[len(o.Service.Namespace):] != "/"+o.nameInKey():
		return fmt.Errorf("namespaced name does not match key: got %q, expected %q", o.Service.Namespace+"/"+o.nameInKey(), key)
	case o.ClusterID != clusterID:
		return fmt.Errorf("unexpected cluster ID: got %d, expected %d", o.ClusterID, clusterID)
	}
	return nil
}

// nameInKey is the last part of the key under which the offer is published.
func (o *Offer) nameInKey() string {
	if o.Slice != "" {
		return o.Slice
	}
	return o.Service.Name
}
