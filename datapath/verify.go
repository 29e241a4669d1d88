// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/ipcache"
)

// DefaultVerifyInterval is how often, at least, the whole map is compared with the table unless configured otherwise.
const DefaultVerifyInterval = 5 * time.Minute

// shownDifferences bounds what a report describes; all differences are counted, and repaired if asked.
const shownDifferences = 1000

// Report is the outcome of a comparison of the kernel with the tables.
type Report struct {
	// Compared is how many objects were looked at.
	Compared    int
	Differences []Difference
	// More is how many differences there are besides.
	More int
}

// add notes a difference.
func (r *Report) add(d Difference) {
	if len(r.Differences) >= shownDifferences {
		r.More++
		return
	}
	r.Differences = append(r.Differences, d)
}

// comparison is a request to a goroutine that owns kernel objects.
type comparison struct {
	repair bool
	tell   func(done, total int)   // how far it is; it may be nil
	reply  chan<- comparisonResult // of capacity one
}

type comparisonResult struct {
	Report
	err error
}

// Verify compares the kernel with the tables: map, routes, devices, programs, pins, services. With repair it makes right what it
// finds. It is safe for concurrent use and waits for Run to be under way.
func (d *Datapath) Verify(ctx context.Context, repair bool) (Report, error) {
	return d.VerifyTelling(ctx, repair, nil)
}

// VerifyTelling is [Datapath.Verify] that tells meanwhile, from another goroutine, how many entries it has
// compared, and of how many. tell must not block, and may be called after the end if ctx has ended.
func (d *Datapath) VerifyTelling(ctx context.Context, repair bool, tell func(done, total int)) (Report, error) {
	var whole Report
	owners := []chan comparison{d.compareMap, d.compareHost}
	if d.compareServices != nil {
		owners = append(owners, d.compareServices)
	}
	for _, owner := range owners {
		reply := make(chan comparisonResult, 1)
		select {
		case <-ctx.Done():
			return Report{}, context.Cause(ctx)
		case owner <- comparison{repair: repair, tell: tell, reply: reply}:
		}
		select {
		case <-ctx.Done():
			return Report{}, context.Cause(ctx)
		case part := <-reply:
			if part.err != nil {
				return Report{}, part.err
			}
			whole.Compared += part.Compared
			whole.More += part.More
			for _, one := range part.Differences {
				whole.add(one)
			}
		}
	}
	return whole, nil
}

const (
	// compareInterval is how long it takes to compare the whole, some entries at a time or all at once: of what somebody else
	// changes in a map the kernel tells nobody, and it is to be right again within half a minute.
	compareInterval = 24 * time.Second
	// compareShare bounds the part of the time that comparing takes, one in so many, at the cost of the interval. A million
	// entries take a second, and so a twentieth.
	compareShare = 10
	// compareRush is the same once a difference was found and there may be more.
	compareRush = 3
)

// comparePace is how often something is compared as a whole, at about: at most and at least, as intervals.
type comparePace struct{ shortest, longest time.Duration }

// next is how long to wait after a comparison that took some time.
func (p comparePace) next(took time.Duration) time.Duration {
	return jittered(min(max(p.shortest, compareShare*took), p.longest))
}

// pause is how long to wait after one of so many steps, if it took some time. A comparison has a quarter more of them than the map
// has chunks, since the table is scanned to its end after the walk.
func (p comparePace) pause(took time.Duration, steps int, rush bool) time.Duration {
	all := time.Duration(steps + steps/4 + 1)
	if rush {
		return min(compareRush*took, p.longest/all)
	}
	return jittered(min(max(p.shortest/all, compareShare*took), p.longest/all))
}

// jittered spreads what many nodes do at the same interval.
func jittered(every time.Duration) time.Duration {
	return every - every/10 + rand.N(every/5+1)
}

// verify compares the map with the table, all at once. That somebody else changed the map is drift, which is counted; what the
// kernel refuses for the time being is a difference, but no drift.
func (r *reconciler) verify(ctx context.Context, repair bool, tell func(done, total int)) (Report, error) {
	if err := r.pass(ctx, time.Now()); err != nil {
		return Report{}, err
	}
	suspects, s, err := r.compare(tell)
	if err != nil {
		return Report{}, err
	}
	report := Report{Compared: s.compared, More: max(0, len(suspects)-shownDifferences)}
	keys := make([]bpf.IPCacheKey, len(suspects))
	drift := 0
	for i, one := range suspects {
		keys[i] = one.key
		if _, known := r.failed[one.key]; !known {
			drift++
		}
		if i < shownDifferences {
			report.add(r.describe(one))
		}
	}
	if repair {
		r.repair(keys)
	}
	for i := range report.Differences {
		_, failed := r.failed[keys[i]]
		report.Differences[i].Repaired = repair && !failed
	}
	if s.misled { // for programs, that is made anew at once
		report.add(Difference{Kind: KindFastPath, Object: bpf.MapHosts, Want: "the identities of the map", Have: "others", Repaired: true})
	}
	if drift > 0 {
		r.log.Warn("the map ipcache was changed by somebody else", "entries", drift, "repaired", repair)
	}
	r.note(func(s *MapStatus) { s.VerifiedAt, s.Drift = time.Now(), s.Drift+uint64(drift) })
	r.publish()
	return report, nil
}

// compare returns all entries of the map that differ from the table, and the scrub that found them. Nobody writes the map
// meanwhile but who should not. tell, if it is not nil, is told how far it is.
func (r *reconciler) compare(tell func(done, total int)) (suspects []suspect, s *scrub, err error) {
	s = r.newScrub(dumpChunk)
	total := r.table.Len()
	if tell == nil {
		tell = func(int, int) {}
	}
	tell(0, total)
	for {
		some, done, err := s.step()
		if err != nil {
			return nil, nil, err
		}
		tell(s.compared, max(s.compared, total))
		if suspects = append(suspects, some...); done {
			return suspects, s, nil
		}
	}
}

// repair makes entries what the table says that they are, the more specific first.
func (r *reconciler) repair(keys []bpf.IPCacheKey) {
	keys = slices.SortedFunc(slices.Values(keys), func(a, b bpf.IPCacheKey) int { return int(b.PrefixLen) - int(a.PrefixLen) })
	for chunk := range slices.Chunk(keys, reconcileChunk) {
		r.again(chunk)
	}
	r.delete()
}

func (r *reconciler) describe(s suspect) Difference {
	d := Difference{Kind: KindMap, Object: s.key.String(), Want: s.want.String(), Have: s.have.String()}
	switch {
	case !s.wanted:
		d.Want, d.Have = "absent", "an entry that nobody claims"
	case !s.there:
		d.Have = r.absence(s.key)
	}
	return d
}

// absence says why an entry is not there.
func (r *reconciler) absence(key bpf.IPCacheKey) string {
	if _, failed := r.failed[key]; !failed {
		return "absent"
	}
	if r.full {
		return "absent: the map is full: raise --max-ipcache-entries"
	}
	return "absent: the kernel refused it"
}

// untaken are the keys of which the table has news that were not taken yet.
func (r *reconciler) untaken() (map[bpf.IPCacheKey]bool, error) {
	fresh := map[bpf.IPCacheKey]bool{}
	buf := make([]ipcache.Change, 0, reconcileChunk)
	for at := r.since; ; {
		batch, next, reset := r.table.Changes(at, buf)
		if reset {
			return nil, errors.New("the table changes faster than the map can be compared: try again")
		}
		for i := range batch {
			fresh[bpf.MakeIPCacheKey(batch[i].Prefix)] = true
		}
		if len(batch) < reconcileChunk {
			return fresh, nil
		}
		at = next
	}
}

// verify compares what the keeper keeps, and with repair makes it right.
func (k *keeper) verify(repair bool) (Report, error) {
	report, err := k.compare()
	if err != nil || !repair || len(report.Differences) == 0 {
		return report, err
	}
	if _, err := k.check(nil); err != nil {
		k.datapath.cfg.Log.Warn("repair", "err", err)
	}
	left, err := k.compare()
	if err != nil {
		return report, err
	}
	for i := range report.Differences {
		d := &report.Differences[i]
		d.Repaired = !slices.ContainsFunc(left.Differences, func(l Difference) bool { return l.Kind == d.Kind && l.Object == d.Object })
	}
	return report, nil
}

// compare tells what check would change.
func (k *keeper) compare() (Report, error) {
	var report Report
	for name, m := range k.maps {
		report.Compared++
		k.comparePin(&report, KindPin, k.dir.file(pins[name]), mapAt, m)
	}
	for _, p := range k.programs {
		report.Compared++
		k.comparePin(&report, KindProgram, k.dir.file(pinProgramsDir, p.Name), programAt, p.handle)
	}
	report.Compared++
	switch have, err := k.settings(); {
	case err != nil:
		return report, err
	case have != k.datapath.cfg.settings():
		report.add(Difference{Kind: KindSettings, Object: k.dir.file(pinConfig), Want: "as configured", Have: "otherwise"})
	}
	existing, err := k.host.devices()
	if err != nil {
		return report, err
	}
	names := map[int]string{}
	for _, dev := range existing {
		names[dev.Index] = dev.Name
	}
	k.compareOverlay(&report)
	prune := k.datapath.cfg.routeless() || k.datapath.cfg.Listed(0)
	claims, _ := k.claims()
	wanted, keep := k.resolve(claims)
	routes, defaults, err := k.host.routes(func(p netip.Prefix) bool { _, ok := wanted[p]; return ok })
	if err != nil {
		return report, err
	}
	devices, sticky, err := k.choose(existing, defaults)
	if err != nil {
		return report, err
	}
	devices, sticky, pods, err := k.wantedPods(devices, sticky, existing)
	if err != nil {
		return report, err
	}
	comparePods(&report, pods, names)
	devices, sticky = k.withClients(devices, sticky, existing)
	links, err := k.attacher.compare(devices, sticky)
	if err != nil {
		return report, err
	}
	report.Compared += 2*len(devices) + len(wanted)
	for _, d := range links {
		report.add(d)
	}
	compareRoutes(&report, diffRoutes(wanted, keep, routes, prune), names)
	return report, nil
}

// compareRoutes notes what is to change, and what cannot be changed.
func compareRoutes(report *Report, changes routeChanges, names map[int]string) {
	for _, c := range changes.set {
		d := Difference{Kind: KindRoute, Object: c.Prefix.String(), Want: describeRoute(c.route, names), Have: "absent"}
		if c.Replace {
			d.Have = "another route of ours"
		}
		report.add(d)
	}
	for _, r := range changes.remove {
		report.add(Difference{Kind: KindRoute, Object: r.Prefix.String(), Want: "absent",
			Have: fmt.Sprintf("%s metric %d", describeRoute(r.route, names), r.Metric)})
	}
	for prefix, r := range changes.conflicts {
		report.add(Difference{Kind: KindRoute, Object: prefix.String(), Want: "a route of ours",
			Have: fmt.Sprintf("a route of protocol %d, which is left alone", r.Protocol)})
	}
}

// describeRoute says where a route leads, as `ip route` does.
func describeRoute(r route, names map[int]string) string {
	if !r.Gateway.IsValid() {
		return "dev " + names[r.IfIndex]
	}
	return fmt.Sprintf("via %v dev %s", r.Gateway, names[r.IfIndex])
}

// pinned is a map or a program.
type pinned interface {
	Unpin() error
	Pin(string) error
}

// kernelID is the kernel's number of a map or program.
func kernelID(object any) (uint32, error) {
	switch o := object.(type) {
	case *ebpf.Map:
		info, err := o.Info()
		if err != nil {
			return 0, err
		}
		id, _ := info.ID()
		return uint32(id), nil
	case *ebpf.Program:
		info, err := programInfo(o)
		if err != nil {
			return 0, err
		}
		id, _ := info.ID()
		return uint32(id), nil
	}
	return 0, errors.New("neither map nor program")
}

// mapAt and programAt return the number of what is pinned at a path.
func mapAt(path string) (uint32, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	return kernelID(m)
}

func programAt(path string) (uint32, error) {
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	return kernelID(p)
}

// comparePin notes a pin that is not there, or holds another object than the one that this agent works with.
func (k *keeper) comparePin(report *Report, kind, path string, at func(string) (uint32, error), object any) {
	want, err := kernelID(object)
	if err != nil {
		report.add(Difference{Kind: kind, Object: path, Want: "an object", Have: err.Error()})
		return
	}
	switch have, err := at(path); {
	case errors.Is(err, fs.ErrNotExist):
		report.add(Difference{Kind: kind, Object: path, Want: fmt.Sprint("id ", want), Have: "absent"})
	case err != nil:
		report.add(Difference{Kind: kind, Object: path, Want: fmt.Sprint("id ", want), Have: err.Error()})
	case have != want:
		report.add(Difference{Kind: kind, Object: path, Want: fmt.Sprint("id ", want), Have: fmt.Sprint("id ", have)})
	}
}

// putBack pins an object at path, in place of what is not it; did is false where it was there.
func putBack(path string, at func(string) (uint32, error), object pinned) (did bool, err error) {
	want, err := kernelID(object)
	if err != nil {
		return false, explain("look at what belongs at "+path, err)
	}
	have, err := at(path)
	switch {
	case err == nil && have == want:
		return false, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return false, explain("look at pin "+path, err)
	}
	// Unpin makes the library forget the path at which it believes the object to be.
	if err := errors.Join(removePin(path), object.Unpin(), object.Pin(path)); err != nil {
		return false, explain("put back pin "+path, err)
	}
	return true, nil
}
