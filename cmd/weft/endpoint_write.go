// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/endpoint"
)

// endpointFlags are the options of `weft endpoint add`.
type endpointFlags struct {
	namespace, serviceAccount, identity string
	id                                  uint16
	ips                                 []netip.Addr
	labels                              []labelFlag
	ports                               []portFlag
}

func endpointAdd(env environment, c *clientOptions) *cobra.Command {
	var (
		out *output
		f   endpointFlags
	)
	const short = "Add a workload of this node, or change the one of that name"
	cmd := newCommand("add NAME", short, func(cmd *cobra.Command, args []string) error {
		if len(f.ips) == 0 {
			return usagef("--ip: an endpoint has at least one address")
		}
		change, err := api.NewClient(c.socket).PutEndpoint(cmd.Context(), f.spec(args[0]))
		if err != nil {
			return err
		}
		return printEndpointChange(env, out, f.namespace+"/"+args[0], change)
	})
	out = outputFlags(cmd)
	f.declare(cmd.Flags())
	return cmd
}

func (f *endpointFlags) declare(flags *pflag.FlagSet) {
	flags.StringVar(&f.namespace, "namespace", defaultNamespace, "`name` of its namespace")
	flags.StringVar(&f.serviceAccount, "service-account", "", "`name` of its service account (default: default)")
	flags.Var(&list[netip.Addr]{&f.ips, parseNodeIP, netip.Addr.String, "addresses", false}, "ip", "address of the workload, IPv4 or IPv6")
	flags.Var(&list[labelFlag]{&f.labels, parseLabel, labelFlag.String, "labels", false}, "label", "label, as key=value")
	flags.Var(&list[portFlag]{&f.ports, parsePort, portFlag.String, "ports", false}, "port", "named port, as name=number or name=number/protocol")
	flags.Uint16Var(&f.id, "id", 0, "`number` that tells it from others of this node (default: one made of its name)")
	flags.StringVar(&f.identity, "identity", "", "`number` of its identity (default: the one that belongs to its labels)")
}

// spec is the endpoint that the options describe. The agent checks it.
func (f *endpointFlags) spec(name string) api.EndpointSpec {
	spec := api.EndpointSpec{
		Name: name, Namespace: f.namespace, ServiceAccount: f.serviceAccount, ID: f.id, IPs: f.ips, Identity: f.identity,
		Labels: make(map[string]string, len(f.labels)),
	}
	for _, l := range f.labels {
		spec.Labels[l.key] = l.value
	}
	for _, p := range f.ports {
		spec.Ports = append(spec.Ports, api.EndpointPort(p))
	}
	return spec
}

func endpointRemove(env environment, c *clientOptions) *cobra.Command {
	var (
		out       *output
		namespace string
	)
	cmd := newCommand("remove NAME", "Remove a workload that was added", func(cmd *cobra.Command, args []string) error {
		change, err := api.NewClient(c.socket).RemoveEndpoint(cmd.Context(), namespace, args[0])
		if err != nil {
			return err
		}
		return printEndpointChange(env, out, namespace+"/"+args[0], change)
	})
	cmd.Aliases = []string{"rm"}
	out = outputFlags(cmd)
	cmd.Flags().StringVar(&namespace, "namespace", defaultNamespace, "`name` of its namespace")
	return cmd
}

// defaultNamespace is where workloads are that name no other.
const defaultNamespace = "default"

func printEndpointChange(env environment, out *output, name string, change api.EndpointChange) error {
	return out.result(env.stdout, change, fmt.Sprintf("endpoint %s %s", name, change.Change), name, change.Change)
}

// labelFlag is one label of --label.
type labelFlag struct{ key, value string }

func (l labelFlag) String() string { return l.key + "=" + l.value }

func parseLabel(text string) (labelFlag, error) {
	key, value, ok := strings.Cut(text, "=")
	if !ok || key == "" {
		return labelFlag{}, fmt.Errorf("%q: want key=value", text)
	}
	return labelFlag{key, value}, nil
}

// portFlag is one port of --port.
type portFlag api.EndpointPort

func (p portFlag) String() string {
	text := p.Name + "=" + strconv.Itoa(int(p.Port))
	if p.Protocol != "" {
		text += "/" + p.Protocol
	}
	return text
}

func parsePort(text string) (portFlag, error) {
	name, rest, ok := strings.Cut(text, "=")
	number, protocol, _ := strings.Cut(rest, "/")
	port, err := strconv.ParseUint(number, 10, 16)
	if !ok || name == "" || err != nil || port == 0 {
		return portFlag{}, fmt.Errorf("%q: want name=number or name=number/protocol, such as http=8080", text)
	}
	return portFlag{Name: name, Port: uint16(port), Protocol: protocol}, nil
}

// addedEndpoints is the agent's store of added endpoints in the terms of the API.
type addedEndpoints struct{ source *endpoint.Manual }

var _ api.EndpointStore = addedEndpoints{}

func (s addedEndpoints) PutEndpoint(entry []byte) (added bool, err error) {
	added, err = s.source.Put(entry)
	return added, blamed(err)
}

func (s addedEndpoints) RemoveEndpoint(namespace, name string) error {
	return blamed(s.source.Remove(namespace, name))
}

// blamedError is an error that the API is to tell as one of its own.
type blamedError struct{ cause, kind error }

func (e *blamedError) Error() string   { return e.cause.Error() }
func (e *blamedError) Unwrap() []error { return []error{e.cause, e.kind} }

func blamed(err error) error {
	switch {
	case errors.Is(err, endpoint.ErrRefused):
		return &blamedError{err, api.ErrRefused}
	case errors.Is(err, endpoint.ErrUnknown):
		return &blamedError{err, api.ErrNotFound}
	}
	return err
}
