// SPDX-License-Identifier: Apache-2.0

// Command kubeapiserver is the API server of Kubernetes, for tests. It is a Go module of its own, so that what it needs
// is no dependency of weft.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	os.Exit(cli.Run(app.NewAPIServerCommand()))
}
