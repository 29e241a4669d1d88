// SPDX-License-Identifier: Apache-2.0

package mesh

import "fmt"

// longestName is the most characters that Kubernetes gives a name.
const longestName = 253

// plainName reports whether text, which may be empty, can be the name of a node, a namespace or a workload: characters that
// print and have no meaning in a key. It is looked at for every entry, and therefore is no regular expression.
func plainName(text string) bool {
	if len(text) > longestName || text == "." || text == ".." {
		return false
	}
	for i := range len(text) {
		if c := text[i]; c <= ' ' || c > '~' || c == '/' {
			return false
		}
	}
	return true
}

// sizes are the bytes that the objects of one kind take, by key.
type sizes map[string]int

func (s sizes) has(key []byte) bool {
	_, ok := s[string(key)]
	return ok
}

func (s sizes) len() int { return len(s) }

// entriesLeft is how many more entries the cluster may have, less than none if it has too many; a large number without a
// quota.
func (g *gate) entriesLeft() int {
	most := g.rules().limits.MaxEntries
	if most == 0 {
		return 1 << 30
	}
	return most - g.entries()
}

// entries is how many the cluster has, those that wait included.
func (g *gate) entries() int { return g.table.ClaimsOf(g.cluster) + int(g.held.Load()) }

// spendBytes finds whether the quota leaves room for so many more bytes.
func (g *gate) spendBytes(more int) error {
	if g == nil || more <= 0 {
		return nil
	}
	most := g.rules().limits.MaxBytes
	if most == 0 || g.bytes.Load()+int64(more) <= most {
		return nil
	}
	return limited(reasonQuota, fmt.Errorf("the cluster has its %d bytes of nodes, services and identities; "+
		"raise its max-bytes in the limits if it should have more", most))
}

func (g *gate) addBytes(n int) {
	if g != nil {
		g.bytes.Add(int64(n))
	}
}

// hasRoom reports whether no quota is used up.
func (g *gate) hasRoom() bool {
	most := g.rules().limits.MaxBytes
	return g.entriesLeft() > 0 && (most == 0 || g.bytes.Load() < most)
}

// keysPerEntry bounds the keys of one kind that are remembered at all, refused ones included, by the quota of entries.
const keysPerEntry = 4

// mostKeys is how many keys of one kind are worth to be remembered, 0: any number.
func (g *gate) mostKeys() int {
	if g == nil {
		return 0
	}
	return keysPerEntry * g.rules().limits.MaxEntries
}

// Quota is how much a cluster has of something, and how much it may have; Limit 0: any amount.
type Quota struct {
	Used  int64 `json:"used"`
	Limit int64 `json:"limit"`
}

// Quotas are the quotas of a cluster.
type Quotas struct {
	// Entries are its claims in the ipcache, winners or not, and those that wait.
	Entries Quota `json:"entries"`
	// Bytes are those of the keys and values of its nodes, services and identities.
	Bytes Quota `json:"bytes"`
	// EventsPerSecond is the bound on its changes, 0: none. HeldBack counts how often it made the cluster wait.
	EventsPerSecond int64  `json:"eventsPerSecond,omitempty"`
	HeldBack        uint64 `json:"heldBack,omitempty"`
	// Full: objects of the cluster are refused because a quota is used up.
	Full bool `json:"full,omitempty"`
}

// quotas reports what the status says of them.
func (fs *feeds) quotas() Quotas {
	g := fs.gate
	if g == nil {
		return Quotas{}
	}
	l := &g.rules().limits
	q := Quotas{
		Entries:         Quota{int64(g.entries()), int64(l.MaxEntries)},
		Bytes:           Quota{g.bytes.Load(), l.MaxBytes},
		EventsPerSecond: int64(l.MaxEventsPerSecond), HeldBack: g.pace.held.Load(),
	}
	for _, f := range fs.inDrainOrder() {
		q.Full = q.Full || f.hungry()
	}
	return q
}

// waiting is how many announcements wait for their node.
func (fs *feeds) waiting() int {
	if fs.gate == nil {
		return 0
	}
	return int(fs.gate.held.Load())
}
