// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"iter"
	"slices"
)

// View is all that is known of the services of one name.
type View struct {
	Name
	Local  *Local   // nil: our own cluster has no such service
	Others []Source // that have a local service of the name, too, which does not count
	Offers []ClusterOffer
	Fronts []FrontView
}

// ClusterOffer is what one cluster offers, in sum.
type ClusterOffer struct {
	Cluster         string
	ClusterID       uint32
	Slices          int // 0: the offer is in one piece
	Shared          bool
	IncludeExternal bool
	Lost            bool
	Ready, Draining int // backend addresses
}

// FrontView is a frontend, with all backends that it could use.
type FrontView struct {
	Frontend
	PortName string
	// Holder is the service that has the frontend: where it is another one, that came first.
	Holder   Name
	Used     int // backends
	Why      Why
	Backends []BackendView // by address and cluster; none where another service has the frontend
}

// BackendView is a backend that somebody offers.
type BackendView struct {
	Backend
	Cluster string // empty: our own
	State   State
	Lost    bool
	Used    bool
}

// Why is the reason for which the backends in use are those.
type Why uint8

// The reasons.
const (
	NotHeld      Why = iota // another service has the frontend
	NoBackend               // nobody offers one
	OwnOnly                 // the service is not global
	Alike                   // the service is global, and prefers nobody
	ByAffinity              // those that the service prefers
	FallenBack              // none is ready of those that the service prefers
	NoneReady               // nobody is ready: the draining ones
	NoneReliable            // all that are left are of lost clusters
)

var whyTexts = [...]string{
	NotHeld: "another service has the frontend", NoBackend: "no backend", OwnOnly: "not global", Alike: "global",
	ByAffinity: "affinity", FallenBack: "none ready where affinity wants", NoneReady: "none ready: draining ones",
	NoneReliable: "only lost clusters have any",
}

func (w Why) String() string { return whyTexts[w] }

// WhyNot is the reason for which a backend is not in use, "" for one that is.
func (b *BackendView) WhyNot() string {
	switch {
	case b.Used:
		return ""
	case b.Lost:
		return "others have some whose cluster is not lost"
	case b.State == Draining:
		return "others are ready"
	}
	return "affinity prefers others"
}

// Get returns what is known of the services of one name.
func (t *Table) Get(name Name) (View, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	e := t.entries[name]
	if e == nil {
		return View{}, false
	}
	v := View{Name: name, Local: e.local(), Offers: e.sum()}
	for _, l := range e.locals[min(1, len(e.locals)):] {
		v.Others = append(v.Others, l.Source)
	}
	if v.Local != nil {
		v.Local.frontends(func(at Frontend, port string) {
			v.Fronts = append(v.Fronts, t.fronts[at].view(e, port))
		})
	}
	return v, true
}

// All yields what is known of each service, by name. Each is as it was at one moment; the whole is not.
func (t *Table) All() iter.Seq[View] {
	t.mu.RLock()
	names := make([]Name, 0, len(t.entries))
	for name := range t.entries {
		names = append(names, name)
	}
	t.mu.RUnlock()
	slices.SortFunc(names, Name.Compare)
	return func(yield func(View) bool) {
		for _, name := range names {
			if v, ok := t.Get(name); ok && !yield(v) {
				return
			}
		}
	}
}

// sum adds up the parts of each cluster.
func (e *entry) sum() []ClusterOffer {
	var all []ClusterOffer
	for i := range e.parts {
		p := &e.parts[i]
		if n := len(all); n == 0 || all[n-1].Cluster != p.Cluster {
			all = append(all, ClusterOffer{Cluster: p.Cluster, ClusterID: p.ClusterID, Shared: p.Shared, IncludeExternal: p.IncludeExternal, Lost: p.lost})
		}
		o := &all[len(all)-1]
		if p.Slice != "" {
			o.Slices++
		}
		for j := range p.Backends {
			if s := &p.Backends[j]; s.State == Draining {
				o.Draining += len(s.Addrs)
			} else {
				o.Ready += len(s.Addrs)
			}
		}
	}
	return all
}

// view is how a frontend looks to one of those who claim it.
func (f *front) view(e *entry, port string) FrontView {
	v := FrontView{Frontend: f.at, PortName: port, Holder: f.service, Used: len(f.backends)}
	if f.claims[0].entry != e {
		v.Used = 0
		return v
	}
	local := e.local()
	v.Why = f.why(local)
	add := func(cluster string, lost bool, subsets []Subset) {
		class := class(0)
		if cluster != "" {
			class |= classRemote
		}
		if lost {
			class |= classLost
		}
		for _, b := range f.reach(nil, subsets, class) {
			shown := BackendView{Backend: b.Backend, Cluster: cluster, Lost: lost, Used: f.use.has(b.class)}
			if b.class&classDraining != 0 {
				shown.State = Draining
			}
			v.Backends = append(v.Backends, shown)
		}
	}
	add("", false, local.Backends)
	if local.Global {
		for _, p := range e.parts {
			add(p.Cluster, p.lost, p.Backends)
		}
	}
	slices.SortFunc(v.Backends, func(a, b BackendView) int {
		return cmp.Or(a.Backend.Compare(b.Backend), cmp.Compare(a.Cluster, b.Cluster))
	})
	return v
}

// why explains the classes in use.
func (f *front) why(local *Local) Why {
	const ready classSet = 1 | 1<<classRemote
	const draining = ready << classDraining
	switch {
	case f.use == 0:
		return NoBackend
	case f.use&^(ready|draining) != 0:
		return NoneReliable
	case f.use&draining != 0:
		return NoneReady
	case !local.Global:
		return OwnOnly
	case local.Affinity == AffinityNone:
		return Alike
	case (local.Affinity == AffinityLocal) == f.use.has(0):
		return ByAffinity
	}
	return FallenBack
}
