// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"strings"
)

// The annotations of a service, in the order in which they count.
var (
	globalAnnotations    = []string{"service.cilium.io/global", "io.cilium/global-service"}
	sharedAnnotations    = []string{"service.cilium.io/shared", "io.cilium/shared-service"}
	affinityAnnotations  = []string{"service.cilium.io/affinity", "io.cilium/service-affinity"}
	algorithmAnnotations = []string{"service.cilium.io/lb-algorithm"}
)

// Settings are what the annotations of a service say.
type Settings struct {
	Global    bool // backends of other clusters are wanted
	Shared    bool // backends are offered to other clusters
	Affinity  Affinity
	Algorithm Algorithm
}

// Affinity is whose backends are preferred.
type Affinity uint8

// The affinities.
const (
	AffinityNone   Affinity = iota // all are alike
	AffinityLocal                  // other clusters' where no local one is ready
	AffinityRemote                 // local ones where no other cluster's is ready
)

var affinityNames = [...]string{AffinityNone: "none", AffinityLocal: "local", AffinityRemote: "remote"}

func (a Affinity) String() string { return affinityNames[a] }

// ParseAffinity reads "none", "local" or "remote", in any case.
func ParseAffinity(text string) (Affinity, error) {
	for a, name := range affinityNames {
		if strings.EqualFold(text, name) {
			return Affinity(a), nil
		}
	}
	return AffinityNone, fmt.Errorf("affinity %q is none of none, local and remote", text)
}

// ParseSettings reads the annotations of a service (format.md, C.7). With an error, which names the annotations that say
// nothing sensible, the settings hold what the others say.
func ParseSettings(annotations map[string]string) (Settings, error) {
	var (
		s    Settings
		errs []error
	)
	find := func(keys []string) (key, value string, ok bool) {
		for _, key := range keys {
			if value, ok := annotations[key]; ok {
				return key, value, true
			}
		}
		return "", "", false
	}
	if _, value, ok := find(globalAnnotations); ok {
		s.Global = strings.EqualFold(value, "true")
	}
	s.Shared = s.Global
	if _, value, ok := find(sharedAnnotations); ok {
		s.Shared = s.Global && strings.EqualFold(value, "true")
	}
	if key, value, ok := find(affinityAnnotations); ok && s.Global {
		var err error
		if s.Affinity, err = ParseAffinity(value); err != nil {
			errs = append(errs, fmt.Errorf("annotation %s: %w", key, err))
		}
	}
	if key, value, ok := find(algorithmAnnotations); ok {
		var err error
		if s.Algorithm, err = ParseAlgorithm(value); err != nil {
			errs = append(errs, fmt.Errorf("annotation %s: %w", key, err))
		}
	}
	return s, errors.Join(errs...)
}
