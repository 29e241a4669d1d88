// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/operator"
)

// view is what the API shows of the operator.
func (d *operatorDaemon) view() api.Operator {
	return api.Operator{
		Version: versionInfo, Status: d.status, Metrics: newHandler(d.log, operatorCollector{d.status}),
	}
}

// status reports on every part of the operator.
func (d *operatorDaemon) status() api.OperatorStatus {
	from := d.operator.Status()
	s := api.OperatorStatus{
		Meta: api.MetaOf(api.KindOperatorStatus), Version: versionInfo().Version, Started: d.started, Name: from.Name,
		Cluster:  api.LocalCluster{Name: d.cfg.clusterName, ID: d.cfg.clusterID, MaxConnectedClusters: uint16(d.cfg.maxConnectedClusters)},
		Election: from.Election, IsLeader: from.Leads, Since: from.Since, Terms: from.Terms, Leader: from.Leader.Name, LeaderSince: from.Leader.Since,
		LastError: errorText(from.LastError), LastErrorAt: from.LastErrorAt,
		Sources: []api.OperatorSource{}, Duties: []api.OperatorDuty{}, Tasks: tasksOf(d.tasks),
	}
	k := from.KVStore
	s.KVStore = &api.KVStore{
		Endpoints: present(k.Endpoints), Endpoint: k.Endpoint, Connected: k.Connected, State: string(k.State), Since: k.Since,
		ServerVersion: k.ServerVersion, Warning: k.Warning, EtcdClusterID: hex(k.EtcdClusterID), Revision: k.Revision, Ready: from.Leads,
		Leases: []string{}, LastError: errorText(k.LastError), LastErrorAt: k.LastErrorAt, LastContact: k.LastContact,
		Certificates: makeCertificates(k.Certificates), CertificateWarnings: k.Warnings,
	}
	if from := d.services; from != nil {
		s.Sources = append(s.Sources, api.OperatorSource{Name: from.String(), Ready: isClosed(from.Ready()), Objects: from.Len(), Problems: from.Problems()})
	}
	if from := d.nodes; from != nil {
		all, _ := from.Nodes().Snapshot()
		s.Sources = append(s.Sources, api.OperatorSource{Name: from.String(), Ready: isClosed(from.Ready()), Objects: len(all), Problems: from.Problems()})
	}
	for _, duty := range from.Duties {
		s.Duties = append(s.Duties, makeDuty(&duty))
		s.KVStore.Keys += duty.Keys
		s.KVStore.Pending += duty.Pending
	}
	s.Assess()
	return s
}

func makeDuty(d *operator.DutyStatus) api.OperatorDuty {
	return api.OperatorDuty{
		Name: d.Name, Running: d.Running, Ready: d.Ready, Runs: d.Runs, Errors: d.Errors, Deleted: d.Deleted, Keys: d.Keys, Pending: d.Pending,
		LastRun: d.LastRun, LastDuration: d.LastDuration, LastError: errorText(d.LastError), LastErrorAt: d.LastErrorAt,
		Problems: d.Problems, Detail: d.Detail,
	}
}

func operatorStatusCommand(env environment, socket *string) *cobra.Command {
	var out *output
	cmd := newCommand("status", "Show how the operator is, who leads, and what the leader does", func(cmd *cobra.Command, _ []string) error {
		s, err := api.NewOperatorClient(*socket).Operator(cmd.Context())
		if err != nil {
			return err
		}
		if err := out.show(env.stdout, s, func(t *table) { showOperator(t, &s) }); err != nil || s.Healthy {
			return err
		}
		return errUnhealthy
	})
	out = outputFlags(cmd)
	return cmd
}

func showOperator(t *table, s *api.OperatorStatus) {
	verdict := "ok"
	if !s.Healthy {
		verdict = count(len(s.Problems), "problem")
	}
	t.row("Operator:", verdict+", "+s.Name)
	t.rows("Problems:", s.Problems)
	t.row("Cluster:", fmt.Sprintf("%s, id %d", s.Cluster.Name, s.Cluster.ID))
	if s.KVStore != nil {
		state := "connected"
		if !s.KVStore.Connected {
			state = "not connected"
		}
		t.row("Etcd:", fmt.Sprintf("%s, %s, revision %d", orDash(s.KVStore.Endpoint), state, s.KVStore.Revision))
	}
	t.row("Election:", s.Election)
	if s.IsLeader {
		t.row("Leader:", "this replica, since "+s.Since.Format(time.RFC3339))
	} else {
		t.row("Leader:", orDash(s.Leader))
	}
	for _, source := range s.Sources {
		t.row("Source "+source.Name+":", readiness(source.Ready)+", "+count(source.Objects, "object"))
	}
	for i := range s.Duties {
		t.row("Duty "+s.Duties[i].Name+":", dutyText(&s.Duties[i]))
	}
}

func readiness(ready bool) string {
	if ready {
		return "ready"
	}
	return "not ready"
}

func dutyText(d *api.OperatorDuty) string {
	if !d.Running {
		return "the leader's"
	}
	text := readiness(d.Ready)
	if d.Keys > 0 {
		text += ", " + count(d.Keys, "key")
	}
	if d.Pending > 0 {
		text += ", " + strconv.Itoa(d.Pending) + " not written yet"
	}
	text += ", " + count(int(d.Runs), "run") + ", " + count(int(d.Errors), "error")
	if d.Deleted > 0 {
		text += fmt.Sprintf(", %d deleted", d.Deleted)
	}
	if d.Detail != "" {
		text += ": " + d.Detail
	}
	return text
}
