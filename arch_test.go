// SPDX-License-Identifier: Apache-2.0

// Package weft_test holds the tree to its architecture: who may import whom, who alone may touch what, and what every
// package owes its reader. The reasons stand with the rules; ARCHITECTURE.md tells the whole.
package weft_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/weftmesh/weft"

// room is one folder of the tree.
type room struct {
	// may lists the folders of ours that it imports; "*" is all.
	may []string
	// pure: values and decisions only. No goroutines, no clock, no I/O.
	pure bool
	why  string
}

// rooms is the tree. A folder with Go code that is missing here is a breach: give it a row and a reason.
var rooms = map[string]room{
	".":                 {why: "this test only"},
	"identity":          {pure: true, why: "values that everybody shares depend on nobody"},
	"node":              {pure: true, why: "values that everybody shares depend on nobody"},
	"service":           {pure: true, why: "values that everybody shares depend on nobody"},
	"ipcache":           {pure: true, may: []string{"identity"}, why: "the table is where mesh and datapath meet: it must know neither"},
	"kvstore":           {why: "lists, watches and leases over keys and bytes; it knows no meanings"},
	"mesh":              {may: []string{"kvstore", "ipcache", "identity", "node", "service"}, why: "writes tables; what the kernel makes of them is not its business"},
	"endpoint":          {may: []string{"kvstore", "identity", "ipcache", "internal/kube", "internal/yamldir"}, why: "local workloads are claims and keys"},
	"operator":          {may: []string{"kvstore", "identity", "ipcache", "node", "service", "source", "internal/kube", "internal/certificate"}, why: "what is done once per cluster are keys in its etcd"},
	"source":            {may: []string{"node", "service", "internal/kube", "internal/yamldir"}, why: "what services there are, whoever asks: agent or operator"},
	"bpf":               {why: "C, its compiled form and its exact mirrors; it knows layouts, not meanings"},
	"datapath":          {may: []string{"bpf", "ipcache", "identity", "node", "service"}, why: "reads tables; where they come from is not its business"},
	"api":               {may: []string{"identity", "node", "service", "ipcache"}, why: "clients of the API must not link the agent"},
	"cmd/weft":          {may: []string{"*"}, why: "puts everything together"},
	"cmd/weft-lab":      {may: []string{"*"}, why: "puts everything together"},
	"internal/kube":     {why: "how to follow an API server, whatever of it"},
	"internal/yamldir":  {why: "what files declare, whoever reads them"},
	"internal/testutil": {may: []string{"internal/certificate", "internal/kubeapiserver"}, why: "serves the tests of every package, so it can depend on none"},
	"deploy/sbom":       {why: "reads finished binaries; it needs nothing of ours"},
	"test":              {may: []string{"*"}, why: "end-to-end tests"},

	"internal/certificate":   {why: "authorities and what they sign, whoever needs one"},
	"internal/kubeapiserver": {may: []string{"internal/certificate"}, why: "tests and the lab run the same API server; the binary of weft links none of it"},
}

// owner says who alone, in code that ships, may import a package or anything below it.
type owner struct {
	pkg   string
	rooms []string
	why   string
}

var owners = []owner{
	{"go.etcd.io/etcd/server", []string{"cmd/weft-lab", "internal/testutil"}, "an agent that links a server is three times the size"},
	{"go.etcd.io/etcd", []string{"kvstore", "cmd/weft-lab", "internal/testutil"}, "everything known of etcd's traps stands in one place"},
	{"github.com/fsnotify/fsnotify", []string{"mesh"}, "one directory is watched, by the package that owns it"},
	{"github.com/cilium/ebpf", []string{"bpf", "datapath"}, "kernel objects have one owner"},
	{"github.com/vishvananda/netlink", []string{"datapath", "cmd/weft-lab", "internal/testutil"}, "kernel objects have one owner; the lab builds hosts"},
	{"github.com/vishvananda/netns", []string{"cmd/weft-lab", "internal/testutil"}, "an agent never leaves its own network namespace"},
	{"golang.org/x/sys/unix", []string{"datapath", "cmd", "internal/testutil"}, "system calls belong to who owns kernel objects or processes"},
	{"k8s.io", []string{"endpoint", "operator", "source", "internal/kube"}, "Kubernetes is one source among several"},
	{"github.com/prometheus", []string{"cmd/weft"}, "metrics are one way of showing what status says"},
	{"github.com/spf13", []string{"cmd"}, "flags end where the configuration of a package begins"},
	{"os/signal", []string{"cmd"}, "a library that handles signals takes them from its caller"},
	{"testing", []string{"internal/testutil"}, "what ships does not link the test framework"},
}

// file is one parsed source file.
type file struct {
	path, room string
	test       bool
	ast        *ast.File
}

func within(dir, room string) bool { return dir == room || strings.HasPrefix(dir, room+"/") }

func sources(t *testing.T) []file {
	t.Helper()
	var files []file
	fset := token.NewFileSet()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin"):
			return filepath.SkipDir
		case d.IsDir() && path != ".": // a module of its own has rules of its own
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil {
				return filepath.SkipDir
			}
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		parsed, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		dir := filepath.Dir(path)
		name := dir
		for name != "." {
			if _, ok := rooms[name]; ok {
				break
			}
			name = filepath.Dir(name)
		}
		files = append(files, file{path: path, room: name, test: strings.HasSuffix(path, "_test.go"), ast: parsed})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestImports(t *testing.T) {
	for _, f := range sources(t) {
		if f.room == "." && filepath.Dir(f.path) != "." {
			t.Errorf("%s: folder has no row in the table of rooms", f.path)
		}
		for _, spec := range f.ast.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if rest, ours := strings.CutPrefix(path, module+"/"); ours {
				checkOurs(t, f, rest)
			} else if !f.test {
				checkOwner(t, f, path)
			}
		}
	}
}

func checkOurs(t *testing.T, f file, path string) {
	r := rooms[f.room]
	allowed := slices.ContainsFunc(r.may, func(may string) bool { return may == "*" || within(path, may) }) || within(path, f.room)
	if within(path, "internal/testutil") && !within(f.room, "internal") {
		allowed = f.test || f.room == "test"
	}
	if !allowed {
		t.Errorf("%s imports %s: %s", f.path, path, r.why)
	}
}

func checkOwner(t *testing.T, f file, path string) {
	for _, o := range owners {
		if !within(path, o.pkg) {
			continue
		}
		if !slices.ContainsFunc(o.rooms, func(room string) bool { return within(f.room, room) }) && f.room != "test" {
			t.Errorf("%s imports %s, which only %v may: %s", f.path, path, o.rooms, o.why)
		}
		return // the longest rule stands first
	}
	if rooms[f.room].pure && slices.Contains([]string{"os", "time", "context", "net/http", "log/slog"}, path) {
		t.Errorf("%s imports %s: %s holds values and decisions, no I/O and no clock", f.path, path, f.room)
	}
}

// TestShape checks what the compiler does not: constructors that start nothing, pure packages without goroutines, and
// exits only where a process is made.
func TestShape(t *testing.T) {
	for _, f := range sources(t) {
		if f.test {
			continue
		}
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			constructor := fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "New")
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.GoStmt:
					if constructor {
						t.Errorf("%s: %s starts a goroutine: New assembles, Run acts", f.path, fn.Name.Name)
					}
					if rooms[f.room].pure {
						t.Errorf("%s: %s starts a goroutine in a pure package", f.path, fn.Name.Name)
					}
				case *ast.CallExpr:
					if sel, ok := n.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Exit" && !within(f.room, "cmd") && f.room != "test" && f.room != "deploy/sbom" {
						if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "os" {
							t.Errorf("%s: %s exits: errors are returned, main alone ends the process", f.path, fn.Name.Name)
						}
					}
				}
				return true
			})
			if fn.Recv == nil && fn.Name.Name == "init" {
				t.Errorf("%s: init(): nothing here registers itself", f.path)
			}
		}
	}
}

// TestPackageComments: each package says once what it owns and what it hands on.
func TestPackageComments(t *testing.T) {
	comments := make(map[string][]string)
	for _, f := range sources(t) {
		dir := filepath.Dir(f.path)
		if f.test && dir != "." && dir != "test" {
			continue
		}
		comments[dir] = append(comments[dir], "")
		doc := f.ast.Doc.Text()
		if doc == "" {
			continue
		}
		comments[dir][0] += "x"
		want := "Package " + f.ast.Name.Name + " "
		if f.ast.Name.Name == "main" { // as for gofmt: "Gofmt formats Go programs."
			name := filepath.Base(dir)
			want = strings.ToUpper(name[:1]) + name[1:] + " "
		}
		if !strings.HasPrefix(doc, want) {
			t.Errorf("%s: the package comment begins %.40q, want %q", f.path, doc, want)
		}
	}
	for dir, n := range comments {
		if len(n[0]) != 1 {
			t.Errorf("%s has %d package comments, want one", dir, len(n[0]))
		}
	}
}

// TestLicences: every source file names its licence in its first line.
func TestLicences(t *testing.T) {
	const goLicence, bpfLicence = "// SPDX-License-Identifier: Apache-2.0", "SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)"
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		want := ""
		switch filepath.Ext(path) {
		case ".go":
			want = goLicence
			if strings.HasSuffix(path, "_bpfel.go") || strings.HasSuffix(path, "_bpfeb.go") {
				return nil
			}
		case ".c", ".h":
			want = bpfLicence
		default:
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if head, _, _ := strings.Cut(string(content), "\n\n"); !strings.Contains(head, want) {
			t.Errorf("%s: the first lines lack %q", path, want)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
