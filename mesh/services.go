// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/service"
)

// services decodes the services that a cluster shares, whole or in slices. Those of our own cluster are local ones, as its
// operator knows them; what it would offer to itself is nothing.
type services struct {
	table   *service.Table
	slices  *service.SliceReader // nil: values are whole services
	cluster identity.ClusterID
	name    string
	gate    *gate // nil for our own cluster, which may claim anything

	known map[string]*knownService // by "namespace/name", the name being that of a slice where slices are read
	kept  int                      // bytes of values, in known
}

// mostKept is how many bytes of a cluster's large values are kept to read the next ones faster: those of 150,000 backends.
const mostKept = 8 << 20

// knownService is a service, or a slice of one, that is in use.
type knownService struct {
	of   service.Name
	cut  *service.Offer // as the cluster said it, where not all of that is used
	left int            // how many of its addresses are left out
	// previous is the value, where it is large and all of it is used; else nil.
	previous *service.Previous
}

var _ decoder = (*services)(nil)

func (d *services) upsert(key, value []byte, _ int64) error {
	if _, _, ok := parseServiceKey(string(key)); !ok {
		return refuse(reasonMalformed, fmt.Errorf("service key %q is not of the form namespace/name", key))
	}
	if d.revise(d.known[string(key)], value) {
		return nil
	}
	o, previous, err := d.parse(value)
	if err != nil && !errors.Is(err, service.ErrPartial) {
		return refuse(reasonMalformed, err)
	}
	if err := o.Validate(string(key), d.name, uint32(d.cluster)); err != nil {
		return refuse(reasonMismatch, err)
	}
	if o.Slice != "" && !plainName(o.Service.Name) {
		return refuse(reasonMalformed, fmt.Errorf("service name %q is none: want up to %d plain characters", o.Service.Name, longestName))
	}
	if err != nil {
		err = partly(refuse(reasonMalformed, err))
	}
	o.Cluster = d.name // of which there is one copy
	used, left, cut := d.admit(o)
	if cut != nil {
		err = cut
	}
	k := d.known[string(key)]
	switch {
	case k == nil:
		k = new(knownService)
		d.known[string(key)] = k
	case k.of != o.Service: // a slice may turn to another service
		d.forget(key, k)
	}
	k.of, k.left, k.cut = o.Service, left, nil
	if left > 0 {
		k.cut = &o
	}
	d.put(used)
	if err == nil && d.kept+previous.Size() <= mostKept {
		d.keep(k, previous)
	}
	return err
}

// parse decodes a value. It also returns what it takes to read the next one faster, or nil.
func (d *services) parse(value []byte) (service.Offer, *service.Previous, error) {
	switch {
	case d.slices != nil:
		o, err := d.slices.Parse(value)
		return o, nil, err
	case d.gate == nil:
		o, err := service.ParseOffer(value)
		return o, nil, err
	}
	return service.DecodeOffer(value)
}

// keep makes previous what is kept of a service; nil: nothing.
func (d *services) keep(k *knownService, previous *service.Previous) {
	d.kept += previous.Size() - k.previous.Size()
	k.previous = previous
}

// revise reads a value where it differs from the one before, all of which is used. If it is not ok, nothing has changed, and
// the value must be decoded. That an address may be used that was there before is for rejudge to say, if limits have changed.
func (d *services) revise(k *knownService, value []byte) (ok bool) {
	if k == nil || k.previous == nil {
		return false
	}
	size := k.previous.Size()
	removed, added, ok := k.previous.Next(value)
	d.kept += k.previous.Size() - size
	ok = ok && !slices.ContainsFunc(added, func(a netip.Addr) bool { return d.backend(single(a)) != nil })
	if ok && len(removed)+len(added) > 0 {
		ok = d.table.Revise(d.name, k.of, removed, added)
	}
	if !ok {
		d.keep(k, nil)
	}
	return ok
}

// put makes an offer what is in use.
func (d *services) put(o service.Offer) {
	if d.gate != nil {
		d.table.Put(o)
		return
	}
	l := service.Local{
		Service: o.Service, Source: service.Etcd, Settings: service.Settings{Global: o.IncludeExternal, Shared: o.Shared}, Backends: o.Backends,
	}
	for _, side := range o.Frontends {
		l.Addrs = append(l.Addrs, side.Addrs...)
		l.Ports = append(l.Ports, side.Ports...)
	}
	d.table.PutLocal(l)
}

// admit returns the offer without the addresses that the cluster may not claim, and how many these are: one bad backend must
// not take the good ones with it, nor be used. The refusal is that of the first of them.
func (d *services) admit(o service.Offer) (used service.Offer, left int, err error) {
	if d.gate == nil {
		return o, 0, nil
	}
	judge := func(side []service.Subset, check func(netip.Prefix) error) []service.Subset {
		var kept []service.Subset
		for i, s := range side {
			bad := slices.IndexFunc(s.Addrs, func(a netip.Addr) bool { return check(single(a)) != nil })
			if bad < 0 {
				if kept != nil {
					kept = append(kept, s)
				}
				continue
			}
			if err == nil {
				err = check(single(s.Addrs[bad]))
			}
			if kept == nil {
				kept = slices.Clone(side[:i])
			}
			total := len(s.Addrs)
			s.Addrs = slices.DeleteFunc(slices.Clone(s.Addrs), func(a netip.Addr) bool { return check(single(a)) != nil })
			left += total - len(s.Addrs)
			kept = append(kept, s)
		}
		if kept == nil {
			return side
		}
		return slices.DeleteFunc(kept, func(s service.Subset) bool { return len(s.Addrs) == 0 })
	}
	o.Backends = judge(o.Backends, d.backend)
	o.Frontends = judge(o.Frontends, func(p netip.Prefix) error { return d.gate.prefix(p, useVIP, false) })
	if err != nil {
		err = partly(fmt.Errorf("%d addresses left out, of which the first: %w", left, err))
	}
	return o, left, err
}

// backend checks an address to which packets for the service would go: a workload's, or that of a node for a workload in
// its network.
func (d *services) backend(p netip.Prefix) error {
	err := d.gate.prefix(p, usePod, false)
	if err != nil && d.gate.prefix(p, useNode, false) == nil {
		return nil
	}
	return err
}

func (d *services) remove(key []byte) {
	if k := d.known[string(key)]; k != nil {
		d.forget(key, k)
		delete(d.known, string(key))
	}
}

// forget takes what is known under key out of the table.
func (d *services) forget(key []byte, k *knownService) {
	_, slice, _ := parseServiceKey(string(key))
	switch {
	case d.gate == nil:
		d.table.DeleteLocal(service.Etcd, k.of)
		return
	case d.slices == nil:
		slice = ""
	}
	d.keep(k, nil)
	d.table.Delete(d.name, k.of, slice)
}

func (d *services) withdraw(key []byte) { d.remove(key) }

// rejudge looks at all services again.
func (d *services) rejudge(_ []ipcache.Claim, report func(key []byte, err error)) {
	if d.gate == nil {
		return
	}
	for key, k := range d.known {
		said := k.cut
		if said == nil {
			_, slice, _ := parseServiceKey(key)
			if d.slices == nil {
				slice = ""
			}
			said, _ = d.table.Offer(d.name, k.of, slice)
		}
		if said == nil {
			continue
		}
		used, left, err := d.admit(*said)
		if left == k.left && left == 0 {
			continue
		}
		d.put(used)
		if left != k.left {
			report([]byte(key), err)
		}
		if k.left, k.cut = left, nil; left > 0 {
			k.cut = said
			d.keep(k, nil)
		}
	}
}

// parseServiceKey reads "namespace/name". With more slashes than one a key could stand for several services.
func parseServiceKey(key string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(key, "/")
	return namespace, name, ok && namespace != "" && name != "" && !strings.Contains(name, "/") && plainName(namespace) && plainName(name)
}

func (d *services) flush(time.Time) {}
