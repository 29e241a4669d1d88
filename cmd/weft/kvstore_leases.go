// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
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
	var output *format
	const short = "List the leases and what is left of them: the keys of a lease go when nobody renews it"
	cmd := newCommand("leases", short, func(cmd *cobra.Command, _ []string) error {
		leases := []leaseJSON{}
		err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) error {
			infos, err := client.ListLeases(ctx)
			for _, l := range infos {
				slices.Sort(l.Keys)
				leases = append(leases, leaseJSON{
					ID: hex(uint64(l.ID)), TTL: int64(l.TTL.Seconds()), Granted: int64(l.Granted.Seconds()), Keys: present(l.Keys),
				})
			}
			return err
		})
		if err != nil {
			return err
		}
		slices.SortFunc(leases, func(a, b leaseJSON) int { return cmp.Compare(a.ID, b.ID) })
		if *output == formatJSON {
			return printJSON(env.stdout, api.List[leaseJSON]{Meta: api.MetaOf(kindLeaseList), Items: leases})
		}
		t := newTable(env.stdout, "LEASE", "TTL", "GRANTED", "KEYS", "FIRST KEY")
		for _, l := range leases {
			first := "-"
			if len(l.Keys) > 0 {
				first = l.Keys[0]
			}
			t.row(l.ID, strconv.FormatInt(l.TTL, 10)+"s", strconv.FormatInt(l.Granted, 10)+"s", strconv.Itoa(len(l.Keys)), first)
		}
		return t.flush()
	})
	output = outputFlag(cmd)
	return cmd
}
