// SPDX-License-Identifier: Apache-2.0

// Package kube owns how weft talks to an API server of Kubernetes: clients that know the groups they need and no others,
// and reflectors that hand on objects instead of keeping them. What the objects mean is its callers' business.
package kube

import (
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Access reads where an API server is and how one is known there: from a kubeconfig file or, where none is named, from the
// service account of the pod that this runs in. agent is what it is called in the server's log.
func Access(kubeconfig, agent string) (*rest.Config, error) {
	var (
		access *rest.Config
		err    error
	)
	if kubeconfig == "" {
		if access, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("kubernetes: %w: outside of a pod, name a kubeconfig file", err)
		}
	} else if access, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	access = rest.CopyConfig(access)
	access.UserAgent = agent
	access.WarningHandler = rest.NoWarnings{}
	return access, nil
}

// Client returns a client of one group, whose types add knows: one of all groups would double the size of the binary. The
// API server need not be there.
func Client(access *rest.Config, group schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	access = rest.CopyConfig(access)
	access.GroupVersion = &group
	access.APIPath = "/apis"
	if group.Group == "" {
		access.APIPath = "/api"
	}
	access.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	access.ContentType, access.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	client, err := rest.RESTClientFor(access)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return client, nil
}

// refusal is what to say of an error of the server, with what to do where it is about rights.
func refusal(err error, needs string) string {
	text := Shorten(err.Error())
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		text += ": " + needs
	}
	return text
}

// Shorten bounds a text that a server sent.
func Shorten(text string) string {
	const longest = 400
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest], "") + "..."
}
