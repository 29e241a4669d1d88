// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// Every option sets one field, and no two the same one.
//
// mechanism: C1, C2
func TestSetOption(t *testing.T) {
	seen := make(map[string]string)
	for name := range options {
		var c Config
		value := "7"
		if err := c.SetOption(name, value); err != nil {
			value = "7s"
			if err := c.SetOption(name, value); err != nil {
				t.Errorf("%s: takes neither a number nor a duration: %v", name, err)
				continue
			}
		}
		v := reflect.ValueOf(c)
		set := ""
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				continue
			}
			set += v.Type().Field(i).Name
			if got := v.Field(i).Int(); got != 7 && got != int64(7*time.Second) {
				t.Errorf("%s=%s sets %s to %d", name, value, v.Type().Field(i).Name, got)
			}
		}
		if other, taken := seen[set]; set == "" || taken {
			t.Errorf("%s sets %q, as does %q", name, set, other)
		}
		seen[set] = name
		for _, bad := range []string{"", "0", "-1", "x", "0s", "-1s"} {
			if err := c.SetOption(name, bad); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s=%s: %v, want an error that names the option", name, bad, err)
			}
		}
	}
	if err := new(Config).SetOption("etcd.QPS", "1"); err == nil || !strings.Contains(err.Error(), "etcd.qps") {
		t.Errorf("unknown option: %v, want an error that lists those that there are", err)
	}
	c := Config{QPS: 1, KeepAliveInterval: 1}.withDefaults()
	if c.QPS != 1 || c.KeepAliveInterval != 1 || c.KeepAliveTimeout != 25*time.Second {
		t.Errorf("defaults %+v", c)
	}
	if c := (Config{}).withDefaults(); c.QPS != 20 || c.KeepAliveInterval != 15*time.Second || c.KeepAliveTimeout != 25*time.Second {
		t.Errorf("defaults %+v", c)
	}
}
