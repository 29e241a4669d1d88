// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/identity"
)

// Limits say what remote clusters may claim and how much. docs/limits.md tells the meaning of each, for operators.
type Limits struct {
	// OwnPrefixes are ours beside those that are known to be: no remote may claim anything in them.
	OwnPrefixes []netip.Prefix
	// Default is for every cluster that has no limits of its own in Clusters.
	Default  ClusterLimits
	Clusters map[string]ClusterLimits
}

// ClusterLimits say what one remote cluster may claim.
type ClusterLimits struct {
	// PodPrefixes and NodePrefixes are where the addresses of its workloads and of its nodes must lie; empty: anywhere. What
	// stands there in the limits of a named cluster is set aside for it: others may not claim anything in it.
	PodPrefixes, NodePrefixes []netip.Prefix
	aside                     []netip.Prefix // of these, those set aside
	// DeniedPrefixes are where none of its addresses may lie.
	DeniedPrefixes []netip.Prefix
	// ShortestIPv4 and ShortestIPv6 are the least lengths of a prefix.
	ShortestIPv4, ShortestIPv6 int
	// ReservedIdentities are those that its addresses may have beside the cluster's own identities.
	ReservedIdentities []identity.ID
	// AnyHost: an address may be announced behind any host. Otherwise that must be a node of the cluster.
	AnyHost bool
	// Overlaps: the cluster may claim what the nodes of another remote cluster say is theirs.
	Overlaps bool

	// Quotas; 0: none.
	MaxEntries         int   // claims in the ipcache
	MaxBytes           int64 // of keys and values of nodes, services and identities
	MaxEventsPerSecond int
	// BurstEvents is how many events may come at once before MaxEventsPerSecond counts.
	BurstEvents int
}

// The quotas of a cluster that the limits do not name. That of entries depends on the size of the kernel's map.
const (
	defaultMaxBytes  = 64 << 20
	defaultMaxEvents = 20_000
	defaultBurst     = 200_000
)

// DefaultLimits are the limits where no file says otherwise. Half of a map of mapEntries is the most that one cluster gets,
// so that our own and the others find room whatever it does; 0: as much as it likes.
func DefaultLimits(mapEntries int) Limits {
	return Limits{Default: ClusterLimits{
		ShortestIPv4: 16, ShortestIPv6: 48,
		ReservedIdentities: []identity.ID{
			identity.RemoteNode, identity.Health, identity.Ingress, identity.World, identity.WorldIPv4, identity.WorldIPv6,
		},
		MaxEntries: (mapEntries + 1) / 2, MaxBytes: defaultMaxBytes, MaxEventsPerSecond: defaultMaxEvents, BurstEvents: defaultBurst,
	}}
}

// of returns the limits of one cluster.
func (l *Limits) of(cluster string) ClusterLimits {
	if own, ok := l.Clusters[cluster]; ok {
		return own
	}
	return l.Default
}

// setAside returns the prefixes that are set aside for other clusters than the one named.
func (l *Limits) setAside(cluster string) []netip.Prefix {
	var aside []netip.Prefix
	for name, c := range l.Clusters {
		if name != cluster {
			aside = append(aside, c.aside...)
		}
	}
	return aside
}

// limitsFile is the form of a file of limits. What it leaves out is as in the defaults.
type limitsFile struct {
	OwnPrefixes prefixList                    `yaml:"own-prefixes"`
	Default     clusterLimitsFile             `yaml:"default"`
	Clusters    map[string]*clusterLimitsFile `yaml:"clusters"`
}

type clusterLimitsFile struct {
	PodPrefixes        *prefixList   `yaml:"pod-prefixes"`
	NodePrefixes       *prefixList   `yaml:"node-prefixes"`
	DeniedPrefixes     *prefixList   `yaml:"denied-prefixes"`
	ShortestIPv4       *bounded      `yaml:"shortest-ipv4-prefix"`
	ShortestIPv6       *bounded      `yaml:"shortest-ipv6-prefix"`
	ReservedIdentities *identityList `yaml:"reserved-identities"`
	HostIP             *choice       `yaml:"host-ip"`
	Overlaps           *choice       `yaml:"overlaps"`
	MaxEntries         *bounded      `yaml:"max-entries"`
	MaxBytes           *bounded      `yaml:"max-bytes"`
	MaxEventsPerSecond *bounded      `yaml:"max-events-per-second"`
	BurstEvents        *bounded      `yaml:"burst-events"`
}

// ParseLimits reads a file of limits. Errors name the line. An empty file is one: a full disk leaves such, and it must not pass
// for the wish to have no limits but the defaults.
func ParseLimits(content []byte, defaults Limits) (Limits, error) {
	if len(bytes.TrimSpace(content)) == 0 {
		return Limits{}, errors.New("the file is empty; write {} if the limits that are built in are meant")
	}
	var f limitsFile
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	decoder.KnownFields(true)
	switch err := decoder.Decode(&f); {
	case errors.Is(err, io.EOF):
		return defaults, nil
	case err != nil:
		return Limits{}, plainYAMLError(err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Limits{}, errors.New("want one YAML document")
	}
	l := Limits{OwnPrefixes: f.OwnPrefixes, Clusters: make(map[string]ClusterLimits)}
	var err error
	if l.Default, err = f.Default.over(defaults.Default); err != nil {
		return Limits{}, fmt.Errorf("default: %w", err)
	}
	l.Default.aside = nil // what is everybody's is nobody's own
	for name, c := range f.Clusters {
		if err := identity.ValidateClusterName(name); err != nil {
			return Limits{}, fmt.Errorf("clusters: %w", err)
		}
		if c == nil {
			c = new(clusterLimitsFile)
		}
		if l.Clusters[name], err = c.over(l.Default); err != nil {
			return Limits{}, fmt.Errorf("clusters: %s: %w", name, err)
		}
	}
	return l, nil
}

// goTypes is what the YAML package says of our own types, which is nothing to an operator.
var goTypes = regexp.MustCompile(` in type [\w.]+| into [\w.]+`)

func plainYAMLError(err error) error {
	var typed *yaml.TypeError
	if errors.As(err, &typed) {
		return errors.New(goTypes.ReplaceAllString(strings.Join(typed.Errors, "; "), ""))
	}
	return errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
}

// over returns the limits below with those of f in their place.
func (f *clusterLimitsFile) over(below ClusterLimits) (ClusterLimits, error) {
	l := below
	l.aside = nil
	for _, p := range []struct {
		from *prefixList
		to   *[]netip.Prefix
	}{{f.PodPrefixes, &l.PodPrefixes}, {f.NodePrefixes, &l.NodePrefixes}, {f.DeniedPrefixes, &l.DeniedPrefixes}} {
		if p.from != nil {
			*p.to = *p.from
		}
	}
	if f.PodPrefixes != nil {
		l.aside = append(l.aside, l.PodPrefixes...)
	}
	if f.NodePrefixes != nil {
		l.aside = append(l.aside, l.NodePrefixes...)
	}
	if f.ReservedIdentities != nil {
		l.ReservedIdentities = *f.ReservedIdentities
	}
	for _, n := range []struct {
		name string
		from *bounded
		to   *int
		max  int64
	}{
		{"shortest-ipv4-prefix", f.ShortestIPv4, &l.ShortestIPv4, 32}, {"shortest-ipv6-prefix", f.ShortestIPv6, &l.ShortestIPv6, 128},
		{"max-entries", f.MaxEntries, &l.MaxEntries, 1 << 31}, {"max-events-per-second", f.MaxEventsPerSecond, &l.MaxEventsPerSecond, 1 << 31},
		{"burst-events", f.BurstEvents, &l.BurstEvents, 1 << 31},
	} {
		if n.from == nil {
			continue
		}
		if err := n.from.check(n.name, n.max); err != nil {
			return l, err
		}
		*n.to = int(n.from.value)
	}
	if f.MaxBytes != nil {
		if err := f.MaxBytes.check("max-bytes", 1<<50); err != nil {
			return l, err
		}
		l.MaxBytes = f.MaxBytes.value
	}
	var err error
	if l.AnyHost, err = f.HostIP.is(below.AnyHost, "host-ip", "nodes", "any"); err != nil {
		return l, err
	}
	l.Overlaps, err = f.Overlaps.is(below.Overlaps, "overlaps", "refuse", "allow")
	return l, err
}

// prefixList is a list of masked prefixes; a plain address stands for its prefix of full length.
type prefixList []netip.Prefix

func (l *prefixList) UnmarshalYAML(n *yaml.Node) error {
	texts, err := plainList(n)
	if err != nil {
		return err
	}
	*l = prefixList{}
	for _, text := range texts {
		p, err := netip.ParsePrefix(text.Value)
		if addr, asAddr := netip.ParseAddr(text.Value); asAddr == nil && addr.Zone() == "" {
			p, err = single(addr), nil
		}
		switch {
		case err != nil || p.Addr().Zone() != "" || p.Addr().Is4In6():
			return fmt.Errorf("line %d: %q is not a prefix such as 10.1.0.0/16", text.Line, text.Value)
		case p != p.Masked():
			return fmt.Errorf("line %d: %s has bits beyond its length: did you mean %s?", text.Line, p, p.Masked())
		}
		*l = append(*l, p)
	}
	return nil
}

// identityList is a list of reserved identities, by name or number.
type identityList []identity.ID

func (l *identityList) UnmarshalYAML(n *yaml.Node) error {
	texts, err := plainList(n)
	if err != nil {
		return err
	}
	*l = identityList{}
	for _, text := range texts {
		id, err := identity.ParseID(text.Value)
		if err != nil || !id.Reserved() || id == identity.Invalid || id == identity.Host {
			return fmt.Errorf("line %d: %q: want the name or the number, 2 to 255, of a reserved identity", text.Line, text.Value)
		}
		if !slices.Contains(*l, id) {
			*l = append(*l, id)
		}
	}
	return nil
}

func plainList(n *yaml.Node) ([]*yaml.Node, error) {
	if n.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("line %d: want a list", n.Line)
	}
	for _, element := range n.Content {
		if element.Kind != yaml.ScalarNode {
			return nil, fmt.Errorf("line %d: want a plain value", element.Line)
		}
	}
	return n.Content, nil
}

// bounded is a number that is not negative, with the line where it stands.
type bounded struct {
	value int64
	line  int
}

func (b *bounded) UnmarshalYAML(n *yaml.Node) error {
	b.line = n.Line
	if n.Tag != "!!int" || n.Decode(&b.value) != nil || b.value < 0 {
		return fmt.Errorf("line %d: %q: want a whole number, not negative", n.Line, n.Value)
	}
	return nil
}

func (b *bounded) check(name string, greatest int64) error {
	if b.value > greatest {
		return fmt.Errorf("line %d: %s: want at most %d", b.line, name, greatest)
	}
	return nil
}

// choice is one of two words, with the line where it stands.
type choice struct {
	word string
	line int
}

func (c *choice) UnmarshalYAML(n *yaml.Node) error {
	c.word, c.line = n.Value, n.Line
	return nil
}

// is reports whether the choice is yes rather than no, and what it was below if there is none.
func (c *choice) is(below bool, name, no, yes string) (bool, error) {
	if c == nil {
		return below, nil
	}
	if c.word != no && c.word != yes {
		return false, fmt.Errorf("line %d: %s: %q: want %s or %s", c.line, name, c.word, no, yes)
	}
	return c.word == yes, nil
}
