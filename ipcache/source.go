// SPDX-License-Identifier: Apache-2.0

package ipcache

import "fmt"

// Source is where a claim comes from. Sources are ordered, the strongest first: a claim of a stronger source wins over
// every claim of a weaker one for the same prefix.
type Source uint8

// The sources, strongest first, with the names and the order that Cilium gives them.
const (
	KubeAPIServer Source = iota
	Local
	KVStore
	CustomResource
	K8s
	ClusterMesh
	Directory
	API
	Generated
	Restored
	Unspec
)

var sourceNames = [...]string{
	"kube-apiserver", "local", "kvstore", "custom-resource", "k8s", "clustermesh", "directory", "api", "generated",
	"restored", "unspec",
}

// String is the name by which the source is known to users.
func (s Source) String() string {
	if int(s) < len(sourceNames) {
		return sourceNames[s]
	}
	return fmt.Sprintf("source(%d)", uint8(s))
}

// MarshalText makes the name the source's form in JSON.
func (s Source) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what [Source.MarshalText] writes.
func (s *Source) UnmarshalText(text []byte) error {
	for i, name := range sourceNames {
		if name == string(text) {
			*s = Source(i)
			return nil
		}
	}
	return fmt.Errorf("unknown source %q", text)
}
