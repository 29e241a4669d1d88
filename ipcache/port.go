// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/json"
	"fmt"
	"iter"
	"sort"
)

// NamedPort is a port that a workload gives a name.
type NamedPort struct {
	Name     string
	Port     uint16
	Protocol string
}

// NamedPorts is a list of named ports in the one form of JSON in which [NewNamedPorts] writes it, which is that of
// announcements: it can be compared, and kept once for all workloads with the same ports. The zero value is the empty list.
type NamedPorts string

// namedPortsLimit is how long a list the table keeps: some forty ports. It drops those that are too many.
const namedPortsLimit = 2048

// NewNamedPorts returns the list of ports, in their order.
func NewNamedPorts(ports []NamedPort) NamedPorts {
	if len(ports) == 0 {
		return ""
	}
	text, err := json.Marshal(ports)
	if err != nil {
		panic(err) // strings and numbers always have a JSON
	}
	return NamedPorts(text)
}

// All yields the ports.
func (n NamedPorts) All() iter.Seq[NamedPort] {
	return func(yield func(NamedPort) bool) {
		for _, p := range n.list() {
			if !yield(p) {
				return
			}
		}
	}
}

func (n NamedPorts) list() []NamedPort {
	var ports []NamedPort
	if n != "" && json.Unmarshal([]byte(n), &ports) != nil {
		return nil // nobody but a careless conversion makes such a list
	}
	return ports
}

// MarshalJSON gives the list as it is.
func (n NamedPorts) MarshalJSON() ([]byte, error) {
	if n == "" {
		return []byte("null"), nil
	}
	return []byte(n), nil
}

// UnmarshalJSON reads a list in any form of JSON.
func (n *NamedPorts) UnmarshalJSON(text []byte) error {
	var ports []NamedPort
	if err := json.Unmarshal(text, &ports); err != nil {
		return fmt.Errorf("named ports: %w", err)
	}
	*n = NewNamedPorts(ports)
	return nil
}

// clip drops the last ports of a list that is too long to be kept.
func (n NamedPorts) clip() NamedPorts {
	if len(n) <= namedPortsLimit {
		return n
	}
	ports := n.list()
	fit := sort.Search(len(ports), func(i int) bool { return len(NewNamedPorts(ports[:i+1])) > namedPortsLimit })
	return NewNamedPorts(ports[:fit])
}
