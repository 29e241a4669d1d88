// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// options are the fields of Config that hold for every etcd of a process, and
// so are set beside its file, by the names that Cilium gives them where it has
// them.
var options = map[string]func(c *Config, value string) error{
	"etcd.qps":                number(func(c *Config, n int) { c.QPS = n }),
	"etcd.burst":              number(func(c *Config, n int) { c.Burst = n }),
	"etcd.maxInflight":        number(func(c *Config, n int) { c.MaxInflight = n }),
	"etcd.bootstrapQps":       number(func(c *Config, n int) { c.BootstrapQPS = n }),
	"etcd.limit":              number(func(c *Config, n int) { c.PageSize = int64(n) }),
	"etcd.maxMessageBytes":    number(func(c *Config, n int) { c.MaxMessageBytes = n }),
	"etcd.keepaliveHeartbeat": duration(func(c *Config, d time.Duration) { c.KeepAliveInterval = d }),
	"etcd.keepaliveTimeout":   duration(func(c *Config, d time.Duration) { c.KeepAliveTimeout = d }),
	"etcd.livenessTimeout":    duration(func(c *Config, d time.Duration) { c.LivenessTimeout = d }),
	"etcd.heartbeatTimeout":   duration(func(c *Config, d time.Duration) { c.HeartbeatTimeout = d }),
	"etcd.initialTimeout":     duration(func(c *Config, d time.Duration) { c.InitialTimeout = d }),
	"etcd.compareInterval":    duration(func(c *Config, d time.Duration) { c.CompareInterval = d }),
	"etcd.lockTTL":            duration(func(c *Config, d time.Duration) { c.LockTTL = d }),
	"etcd.lockTimeout":        duration(func(c *Config, d time.Duration) { c.LockTimeout = d }),
}

func number(set func(*Config, int)) func(*Config, string) error {
	return func(c *Config, value string) error {
		n, err := strconv.Atoi(value)
		if err != nil || n < 1 {
			return fmt.Errorf("%q is not a number above 0", value)
		}
		set(c, n)
		return nil
	}
}

func duration(set func(*Config, time.Duration)) func(*Config, string) error {
	return func(c *Config, value string) error {
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			return fmt.Errorf("%q is not a duration above 0, such as 15s", value)
		}
		set(c, d)
		return nil
	}
}

// SetOption sets a field by the name of its option, such as etcd.qps. An error
// about a name lists those that there are.
func (c *Config) SetOption(name, value string) error {
	set, ok := options[name]
	if !ok {
		return fmt.Errorf("unknown option %q: there are %s", name, strings.Join(slices.Sorted(maps.Keys(options)), ", "))
	}
	if err := set(c, value); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
