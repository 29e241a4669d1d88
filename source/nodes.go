// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/weftmesh/weft/internal/kube"
	"github.com/weftmesh/weft/internal/yamldir"
	"github.com/weftmesh/weft/node"
)

// NodeSource is where nodes of the own cluster come from that do not speak for themselves. The cluster's name and number are
// not in them.
type NodeSource interface {
	String() string
	// Run follows the source until ctx ends.
	Run(ctx context.Context) error
	// Ready is closed once all nodes have been read.
	Ready() <-chan struct{}
	// Nodes is the table of all.
	Nodes() *node.Table
	// Problems returns what keeps nodes from being read at present, in words.
	Problems() []string
}

// problems are what is wrong, by what it is wrong with. All methods may be called concurrently.
type problems struct {
	mu   sync.Mutex
	with map[string]string // guarded by mu
}

func (p *problems) set(what, message string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.with == nil {
		p.with = make(map[string]string)
	}
	if delete(p.with, what); message != "" {
		p.with[what] = message
	}
}

func (p *problems) replace(texts []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.with = make(map[string]string, len(texts))
	for _, text := range texts {
		p.with[text] = text
	}
}

// Problems returns what is wrong, in words.
func (p *problems) Problems() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []string
	for _, text := range p.with {
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}

// KubernetesNodes is the source of nodes that are Nodes of Kubernetes. While the API server is away, what was known stays.
type KubernetesNodes struct {
	client   *rest.RESTClient
	follower *kube.Follower
	nodes    *node.Table
	refused  problems // what of a node cannot be used, by its name
	ready    chan struct{}
}

var _ NodeSource = (*KubernetesNodes)(nil)

// NewKubernetesNodes assembles a source. The API server need not be there; the error says that it is not known where it is.
func NewKubernetesNodes(cfg KubernetesConfig) (*KubernetesNodes, error) {
	if cfg.Log == nil || cfg.Agent == "" {
		return nil, errors.New("source: a Kubernetes source needs Agent and Log")
	}
	access, err := kube.Access(cfg.Kubeconfig, cfg.Agent)
	if err != nil {
		return nil, err
	}
	client, err := kube.Client(access, corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &KubernetesNodes{
		client: client, nodes: node.NewTable(), ready: make(chan struct{}),
		follower: kube.NewFollower(kube.Config{Needs: "the account needs the verbs list and watch on nodes", Longest: cfg.Longest, Log: cfg.Log}),
	}, nil
}

func (k *KubernetesNodes) String() string { return "kubernetes nodes" }

// Ready is closed once the nodes have been listed.
func (k *KubernetesNodes) Ready() <-chan struct{} { return k.ready }

// Nodes is the table of all.
func (k *KubernetesNodes) Nodes() *node.Table { return k.nodes }

// Problems returns what keeps the API server or some nodes from being followed.
func (k *KubernetesNodes) Problems() []string {
	return append(k.follower.Problems(), k.refused.Problems()...)
}

// Run follows the API server until ctx ends.
func (k *KubernetesNodes) Run(ctx context.Context) error {
	store := kube.NewReplica(k.put, k.remove, k.replace)
	k.follower.Follow(ctx, kube.Kind{Client: k.client, Name: "nodes", Object: new(corev1.Node), Store: store})
	defer k.follower.Wait()
	if k.follower.Listed(ctx) {
		close(k.ready)
	}
	<-ctx.Done()
	return nil
}

func (k *KubernetesNodes) put(from *corev1.Node) {
	n, err := makeNode(from)
	message := ""
	if err != nil {
		message = fmt.Sprintf("kubernetes: node %s: %s", from.Name, kube.Shorten(err.Error()))
	}
	k.refused.set(from.Name, message)
	k.nodes.Upsert(n)
}

func (k *KubernetesNodes) remove(n *corev1.Node) {
	k.refused.set(n.Name, "")
	k.nodes.Delete("", n.Name)
}

func (k *KubernetesNodes) replace(all []*corev1.Node) {
	there := make(map[string]bool, len(all))
	for _, n := range all {
		there[n.Name] = true
		k.put(n)
	}
	keepNodes(k.nodes, there)
}

func keepNodes(table *node.Table, there map[string]bool) {
	known, _ := table.Snapshot()
	for _, n := range known {
		if !there[n.Name] {
			table.Delete("", n.Name)
		}
	}
}

// makeNode takes what it can of a Node. The error says what it could not.
func makeNode(from *corev1.Node) (node.Node, error) {
	n := node.Node{Name: from.Name, Labels: from.Labels, BootID: from.Status.NodeInfo.BootID}
	var errs []error
	for _, a := range from.Status.Addresses {
		if a.Type != corev1.NodeInternalIP && a.Type != corev1.NodeExternalIP {
			continue // names
		}
		addr, err := parseAddr(a.Address)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		n.Addresses = append(n.Addresses, node.Address{Type: string(a.Type), IP: addr})
	}
	cidrs := from.Spec.PodCIDRs
	if len(cidrs) == 0 && from.Spec.PodCIDR != "" {
		cidrs = []string{from.Spec.PodCIDR}
	}
	errs = append(errs, setPodCIDRs(&n, cidrs))
	return n, errors.Join(errs...)
}

// setPodCIDRs gives a node its prefixes, of each family the first as the primary one.
func setPodCIDRs(n *node.Node, texts []string) error {
	var errs []error
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.Addr().Is4In6() {
			errs = append(errs, fmt.Errorf("%q is not a prefix such as 10.1.1.0/24", text))
			continue
		}
		primary, secondary := &n.IPv4PodCIDR, &n.IPv4SecondaryPodCIDRs
		if p.Addr().Is6() {
			primary, secondary = &n.IPv6PodCIDR, &n.IPv6SecondaryPodCIDRs
		}
		if primary.IsValid() {
			*secondary = append(*secondary, p)
		} else {
			*primary = p
		}
	}
	return errors.Join(errs...)
}

// NodeFiles is the source of nodes that the YAML files of a directory declare. Files that become bad leave their last good
// version in force.
type NodeFiles struct {
	problems
	dir   *yamldir.Dir[node.Node] // only Run touches it
	nodes *node.Table
	ready chan struct{}
}

var _ NodeSource = (*NodeFiles)(nil)

// NewNodeFiles assembles a source; nothing is read before Run.
func NewNodeFiles(dir string) *NodeFiles {
	return &NodeFiles{dir: yamldir.New[node.Node](dir, "nodes"), nodes: node.NewTable(), ready: make(chan struct{})}
}

func (f *NodeFiles) String() string { return "node files" }

// Ready is closed once the directory has been read: one that cannot be is not one without nodes.
func (f *NodeFiles) Ready() <-chan struct{} { return f.ready }

// Nodes is the table of all.
func (f *NodeFiles) Nodes() *node.Table { return f.nodes }

// Run follows the directory until ctx ends.
func (f *NodeFiles) Run(ctx context.Context) error {
	f.dir.Follow(ctx, parseNodes, func(changed bool) {
		if changed {
			f.take()
		}
		if f.dir.Err() == nil && !closed(f.ready) {
			close(f.ready)
		}
	})
	return nil
}

// parseNodes reads a file of nodes.
func parseNodes(file string, content []byte) ([]node.Node, []yamldir.Problem, error) {
	return yamldir.Parse(file, content, declareNode)
}

func (f *NodeFiles) take() {
	all, wrong := f.dir.All()
	there := make(map[string]bool, len(all))
	for _, n := range all {
		if there[n.Name] {
			wrong = append(wrong, yamldir.Problem{Message: f.dir.Path + ": node " + n.Name + " is declared more than once: the first one counts"})
			continue
		}
		there[n.Name] = true
		f.nodes.Upsert(n)
	}
	keepNodes(f.nodes, there)
	var texts []string
	for _, p := range wrong {
		texts = append(texts, p.Error())
	}
	f.replace(texts)
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// nodeDeclaration is the YAML of one node.
type nodeDeclaration struct {
	Name        string            `yaml:"name"`
	IPs         []string          `yaml:"ips"`
	ExternalIPs []string          `yaml:"externalIPs"`
	PodCIDRs    []string          `yaml:"podCIDRs"`
	Labels      map[string]string `yaml:"labels"`
}

// declareNode reads and checks one node. Unknown fields are errors: a misspelt one must not be silently without effect.
func declareNode(from *yaml.Node) (node.Node, error) {
	var d nodeDeclaration
	if err := decodeStrictly(from, &d); err != nil {
		return node.Node{}, err
	}
	if d.Name == "" || len(d.Name) > 253 || strings.ContainsFunc(d.Name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-._", r)
	}) {
		return node.Node{}, fmt.Errorf("name %q: want 1 to 253 letters, digits, '-', '_' and '.'", d.Name)
	}
	n := node.Node{Name: d.Name, Labels: d.Labels}
	for _, of := range []struct {
		kind  string
		texts []string
	}{{node.InternalIP, d.IPs}, {node.ExternalIP, d.ExternalIPs}} {
		for _, text := range of.texts {
			addr, err := parseAddr(text)
			if err != nil {
				return node.Node{}, err
			}
			n.Addresses = append(n.Addresses, node.Address{Type: of.kind, IP: addr})
		}
	}
	if len(n.Addresses) == 0 {
		return node.Node{}, fmt.Errorf("node %s has no address: give it ips", d.Name)
	}
	err := setPodCIDRs(&n, d.PodCIDRs)
	return n, err
}
