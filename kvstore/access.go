// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// RootRole is the role that may do everything. It needs no grants.
const RootRole = "root"

// ErrLockOut indicates that whoever is about to have etcd ask everybody who
// they are would be refused from then on.
var ErrLockOut = errors.New("we would be locked out")

// Access is who may do what in an etcd, once it asks everybody who they are.
type Access struct {
	Roles []Role
	Users []User
	// Prune are roles. Users that have one of them and nothing else, and are
	// not among Users, are deleted.
	Prune []string
}

// Role is what its users may do.
type Role struct {
	Name   string
	Grants []Grant // none of RootRole
}

// Grant lets keys be read: one, or all that begin with it.
type Grant struct {
	Key    string `json:"key"`
	Prefix bool   `json:"prefix,omitempty"`
	Write  bool   `json:"write,omitempty"` // and be written
}

// User is somebody who may do what a role may.
type User struct {
	Name string // the common name of a certificate, or what is logged in with
	Role string
	// Password, where the user is made. Empty: a certificate is the only way.
	Password string
}

// AccessAction is what an AccessChange does.
type AccessAction string

// The actions, in the order in which they are done: when etcd begins to ask,
// nothing lets anybody in that should be gone.
const (
	AddRole    AccessAction = "add-role"
	Allow      AccessAction = "grant" // Grant to Role
	AddUser    AccessAction = "add-user"
	GiveRole   AccessAction = "give-role" // Role to User
	TakeRole   AccessAction = "take-role" // Role from User
	Revoke     AccessAction = "revoke"    // Grant, or an unusual range, from Role
	DeleteUser AccessAction = "delete-user"
	EnableAuth AccessAction = "enable-authentication"
)

// AccessChange is a step towards an Access.
type AccessChange struct {
	Action AccessAction `json:"action"`
	User   string       `json:"user,omitempty"`
	Role   string       `json:"role,omitempty"`
	Grant  *Grant       `json:"grant,omitempty"`
	// End, of Revoke, is where a range ends that is neither a key nor a prefix.
	End string `json:"end,omitempty"`

	password string
}

// String says what the change does, or has done.
func (x AccessChange) String() string {
	switch x.Action {
	case AddRole:
		return "add role " + x.Role
	case Allow:
		return fmt.Sprintf("let role %s %s", x.Role, x.Grant)
	case Revoke:
		if x.End != "" {
			return fmt.Sprintf("no longer let role %s %s up to %q", x.Role, x.Grant, x.End)
		}
		return fmt.Sprintf("no longer let role %s %s", x.Role, x.Grant)
	case AddUser:
		return "add user " + x.User
	case DeleteUser:
		return "delete user " + x.User
	case GiveRole:
		return fmt.Sprintf("give role %s to user %s", x.Role, x.User)
	case TakeRole:
		return fmt.Sprintf("take role %s from user %s", x.Role, x.User)
	}
	return "enable authentication: etcd asks everybody who they are"
}

// String says what the grant allows.
func (g Grant) String() string {
	verb, what := "read", "key "+g.Key
	if g.Write {
		verb = "read and write"
	}
	if g.Prefix {
		what = "the keys that begin with " + g.Key
	}
	return verb + " " + what
}

func (g Grant) permission() permission {
	p := permission{key: g.Key, kind: clientv3.PermissionType(clientv3.PermRead)}
	if g.Prefix {
		p.end = clientv3.GetPrefixRangeEnd(g.Key)
	}
	if g.Write {
		p.kind = clientv3.PermissionType(clientv3.PermReadWrite)
	}
	return p
}

// permission is a grant as etcd has it.
type permission struct {
	key, end string
	kind     clientv3.PermissionType
}

// access is who may do what in an etcd as it is.
type access struct {
	enabled bool
	roles   map[string][]permission
	users   map[string][]string // roles
}

// PlanAccess reads who may do what, and returns what is to be done so that it
// is as wanted. Roles and users that are not named in want are none of its
// business, but for those that Prune is about.
func (c *Client) PlanAccess(ctx context.Context, want Access) ([]AccessChange, error) {
	have, err := c.readAccess(ctx)
	if err != nil {
		return nil, err
	}
	changes := have.changes(want)
	if have.enabled {
		return changes, nil
	}
	if err := c.mayEnable(want, have); err != nil {
		return changes, err
	}
	return append(changes, AccessChange{Action: EnableAuth}), nil
}

// ApplyAccess does what PlanAccess returned, and returns what of it was done,
// also beside an error. Done again, it goes on where it ended.
func (c *Client) ApplyAccess(ctx context.Context, changes []AccessChange) (done []AccessChange, err error) {
	for i, x := range changes {
		if err := c.applyAccess(ctx, x); err != nil {
			return changes[:i], fmt.Errorf("%s: %w", x, c.explain(err))
		}
	}
	return changes, nil
}

func (c *Client) applyAccess(ctx context.Context, x AccessChange) (err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	switch x.Action {
	case AddRole:
		_, err = c.etcd.RoleAdd(ctx, x.Role)
	case Allow:
		p := x.Grant.permission()
		_, err = c.etcd.RoleGrantPermission(ctx, x.Role, p.key, p.end, p.kind)
	case Revoke:
		p := x.Grant.permission()
		if x.End != "" {
			p.end = x.End
		}
		_, err = c.etcd.RoleRevokePermission(ctx, x.Role, p.key, p.end)
	case AddUser:
		_, err = c.etcd.UserAddWithOptions(ctx, x.User, x.password, &clientv3.UserAddOptions{NoPassword: x.password == ""})
	case DeleteUser:
		_, err = c.etcd.UserDelete(ctx, x.User)
	case GiveRole:
		_, err = c.etcd.UserGrantRole(ctx, x.User, x.Role)
	case TakeRole:
		_, err = c.etcd.UserRevokeRole(ctx, x.User, x.Role)
	case EnableAuth:
		if _, err = c.etcd.AuthEnable(ctx); err == nil {
			_, err = c.etcd.UserList(ctx) // by which name it is asked for, only now shows
		}
	}
	return err
}

// mayEnable returns ErrLockOut if etcd, once it asks, would not let this
// client do what it does now.
func (c *Client) mayEnable(want Access, have access) error {
	name, err := c.cfg.name()
	if err != nil {
		return err
	}
	const advice = "use a client certificate whose common name, or a user who, has the role " + RootRole
	if name == "" {
		return fmt.Errorf("%w: the configuration has neither a user nor a client certificate: %s", ErrLockOut, advice)
	}
	for _, u := range want.Users {
		if u.Name == name && u.Role == RootRole {
			return nil
		}
	}
	if slices.Contains(have.users[name], RootRole) {
		return nil
	}
	return fmt.Errorf("%w: we are %q, which has not the role %s: %s", ErrLockOut, name, RootRole, advice)
}

// name is by which name an etcd that asks would know us; "" if by none.
func (c Config) name() (string, error) {
	if c.Username != "" {
		return c.Username, nil
	}
	if c.CertFile == "" {
		return "", nil
	}
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		return "", fmt.Errorf("client certificate: %w", err)
	}
	return pair.Leaf.Subject.CommonName, nil
}

// readAccess reads who may do what.
func (c *Client) readAccess(ctx context.Context) (access, error) {
	have := access{roles: make(map[string][]permission), users: make(map[string][]string)}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	steps := []struct {
		what string
		read func(context.Context, *access) error
	}{
		{"authentication", c.readEnabled}, {"roles", c.readRoles}, {"users", c.readUsers},
	}
	for _, step := range steps {
		if err := step.read(ctx, &have); err != nil {
			return access{}, fmt.Errorf("read etcd's %s: %w", step.what, c.explain(err))
		}
	}
	return have, nil
}

// readEnabled finds out whether etcd asks who somebody is: from 3.5 on it
// tells, and before, by what it answers to a login as nobody.
func (c *Client) readEnabled(ctx context.Context, have *access) error {
	told, err := c.etcd.AuthStatus(ctx)
	if err == nil {
		have.enabled = told.Enabled
		return nil
	}
	if status.Code(err) != codes.Unimplemented {
		return err
	}
	_, err = c.etcd.Authenticate(ctx, "", "")
	have.enabled = !errors.Is(err, rpctypes.ErrAuthNotEnabled)
	return nil
}

func (c *Client) readRoles(ctx context.Context, have *access) error {
	roles, err := c.etcd.RoleList(ctx)
	if err != nil {
		return err
	}
	for _, name := range roles.Roles {
		role, err := c.etcd.RoleGet(ctx, name)
		if err != nil {
			return err
		}
		have.roles[name] = permissionsOf(role.Perm)
	}
	return nil
}

func permissionsOf(perms []*authpb.Permission) []permission {
	all := make([]permission, len(perms))
	for i, p := range perms {
		all[i] = permission{string(p.Key), string(p.RangeEnd), clientv3.PermissionType(p.PermType)}
	}
	return all
}

func (c *Client) readUsers(ctx context.Context, have *access) error {
	users, err := c.etcd.UserList(ctx)
	if err != nil {
		return err
	}
	for _, name := range users.Users {
		user, err := c.etcd.UserGet(ctx, name)
		if err != nil {
			return err
		}
		have.users[name] = user.Roles
	}
	return nil
}

// changes is the way from what is to what is wanted, but for authentication
// itself.
func (have access) changes(want Access) []AccessChange {
	var add, take []AccessChange
	for _, r := range want.Roles {
		more, less := have.roleChanges(r)
		add, take = append(add, more...), append(take, less...)
	}
	wanted := make(map[string]bool, len(want.Users))
	for _, u := range want.Users {
		more, less := have.userChanges(u)
		add, take = append(add, more...), append(take, less...)
		wanted[u.Name] = true
	}
	for name, roles := range have.users {
		stale := len(roles) > 0 && !wanted[name]
		for _, role := range roles {
			stale = stale && slices.Contains(want.Prune, role)
		}
		if stale {
			take = append(take, AccessChange{Action: DeleteUser, User: name})
		}
	}
	all := append(add, take...)
	order := []AccessAction{AddRole, Allow, AddUser, GiveRole, TakeRole, Revoke, DeleteUser}
	slices.SortStableFunc(all, func(a, b AccessChange) int {
		by := cmp.Compare(slices.Index(order, a.Action), slices.Index(order, b.Action))
		if by == 0 && a.Action == DeleteUser {
			by = cmp.Compare(a.User, b.User)
		}
		return by
	})
	return all
}

func (have access) roleChanges(r Role) (add, take []AccessChange) {
	existing, exists := have.roles[r.Name]
	if !exists {
		add = append(add, AccessChange{Action: AddRole, Role: r.Name})
	}
	if r.Name == RootRole {
		return add, nil
	}
	var wanted []permission
	for _, g := range r.Grants {
		p := g.permission()
		if !slices.Contains(existing, p) {
			add = append(add, AccessChange{Action: Allow, Role: r.Name, Grant: &g})
		}
		wanted = append(wanted, p)
	}
	for _, p := range existing {
		sameRange := func(q permission) bool { return p.key == q.key && p.end == q.end }
		if slices.ContainsFunc(wanted, sameRange) {
			continue // a range has one permission, which Allow replaces
		}
		g := Grant{Key: p.key, Write: p.kind != clientv3.PermissionType(clientv3.PermRead)}
		g.Prefix = p.end != "" && p.end == clientv3.GetPrefixRangeEnd(p.key)
		x := AccessChange{Action: Revoke, Role: r.Name, Grant: &g}
		if !g.Prefix {
			x.End = p.end
		}
		take = append(take, x)
	}
	return add, take
}

func (have access) userChanges(u User) (add, take []AccessChange) {
	roles, exists := have.users[u.Name]
	if !exists {
		add = append(add, AccessChange{Action: AddUser, User: u.Name, password: u.Password})
	}
	if !slices.Contains(roles, u.Role) {
		add = append(add, AccessChange{Action: GiveRole, User: u.Name, Role: u.Role})
	}
	for _, role := range roles {
		if role != u.Role {
			take = append(take, AccessChange{Action: TakeRole, User: u.Name, Role: role})
		}
	}
	return add, take
}
