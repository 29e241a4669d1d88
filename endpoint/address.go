// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"net/netip"
	"slices"
)

// addressBook tells who asks of the addresses of the endpoints in force. The registry's mutex guards it.
type addressBook struct {
	all     []netip.Addr // ordered; replaced, never changed
	changed chan struct{}
}

// set makes these the addresses, and tells of it if they differ.
func (b *addressBook) set(endpoints []Endpoint) {
	var all []netip.Addr
	for i := range endpoints {
		all = append(all, endpoints[i].IPs...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	if all = slices.Compact(all); !slices.Equal(all, b.all) {
		b.all = all
		b.tell()
	}
}

// tell wakes who waits.
func (b *addressBook) tell() {
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

// Addresses returns the addresses of the endpoints in force, ordered. complete is false until every source has been heard.
// It is safe for concurrent use; the slice is not to be changed.
func (r *Registry) Addresses() (all []netip.Addr, complete bool) {
	select {
	case <-r.ready:
		complete = true
	default:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.addresses.all, complete
}

// Changed returns a channel that closes when Addresses has another answer. It is safe for concurrent use.
func (r *Registry) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.addresses.changed == nil {
		r.addresses.changed = make(chan struct{})
	}
	return r.addresses.changed
}

// complete says that every source has been heard.
func (r *Registry) complete() {
	close(r.ready)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addresses.tell()
}
