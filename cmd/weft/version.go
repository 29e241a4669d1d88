// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

// version is set by the release build; others say what the module system knows.
var version string

// versionInfo describes this binary.
func versionInfo() api.VersionInfo {
	v := api.VersionInfo{
		Meta: api.MetaOf(api.KindVersion), Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		v.Version = cmp.Or(v.Version, build.Main.Version)
		for _, s := range build.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	v.Version = cmp.Or(v.Version, "(devel)")
	return v
}

func versionCommand(env environment, c *clientOptions) *cobra.Command {
	var out *output
	var agent *bool
	cmd := newCommand("version", "Show the version of this binary, or of the running agent", func(cmd *cobra.Command, _ []string) error {
		v := versionInfo()
		if *agent {
			var err error
			if v, err = api.NewClient(c.socket).Version(cmd.Context()); err != nil {
				return err
			}
		}
		revision := ""
		if v.Revision != "" {
			revision = " (" + v.Revision + ")"
		}
		return out.show(env.stdout, v, func(t *table) { t.row(fmt.Sprintf("weft %s%s %s %s", v.Version, revision, v.Go, v.Platform)) })
	})
	out = outputFlags(cmd)
	agent = cmd.Flags().Bool("agent", false, "ask the running agent instead")
	return cmd
}
