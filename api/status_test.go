// SPDX-License-Identifier: Apache-2.0

package api

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAssess(t *testing.T) {
	attached := []Device{{Name: "eth0", Programs: []DeviceProgram{{Name: "weft_from_netdev", Attached: true}}}}
	for name, tc := range map[string]struct {
		harm func(*Status)
		want []string
	}{
		"well": {func(*Status) {}, []string{}},
		"cluster": {func(s *Status) {
			s.Clusters = []Cluster{{Name: "west", State: "connecting", LastError: "connection refused"}, {Name: "north", Ready: true}, {Name: "south", State: "stale"}}
		}, []string{"cluster west is connecting: connection refused: see `weft troubleshoot kvstore west`", "cluster south is stale"}},
		"a cluster that goes is no problem": {func(s *Status) {
			s.Clusters = []Cluster{{Name: "west", State: "draining", LastError: "connection refused"}}
		}, []string{}},
		"rejections of others are theirs": {func(s *Status) {
			s.Clusters = []Cluster{{Name: "west", Ready: true, Rejected: map[string]uint64{"ip/range": 3}}}
		}, []string{}},
		"quotas": {func(s *Status) {
			s.Clusters = []Cluster{
				{Name: "at", Ready: true, Quotas: Quotas{Entries: Quota{250, 250}, Bytes: Quota{7, 7}}},
				{Name: "refused", Ready: true, Quotas: Quotas{Entries: Quota{250, 250}, Bytes: Quota{7, 0}, Full: true}},
				{Name: "lowered", Ready: true, Quotas: Quotas{Entries: Quota{250, 100}, Bytes: Quota{7, 7}}},
				{Name: "bytes", Ready: true, Quotas: Quotas{Entries: Quota{2, 100}, Bytes: Quota{900, 1000}, Full: true}},
				{Name: "bytes-lowered", Ready: true, Quotas: Quotas{Entries: Quota{2, 0}, Bytes: Quota{900, 800}}},
				{Name: "held-back", Ready: true, Quotas: Quotas{HeldBack: 3}},
			}
		}, []string{
			"cluster refused: quota max-entries: 250 of 250: what goes beyond is refused: raise it in --mesh-limits if it should have more",
			"cluster lowered: quota max-entries: 250 of 100: what goes beyond is refused: raise it in --mesh-limits if it should have more",
			"cluster bytes: quota max-bytes: 900 of 1000: what goes beyond is refused: raise it in --mesh-limits if it should have more",
			"cluster bytes-lowered: quota max-bytes: 900 of 800: what goes beyond is refused: raise it in --mesh-limits if it should have more",
		}},
		"config":    {func(s *Status) { s.Config = []ConfigError{{File: "w_est", Message: "bad name"}} }, []string{"configuration: w_est: bad name"}},
		"endpoints": {func(s *Status) { s.Endpoints.Errors = []ConfigError{{"a.yaml", 3, "bad ip"}} }, []string{"endpoints: a.yaml:3: bad ip"}},
		"kvstore": {func(s *Status) {
			s.KVStore = &KVStore{Ready: true, Keys: 4, Pending: 2, LastError: "timeout", KeyErrors: map[string]string{"k": "exists"}}
		}, []string{"kvstore: 2 changes are not published yet: timeout: see `weft troubleshoot kvstore`", "kvstore: key k: exists"}},
		"old errors of others are past": {func(s *Status) {
			s.KVStore = &KVStore{Ready: true, Connected: true, Pending: 1, LastError: "timeout"}
			s.Clusters = []Cluster{{Name: "west", Ready: true, LastError: "timeout"}}
		}, []string{}},
		"map full": {func(s *Status) { s.Datapath.Map = Map{Full: true, MaxEntries: 10, Pending: 3} },
			[]string{"datapath: the ipcache map is full (10 entries) and 3 changes wait: restart with a larger --max-ipcache-entries"}},
		"no device": {func(s *Status) { s.Datapath.Devices = nil }, []string{"datapath: no device: name some with --devices"}},
		"device": {func(s *Status) {
			s.Datapath.Devices[0].Programs = []DeviceProgram{{Name: "weft_to_netdev", Error: "gone"}}
		},
			[]string{"datapath: device eth0: weft_to_netdev is not attached: gone: it is tried again at once; `weft diagnose` names what is in its way"}},
		"not ready": {func(s *Status) { s.Datapath.Ready, s.Datapath.Errors = false, []string{"route: denied"} },
			[]string{"datapath: the kernel has not been brought in line yet", "datapath: route: denied"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := Status{Datapath: Datapath{Ready: true, Devices: append([]Device{}, attached...)}}
			tc.harm(&s)
			s.Assess()
			if diff := cmp.Diff(tc.want, s.Problems); diff != "" || s.Healthy != (len(tc.want) == 0) {
				t.Errorf("healthy %v, problems (-want +got)\n%s", s.Healthy, diff)
			}
		})
	}
}
