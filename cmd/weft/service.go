// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/service"
)

func serviceCommand(env environment, c *clientOptions) *cobra.Command {
	return plural("services", group("service", "The services of our own cluster, and what other clusters offer for them",
		serviceList(env, c), serviceGet(env, c), serviceWatch(env, c)))
}

func serviceListing(c *clientOptions) listing[api.Service] {
	return listing[api.Service]{
		kind: api.KindServiceList,
		key:  func(s *api.Service) string { return s.Namespace + "/" + s.Name },
		fetch: func(ctx context.Context, _ []string) ([]api.Service, error) {
			return api.NewClient(c.socket).Services(ctx)
		},
		columns: []column[api.Service]{
			{title: "NAME", cell: func(s *api.Service) string { return s.Namespace + "/" + s.Name }},
			{title: "FRONTENDS", cell: frontendTexts},
			{title: "AFFINITY", cell: affinityText},
			{title: "BACKENDS", cell: offerTexts},
			{title: "USED", cell: usedText},
			{title: "WHY", cell: whyText},
			{title: "SOURCE", cell: sourceText, wide: true},
		},
	}
}

func serviceList(env environment, c *clientOptions) *cobra.Command {
	list := listCommand(env, "list", "List the services of our own cluster, and what other clusters offer", serviceListing(c))
	list.Aliases = []string{"ls"}
	return list
}

func serviceWatch(env environment, c *clientOptions) *cobra.Command {
	cmd := listCommand(env, "watch", "Show the services, and go on with what changes", serviceListing(c))
	if err := cmd.Flags().Set("watch", "true"); err != nil {
		panic(err) // the flag is a truth value
	}
	return cmd
}

func serviceGet(env environment, c *clientOptions) *cobra.Command {
	var out *output
	const short = "Show a service with its backends: which are used, and why"
	cmd := newCommand("get NAMESPACE/NAME", short, func(cmd *cobra.Command, args []string) error {
		name, err := service.ParseName(args[0])
		if err != nil {
			return &usageError{cause: err}
		}
		detail, err := api.NewClient(c.socket).Service(cmd.Context(), name.Namespace, name.Name)
		if err != nil {
			return err
		}
		return out.show(env.stdout, detail, func(t *table) { printService(t, &detail.Service) })
	})
	someService.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

func printService(t *table, s *api.Service) {
	t.row("Name:", s.Namespace+"/"+s.Name)
	if l := s.Local; l != nil {
		t.row("Source:", sourceText(s))
		t.row("Global:", strconv.FormatBool(l.Global))
		t.row("Shared:", strconv.FormatBool(l.Shared))
		t.row("Affinity:", l.Affinity)
		t.row("Algorithm:", l.Algorithm)
		t.row("Client affinity:", clientAffinityText(l.ClientAffinity))
	} else {
		t.row("Local service:", "none: what other clusters offer is not used")
	}
	t.rows("Offers:", strings.Split(offerTexts(s), ", "))
	if s.KernelError != "" {
		t.row("Kernel:", s.KernelError)
	}
	for _, f := range s.Frontends {
		used := fmt.Sprintf("%d used: %s", f.Used, f.Why)
		if f.Holder != "" {
			used = "not ours: " + f.Holder + " has it"
		}
		rows := []string{used}
		if k := f.Kernel; k != nil {
			rows = append(rows, kernelText(k))
		}
		for _, b := range f.Backends {
			rows = append(rows, backendText(&b, f.Kernel))
		}
		t.rows(frontendText(&f)+":", rows)
	}
}

func kernelText(k *api.KernelFrontend) string {
	if k.Absent {
		return "kernel: does not have it yet"
	}
	text := fmt.Sprintf("kernel: %s, %s, %s, %d refused", count(k.Backends, "backend"), k.Algorithm, count(int(k.Chosen), "flow"), k.Refused)
	if k.ClientAffinity > 0 {
		text += ", affinity " + clientAffinityText(k.ClientAffinity)
	}
	for _, at := range k.Strays {
		text += ", still " + at.String()
	}
	return text
}

func backendText(b *api.ServiceBackend, k *api.KernelFrontend) string {
	words := []string{" ", addressText(b.IP, b.Port), b.Cluster, b.State}
	if b.Used {
		words[0] = "*"
	}
	if b.Lost {
		words = append(words, "lost")
	}
	text := strings.Join(words, " ")
	if b.Why != "" {
		text += ": " + b.Why
	}
	switch {
	case k != nil && b.Used && !b.InKernel:
		text += ", not in the kernel yet"
	case k != nil && !b.Used && b.InKernel:
		text += ", in the kernel still"
	}
	return text
}

func clientAffinityText(seconds uint32) string {
	if seconds == 0 {
		return "none"
	}
	return fmt.Sprintf("%ds", seconds)
}

func sourceText(s *api.Service) string {
	switch {
	case s.Local == nil:
		return "-"
	case len(s.Local.Shadowed) > 0:
		return fmt.Sprintf("%s (not used: %s)", s.Local.Source, strings.Join(s.Local.Shadowed, ", "))
	}
	return s.Local.Source
}

func affinityText(s *api.Service) string {
	if s.Local == nil || !s.Local.Global {
		return "-"
	}
	return s.Local.Affinity
}

// offerTexts says how many backends each cluster has, our own first.
func offerTexts(s *api.Service) string {
	var texts []string
	add := func(cluster string, ready, draining int, lost bool) {
		text := fmt.Sprintf("%s %d", cluster, ready)
		if draining > 0 {
			text += fmt.Sprintf("+%d draining", draining)
		}
		if lost {
			text += " (lost)"
		}
		texts = append(texts, text)
	}
	if l := s.Local; l != nil {
		add("own", l.Ready, l.Draining, false)
	}
	for _, o := range s.Clusters {
		add(o.Cluster, o.Ready, o.Draining, o.Lost)
	}
	return orDash(strings.Join(texts, ", "))
}

// usedText is how many backends each frontend has in use, once if that is the same everywhere.
func usedText(s *api.Service) string {
	return perFrontend(s, func(f *api.ServiceFrontend) string { return strconv.Itoa(f.Used) })
}

func whyText(s *api.Service) string {
	switch {
	case s.Local == nil:
		return "no local service"
	case len(s.Frontends) == 0:
		return "headless"
	}
	return perFrontend(s, func(f *api.ServiceFrontend) string { return f.Why })
}

func perFrontend(s *api.Service, cell func(*api.ServiceFrontend) string) string {
	var texts []string
	same := true
	for i := range s.Frontends {
		texts = append(texts, cell(&s.Frontends[i]))
		same = same && texts[i] == texts[0]
	}
	if same && len(texts) > 0 {
		return orDash(texts[0])
	}
	return orDash(strings.Join(texts, ", "))
}

func frontendTexts(s *api.Service) string {
	var texts []string
	for i := range s.Frontends {
		texts = append(texts, frontendText(&s.Frontends[i]))
	}
	return orDash(strings.Join(texts, ","))
}

func frontendText(f *api.ServiceFrontend) string { return addressText(f.IP, f.Port) + "/" + f.Protocol }

// listServices shows what is known of the services, without their backends.
func (a *agent) listServices(yield func(api.Service) bool) {
	for v := range a.services.All() {
		if !yield(a.makeService(&v, false)) {
			return
		}
	}
}

func (a *agent) findService(namespace, name string) (api.Service, bool) {
	v, ok := a.services.Get(service.Name{Namespace: namespace, Name: name})
	if !ok {
		return api.Service{}, false
	}
	s := a.makeService(&v, true)
	if a.cfg.serviceLB {
		s.KernelError = errorText(addKernel(&s, a.cfg.bpffs))
	}
	return s, true
}

// addKernel adds to the frontends of a service what the kernel has.
func addKernel(s *api.Service, bpffs string) error {
	table, err := datapath.OpenServices(bpffs)
	if err != nil {
		return err
	}
	defer table.Close()
	for i := range s.Frontends {
		f := &s.Frontends[i]
		protocol, err := service.ParseProtocol(f.Protocol)
		if err != nil {
			return err
		}
		k, ok, err := table.Get(service.Frontend{Addr: f.IP, Port: f.Port, Protocol: protocol})
		if err != nil {
			return err
		}
		switch {
		case f.Holder != "" || protocol == service.SCTP: // what the kernel has is another service's, or cannot be
		case ok:
			f.Kernel = kernelFrontend(&k, f.Backends)
		default:
			f.Kernel = &api.KernelFrontend{Absent: true}
		}
	}
	return nil
}

// kernelFrontend is what the kernel has of a frontend; the backends are told whether it has them.
func kernelFrontend(k *datapath.KernelService, backends []api.ServiceBackend) *api.KernelFrontend {
	shown := &api.KernelFrontend{
		Backends: len(k.Backends), Algorithm: k.Algorithm().String(), ClientAffinity: k.Affinity, Chosen: k.Chosen, Refused: k.Refused,
	}
	has := make(map[netip.AddrPort]bool, len(k.Backends)) // and whether somebody offers it
	for _, b := range k.Backends {
		has[netip.AddrPortFrom(b.Addr, b.Port)] = false
	}
	for i := range backends {
		b := &backends[i]
		at := netip.AddrPortFrom(b.IP, b.Port)
		if _, b.InKernel = has[at]; b.InKernel {
			has[at] = true
		}
	}
	for _, b := range k.Backends {
		if at := netip.AddrPortFrom(b.Addr, b.Port); !has[at] {
			shown.Strays = append(shown.Strays, at)
		}
	}
	return shown
}

func (a *agent) makeService(v *service.View, backends bool) api.Service {
	s := api.Service{
		Namespace: v.Namespace, Name: v.Name.Name, Clusters: []api.ServiceCluster{}, Frontends: []api.ServiceFrontend{},
	}
	if l := v.Local; l != nil {
		s.Local = &api.LocalService{
			Source: l.Source.String(), Global: l.Global, Shared: l.Shared, Affinity: l.Affinity.String(), Algorithm: l.Algorithm.String(),
			ClientAffinity: l.ClientAffinity,
		}
		for i := range l.Backends {
			if subset := &l.Backends[i]; subset.State == service.Draining {
				s.Local.Draining += len(subset.Addrs)
			} else {
				s.Local.Ready += len(subset.Addrs)
			}
		}
		for _, source := range v.Others {
			s.Local.Shadowed = append(s.Local.Shadowed, source.String())
		}
	}
	for _, o := range v.Offers {
		s.Clusters = append(s.Clusters, api.ServiceCluster{
			Cluster: o.Cluster, ClusterID: o.ClusterID, Slices: o.Slices, Shared: o.Shared, IncludeExternal: o.IncludeExternal,
			Ready: o.Ready, Draining: o.Draining, Lost: o.Lost,
		})
	}
	for i := range v.Fronts {
		s.Frontends = append(s.Frontends, a.makeFrontend(&v.Fronts[i], backends))
	}
	return s
}

func (a *agent) makeFrontend(f *service.FrontView, backends bool) api.ServiceFrontend {
	shown := api.ServiceFrontend{
		IP: f.Addr, Port: f.Port, Protocol: f.Protocol.String(), PortName: f.PortName, Used: f.Used, Why: f.Why.String(),
	}
	if f.Why == service.NotHeld {
		shown.Holder = f.Holder.String()
	}
	if !backends {
		return shown
	}
	for _, b := range f.Backends {
		clusterName := b.Cluster
		if clusterName == "" {
			clusterName = a.cfg.clusterName
		}
		shown.Backends = append(shown.Backends, api.ServiceBackend{
			IP: b.Addr, Port: b.Port, Cluster: clusterName, State: b.State.String(), Lost: b.Lost, Used: b.Used, Why: b.WhyNot(),
		})
	}
	return shown
}
