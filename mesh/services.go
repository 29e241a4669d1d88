// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"strings"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/service"
)

// services decodes the services that a cluster shares.
type services struct {
	table   *service.Table
	cluster identity.ClusterID
	name    string
}

var _ decoder = (*services)(nil)

func (d *services) upsert(key, value []byte, _ int64) error {
	if _, _, ok := parseServiceKey(string(key)); !ok {
		return refuse(reasonMalformed, fmt.Errorf("service key %q is not of the form namespace/name", key))
	}
	s, err := service.Parse(value)
	if err != nil {
		return refuse(reasonMalformed, err)
	}
	if err := s.Validate(string(key), d.name, uint32(d.cluster)); err != nil {
		return refuse(reasonMismatch, err)
	}
	d.table.Upsert(s)
	return nil
}

func (d *services) remove(key []byte) {
	if namespace, name, ok := parseServiceKey(string(key)); ok {
		d.table.Delete(d.name, namespace, name)
	}
}

// parseServiceKey reads "namespace/name". With more slashes than one a key could stand for several services.
func parseServiceKey(key string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(key, "/")
	return namespace, name, ok && namespace != "" && name != "" && !strings.Contains(name, "/")
}

func (d *services) flush(time.Time) {}
