// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// Roles of the users of a cluster's etcd, by the names that Cilium gives them; those of weft's own daemons are weft's.
const (
	localRole    = "local"
	remoteRole   = "remote"
	agentRole    = "agent"
	operatorRole = "operator"

	// sharedUser is the one that clusters show who do not have one each.
	sharedUser = "remote"

	cacheTree = "cilium/cache/"
	stateTree = "cilium/state/"
	allKeys   = "cilium/"
	// operatorTree is where operators elect and fence.
	operatorTree = "weft/operator/"
)

// AccessConfig says who is to use a cluster's etcd.
type AccessConfig struct {
	Cluster string   // whose etcd it is
	Remotes []string // the clusters that read it; the own one among them is passed over
	// SharedUser lets clusters read by the user remote, which all of them have, besides one each.
	SharedUser bool
	// Username and Password are those that this is done with, where it is not done with a certificate.
	Username, Password string
}

// NewAccess returns who may do what in a cluster's etcd: the users and roles that Cilium has there (format A.14), one user for
// each remote cluster, and one each for the agents and the operators of the cluster itself, which write to it. A user is who
// shows a certificate of that common name.
//
// Users of remote clusters that are not named are to be deleted.
func NewAccess(cfg AccessConfig) (kvstore.Access, error) {
	if err := identity.ValidateClusterName(cfg.Cluster); err != nil {
		return kvstore.Access{}, err
	}
	a := kvstore.Access{Roles: accessRoles(cfg.Cluster), Prune: []string{remoteRole}}
	add := func(name, role string) { a.Users = append(a.Users, kvstore.User{Name: name, Role: role}) }
	add("root", kvstore.RootRole)
	add("admin-"+cfg.Cluster, kvstore.RootRole)
	add("local-"+cfg.Cluster, localRole)
	add("agent-"+cfg.Cluster, agentRole)
	add("operator-"+cfg.Cluster, operatorRole)
	if cfg.SharedUser {
		add(sharedUser, remoteRole)
	}
	remotes := slices.Compact(slices.Sorted(slices.Values(cfg.Remotes)))
	for _, remote := range remotes {
		if err := identity.ValidateClusterName(remote); err != nil {
			return kvstore.Access{}, fmt.Errorf("remote cluster: %w", err)
		}
		if remote != cfg.Cluster {
			add(RemoteUser(remote), remoteRole)
		}
	}
	for i, u := range a.Users {
		if u.Name == cfg.Username {
			a.Users[i].Password = string(cfg.Password)
		}
	}
	return a, nil
}

// RemoteUser is the user that a remote cluster has in the etcds of the others, and the common name of its certificate.
func RemoteUser(cluster string) string { return "remote-" + cluster }

// accessRoles are the roles in the etcd of a cluster.
func accessRoles(cluster string) []kvstore.Role {
	config := identity.ClusterConfigPrefix + "/"
	synced := identity.SyncedPrefix + "/"
	read := func(prefix string) kvstore.Grant { return kvstore.Grant{Key: prefix, Prefix: true} }
	write := func(prefix string) kvstore.Grant { return kvstore.Grant{Key: prefix, Prefix: true, Write: true} }
	return []kvstore.Role{
		{Name: kvstore.RootRole},
		{Name: localRole, Grants: []kvstore.Grant{read(identity.HeartbeatKey), read(cacheTree), read(config), read(synced)}},
		{Name: remoteRole, Grants: []kvstore.Grant{
			read(identity.HeartbeatKey), read(stateTree), {Key: config + cluster}, read(synced + cluster + "/"),
		}},
		{Name: agentRole, Grants: []kvstore.Grant{
			read(allKeys), write(stateTree), {Key: config + cluster, Write: true}, write(synced + cluster + "/"),
		}},
		{Name: operatorRole, Grants: []kvstore.Grant{write(allKeys), write(operatorTree)}},
	}
}

// CertificateUsers are the users that a certificate is to be made for, in order: all but root, whose certificate would open
// every cluster's etcd.
func CertificateUsers(a kvstore.Access) []string {
	var names []string
	for _, u := range a.Users {
		if u.Name != "root" {
			names = append(names, u.Name)
		}
	}
	slices.SortFunc(names, cmp.Compare[string])
	return names
}
