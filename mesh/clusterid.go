// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"sync"

	"github.com/weftmesh/weft/identity"
)

// errConflict indicates a cluster that uses the id of another cluster of the mesh.
var errConflict = errors.New("cluster id is in use")

// clusterIDs says which remote cluster of the mesh holds which id. It is safe for concurrent use.
type clusterIDs struct {
	mu     sync.Mutex
	holder map[identity.ClusterID]string
	freed  chan struct{} // closed and replaced when an id becomes free
}

func newClusterIDs() *clusterIDs {
	return &clusterIDs{holder: make(map[identity.ClusterID]string), freed: make(chan struct{})}
}

// reserve gives id to the cluster called name, which may have it already. The error wraps [errConflict].
func (c *clusterIDs) reserve(id identity.ClusterID, name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if holder, taken := c.holder[id]; taken && holder != name {
		return fmt.Errorf("%w: cluster %s says that its id is %d, which cluster %s holds; give one of the two another id",
			errConflict, name, id, holder)
	}
	c.holder[id] = name
	return nil
}

// release frees id if the cluster called name holds it.
func (c *clusterIDs) release(id identity.ClusterID, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.holder[id] != name {
		return
	}
	delete(c.holder, id)
	close(c.freed)
	c.freed = make(chan struct{})
}

// changed returns a channel that is closed when an id becomes free. Take it before the attempt that it guards.
func (c *clusterIDs) changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.freed
}
