// SPDX-License-Identifier: Apache-2.0

// Sbom prints what a Go binary is made of, as a bill of materials in CycloneDX 1.5 (JSON):
//
//	sbom BINARY
//
// It is read off the binary itself, so it is of what was linked, and the same for the same binary.
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"runtime/debug"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

// document is a bill of materials (https://cyclonedx.org/docs/1.5/json/).
type document struct {
	Format       string       `json:"bomFormat"`
	Version      string       `json:"specVersion"`
	Revision     int          `json:"version"`
	Metadata     metadata     `json:"metadata"`
	Components   []component  `json:"components"`
	Dependencies []dependency `json:"dependencies"`
}

type metadata struct {
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PURL       string     `json:"purl,omitempty"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type dependency struct {
	Ref       string   `json:"ref"`
	DependsOn []string `json:"dependsOn"`
}

func run(args []string, out io.Writer) error {
	if len(args) != 1 {
		return fmt.Errorf("want one binary, got %d arguments", len(args))
	}
	content, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(args[0])
	if err != nil {
		return err
	}
	sum := sha256.Sum256(content)
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(list(info, hex.EncodeToString(sum[:])))
}

// list makes the bill of a build.
func list(info *debug.BuildInfo, sum string) document {
	main := module(&info.Main)
	main.Type, main.Hashes = "application", []hash{{"SHA-256", sum}}
	for _, s := range info.Settings {
		if s.Key == "GOOS" || s.Key == "GOARCH" || s.Key == "CGO_ENABLED" || strings.HasPrefix(s.Key, "vcs") {
			main.Properties = append(main.Properties, property{"go:" + s.Key, s.Value})
		}
	}
	toolchain := strings.TrimPrefix(info.GoVersion, "go")
	std := component{Type: "library", Ref: "pkg:golang/std@" + toolchain, Name: "std", Version: toolchain, PURL: "pkg:golang/std@" + toolchain}
	d := document{
		Format: "CycloneDX", Version: "1.5", Revision: 1, Metadata: metadata{main}, Components: []component{std},
		Dependencies: []dependency{{Ref: main.Ref, DependsOn: []string{std.Ref}}},
	}
	for _, dep := range info.Deps {
		if dep.Replace != nil {
			dep = dep.Replace
		}
		c := module(dep)
		d.Components = append(d.Components, c)
		d.Dependencies[0].DependsOn = append(d.Dependencies[0].DependsOn, c.Ref)
	}
	return d
}

// module is a module of Go as a component. Its sum in go.sum is one of a list of files, so it is no hash but a property.
func module(m *debug.Module) component {
	purl := "pkg:golang/" + m.Path + "@" + url.PathEscape(m.Version)
	c := component{Type: "library", Ref: purl, Name: m.Path, Version: m.Version, PURL: purl}
	if m.Sum != "" {
		c.Properties = []property{{"go:sum", m.Sum}}
	}
	return c
}
