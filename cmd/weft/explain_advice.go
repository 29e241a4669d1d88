// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	"github.com/weftmesh/weft/api"
)

const adviceDiagnose = "the map cannot be read: `weft diagnose` tells what is in the way"

// advice says what to do about what is not right with an address: each line has the cause first, then the next step.
func advice(e *api.Explanation, s *api.Status) []string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if len(e.Services) > 0 {
		adviceOfServices(e.Services, s, add)
	}
	adviceOfClaims(e, s, add)
	adviceOfKernel(&e.Kernel, s, add)
	if len(e.Claims) > 0 && e.Claims[0].Source != sourceLocal {
		adviceOfWay(&e.Kernel, s, add)
	}
	return lines
}

// sourceLocal is the source of what this node says itself.
const sourceLocal = "local"

// adviceOfServices is about an address of services.
func adviceOfServices(services []api.ExplainedService, s *api.Status, add func(string, ...any)) {
	if s.Datapath.Services == nil {
		add("sockets of this node are given no backends: start the agent with --service-lb, or leave it to who else does that here")
	}
	told := make(map[string]bool)
	once := func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !told[text] {
			told[text] = true
			add("%s", text)
		}
	}
	for i := range services {
		f := &services[i]
		name := f.Namespace + "/" + f.Name
		switch {
		case f.Holder != "":
			once("service %s does not get %s, as %s has it: give one of the two another address or port", name, frontendText(&f.ServiceFrontend), f.Holder)
		case f.Used == 0:
			once("service %s has no backend, and refuses connections: `weft service get %s` shows what each cluster offers", name, name)
		}
	}
	for i := range s.Clusters {
		if c := &s.Clusters[i]; c.ServicesLost {
			once("cluster %s is away, and its backends are used only where there are no others: see `weft troubleshoot kvstore %s`", c.Name, c.Name)
		}
	}
}

// adviceOfClaims is about what the clusters say.
func adviceOfClaims(e *api.Explanation, s *api.Status, add func(string, ...any)) {
	if c := e.Cluster; c != nil && !c.Ready {
		add("cluster %s is %s, and this may be out of date%s%s", c.Name, c.State, orNothing(": ", c.LastError), orNothing(": ", c.Advice()))
	}
	for i := range s.Clusters {
		// Whose the address is, an absent cluster may know.
		if c := &s.Clusters[i]; len(e.Claims) == 0 && len(e.Services) == 0 && !c.Ready && c.State != api.StateDraining {
			add("it may be of cluster %s, which is %s%s%s", c.Name, c.State, orNothing(": ", c.LastError), orNothing(": ", c.Advice()))
		}
	}
	for _, r := range e.Refused {
		add("cluster %s announces it against the rules: correct that there, or allow it in --mesh-limits if it is meant; `weft clusters rejected %s` has more",
			r.Cluster, r.Cluster)
		break
	}
	for i := range e.Waiting {
		w := &e.Waiting[i]
		add("no node of cluster %s has the address %s: see whether an agent runs on that node, and publishes it: `weft node list`", w.ClusterName, w.Host)
		break
	}
	if rival := rivalOf(e.Claims); rival != nil {
		add("cluster %s claims it for something else, and only one can be right: take the other claim away where it stands, see KEY; `weft ip conflicts` has all",
			clusterText(rival.Cluster, rival.ClusterName))
	}
	if !e.LabelsKnown && len(e.Claims) > 0 {
		add("its cluster has not published what identity %d stands for: `weft identity get %d` shows it once it has", e.Identity.ID, e.Identity.ID)
	}
}

// rivalOf is a claim for the prefix in force that says something else than the one that is; nil if there is none.
func rivalOf(claims []api.Claim) *api.Claim {
	for i := range claims {
		c, winner := &claims[i], &claims[0]
		if c.Prefix == winner.Prefix && (c.Identity != winner.Identity || c.Host != winner.Host) {
			return c
		}
	}
	return nil
}

// adviceOfKernel is about the map.
func adviceOfKernel(k *api.Kernel, s *api.Status, add func(string, ...any)) {
	switch m := &s.Datapath.Map; {
	case k.Error != "":
		add(adviceDiagnose)
	case k.Wanted == "":
	case m.Full:
		add("the map is full (%d entries): restart the agent with a larger --max-ipcache-entries", m.MaxEntries)
	case m.Error != "":
		add("the kernel refuses changes of the map: %s: `weft diagnose` tells what is in the way", m.Error)
	default:
		add("somebody else has changed the map: `weft verify --repair` puts it right now, the agent does by itself within half a minute")
	}
}

// adviceOfWay is about how packets get there, and whether they are seen on their way.
func adviceOfWay(k *api.Kernel, s *api.Status, add func(string, ...any)) {
	if k.Route == nil {
		add("no packet gets there: see the routes of `weft status`; without --routing-mode native they are the network plugin's")
		return
	}
	i := slices.IndexFunc(s.Datapath.Devices, func(d api.Device) bool { return d.Name == k.Route.Device })
	if i < 0 {
		add("packets to it leave by %s, which has no programs: name it in --devices if they are to be identified", k.Route.Device)
		return
	}
	d := &s.Datapath.Devices[i]
	if d.Error != "" {
		add("packets to it leave by %s, which has no programs: %s", d.Name, d.Error)
	}
	for _, p := range d.Programs {
		if !p.Attached {
			add("packets are not identified on %s, as %s is not attached%s: `weft verify --repair` tries again now", d.Name, p.Name, orNothing(": ", p.Error))
		}
	}
}
