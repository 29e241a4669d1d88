// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/weftmesh/weft/service"
)

// verify compares the kernel with the source, frontend by frontend. That somebody else changed it is drift.
func (r *serviceReconciler) verify(ctx context.Context, repair bool) (Report, error) {
	r.pass(ctx, time.Now())
	report, err := r.compare(ctx)
	if err != nil {
		return report, err
	}
	drift := len(report.Differences) + report.More
	if err := r.attacher.compare(&report); err != nil {
		return report, err
	}
	if repair && drift > 0 {
		claimed := r.settled
		if err := r.adopt(); err != nil {
			return report, err
		}
		if claimed {
			r.settled, r.inherited = true, map[service.Frontend]struct{}{}
			for _, s := range r.table.all {
				s.unclaimed = nil
			}
		}
		r.pass(ctx, time.Now())
		r.log.Warn("the services in the kernel were changed by somebody else", "frontends", drift, "repaired", true)
	}
	if repair && len(report.Differences) > 0 {
		r.attach()
		left, err := r.compare(ctx)
		if err == nil {
			err = r.attacher.compare(&left)
		}
		if err != nil {
			return report, err
		}
		for i := range report.Differences {
			d := &report.Differences[i]
			d.Repaired = !slices.ContainsFunc(left.Differences, func(l Difference) bool { return l.Kind == d.Kind && l.Object == d.Object })
		}
	}
	r.note(func(s *ServiceStatus) { s.VerifiedAt, s.Drift = time.Now(), s.Drift+uint64(drift) })
	r.publish()
	return report, nil
}

// compare reads what the kernel has and all that the source says. What changes meanwhile is no difference.
func (r *serviceReconciler) compare(ctx context.Context) (Report, error) {
	found, astray, err := r.table.read(r.table.frontends)
	if err != nil {
		return Report{}, err
	}
	have := make(map[service.Frontend]*foundService, len(found))
	for i := range found {
		have[found[i].frontend] = &found[i]
	}
	var report Report
	suspects := map[service.Frontend]Difference{}
	for _, key := range astray {
		f := frontendOf(key)
		suspects[f] = Difference{Kind: KindService, Object: f.String(), Want: "a service, or none", Have: "a frontend that leads nowhere"}
	}
	for at := (service.Revision{}); ctx.Err() == nil; {
		batch, next, _ := r.source.Changes(at, serviceChunk)
		for i := range batch {
			c := &batch[i]
			if c.Deleted || !c.Whole || c.Protocol != service.TCP && c.Protocol != service.UDP {
				continue
			}
			report.Compared++
			if d, differs := r.compareService(c, have[c.Frontend]); differs {
				suspects[c.Frontend] = d
			}
			delete(have, c.Frontend)
		}
		if at = next; len(batch) == 0 {
			break
		}
	}
	for f := range have {
		if _, inherited := r.inherited[f]; !inherited {
			suspects[f] = Difference{Kind: KindService, Object: f.String(), Want: "absent", Have: "a frontend that nobody claims"}
		}
	}
	fresh, _, _ := r.source.Changes(r.since, serviceChunk)
	for i := range fresh {
		delete(suspects, fresh[i].Frontend)
	}
	sorted := make([]service.Frontend, 0, len(suspects))
	for f := range suspects {
		sorted = append(sorted, f)
	}
	slices.SortFunc(sorted, service.Frontend.Compare)
	for _, f := range sorted {
		report.add(suspects[f])
	}
	return report, ctx.Err()
}

// compareService compares one frontend.
func (r *serviceReconciler) compareService(c *service.Change, has *foundService) (Difference, bool) {
	d := Difference{Kind: KindService, Object: c.Frontend.String()}
	want := r.settings(&c.Selection)
	switch {
	case has == nil:
		d.Want, d.Have = describeService(len(c.Backends), want), "absent"
		if err := r.failed[c.Frontend]; err != nil {
			d.Have += ": " + err.Error()
		}
		return d, true
	case has.broken:
		d.Want, d.Have = describeService(len(c.Backends), want), "slots that lead nowhere"
		return d, true
	}
	backends := r.table.list(&has.kernelService)
	if known := r.table.all[c.Frontend]; known != nil {
		backends = slices.DeleteFunc(backends, func(b service.Backend) bool { _, ok := known.unclaimed[b]; return ok })
	}
	wanted := slices.DeleteFunc(slices.Clone(c.Backends), func(b service.Backend) bool { return b.Addr.Is4() != c.Addr.Is4() })
	add, remove := differ(backends, wanted)
	if len(add)+len(remove) == 0 && (want == has.settings || len(wanted) == 0 && want.affinity == has.settings.affinity) {
		return d, false
	}
	d.Want, d.Have = describeService(len(wanted), want), describeService(len(backends), has.settings)
	if len(add) > 0 {
		d.Have += fmt.Sprintf(", without %v", add[0])
	}
	if len(remove) > 0 {
		d.Have += fmt.Sprintf(", with %v", remove[0])
	}
	return d, true
}

func describeService(backends int, s serviceSettings) string {
	text := fmt.Sprintf("%d backends", backends)
	if s.maglev {
		text += ", maglev"
	}
	if s.affinity > 0 {
		text += fmt.Sprintf(", affinity %ds", s.affinity)
	}
	return text
}
