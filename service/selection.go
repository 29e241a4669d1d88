// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"strings"
)

// Algorithm is how a backend is chosen for a new flow.
type Algorithm uint8

// The algorithms. AlgorithmDefault leaves it to the agent's configuration.
const (
	AlgorithmDefault Algorithm = iota
	Random
	Maglev
)

var algorithmNames = [...]string{AlgorithmDefault: "default", Random: "random", Maglev: "maglev"}

func (a Algorithm) String() string {
	if int(a) < len(algorithmNames) {
		return algorithmNames[a]
	}
	return fmt.Sprintf("algorithm %d", uint8(a))
}

// ParseAlgorithm reads "random" or "maglev", in any case.
func ParseAlgorithm(text string) (Algorithm, error) {
	for a, name := range algorithmNames {
		if Algorithm(a) != AlgorithmDefault && strings.EqualFold(name, text) {
			return Algorithm(a), nil
		}
	}
	return 0, fmt.Errorf("algorithm %q is none of random and maglev", text)
}

// Selection is what a frontend leads to now.
type Selection struct {
	Frontend
	Service Name
	// Backends are those in use, sorted and unique. With none, new flows are refused.
	Backends []Backend
	// ClientAffinity is for how many seconds a client that was sent to a backend is sent to it again; 0: each flow is a new
	// choice.
	ClientAffinity uint32
	Algorithm      Algorithm
}

// Change is a frontend whose selection changed.
type Change struct {
	// Selection is as it is now. Its Backends are given where Whole says so; of a deleted one only the frontend is given.
	Selection
	// Deleted: no local service has the frontend any more.
	Deleted bool
	// Whole: Backends replaces whatever the reader knows of the frontend. Otherwise those in Added are in use and those in
	// Removed are not, whether the reader knows it already or not, and nothing has happened to the others. Both are sorted.
	Whole          bool
	Added, Removed []Backend
}
