// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/kvstore"
)

// leaseJSON is a lease of etcd as JSON.
type leaseJSON struct {
	ID      string   `json:"id"`      // hexadecimal
	TTL     int64    `json:"ttl"`     // seconds left
	Granted int64    `json:"granted"` // seconds that each keepalive renews it to
	Keys    []string `json:"keys"`
}

func kvstoreLeases(env environment, o *etcdOptions) *cobra.Command {
	const short = "List the leases and what is left of them: the keys of a lease go when nobody renews it"
	seconds := func(n int64) string { return strconv.FormatInt(n, 10) + "s" }
	return listCommand(env, "leases", short, listing[leaseJSON]{
		kind:  kindLeaseList,
		fetch: func(ctx context.Context, _ []string) ([]leaseJSON, error) { return o.leases(ctx) },
		key:   func(l *leaseJSON) string { return l.ID },
		columns: []column[leaseJSON]{
			{title: "LEASE", cell: func(l *leaseJSON) string { return l.ID }},
			{title: "TTL", cell: func(l *leaseJSON) string { return seconds(l.TTL) }},
			{title: "GRANTED", cell: func(l *leaseJSON) string { return seconds(l.Granted) }},
			{title: "KEYS", cell: func(l *leaseJSON) string { return strconv.Itoa(len(l.Keys)) }},
			{title: "FIRST KEY", cell: func(l *leaseJSON) string { return orDash(strings.Join(l.Keys[:min(1, len(l.Keys))], "")) }},
			{title: "OTHER KEYS", wide: true, cell: func(l *leaseJSON) string { return strings.Join(l.Keys[min(1, len(l.Keys)):], " ") }},
		},
		settled: func(l leaseJSON) leaseJSON {
			l.TTL = 0 // it runs down and is renewed all the time
			return l
		},
	})
}

// leases are those of the etcd that the options name, by their ids.
func (o *etcdOptions) leases(ctx context.Context) ([]leaseJSON, error) {
	var leases []leaseJSON
	err := o.do(ctx, func(ctx context.Context, client *kvstore.Client) error {
		infos, err := client.ListLeases(ctx)
		for _, l := range infos {
			slices.Sort(l.Keys)
			leases = append(leases, leaseJSON{
				ID: hex(uint64(l.ID)), TTL: int64(l.TTL.Seconds()), Granted: int64(l.Granted.Seconds()), Keys: present(l.Keys),
			})
		}
		return err
	})
	slices.SortFunc(leases, func(a, b leaseJSON) int { return cmp.Compare(a.ID, b.ID) })
	return leases, err
}
