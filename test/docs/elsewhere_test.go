// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// elsewhere are the commands of a page that cannot be run here, by how they begin, why, and who runs them.
var elsewhere = []struct {
	page, begins, why string
	file, text        string // who runs it, as it stands there
}{
	{"README.md", "make build", "it builds what is run here", "test/docs/main_test.go", `"go", "build"`},
	{"README.md", "make demo", "its lab is that of a test of its own", "cmd/weft-lab/demo_test.go", `l.must("demo")`},
	{"README.md", "make test", "it runs this", ".ci/run", "make test"},
	{"CONTRIBUTING.md", "make", "it runs this", ".ci/run", "make check"},
	{"docs/lab.md", "weft-lab demo", "its lab is that of a test of its own", "cmd/weft-lab/demo_test.go", `l.must("demo")`},
	{"docs/page.md", "ssh -L", "there is no ssh server", "test/page_test.go", "b.Open("},
	{"docs/performance.md", "", "it measures for an hour, and needs the machine for itself", "Makefile", "-bench '$(or $(BENCH),.)'"},
	{"docs/vms.md", "make packages", "the system that it is for is made by that", "test/packages/main.go", `"packages", "build"`},
	{"docs/vms.md", "apt-get install", "it changes the system", "test/packages/guest", "dpkg -i weft.deb"},
	{"docs/install.md", "make packages", "the system that it is for is made by that", "test/packages/main.go", `"packages", "build"`},
	{"docs/install.md", "apt-get install", "it changes the system", "test/packages/guest", "dpkg -i weft.deb"},
	{"docs/install.md", "apt-get remove", "it changes the system", "test/packages/guest", "dpkg --remove weft"},
	{"docs/kubernetes.md", "", "it needs nodes that run containers", "test/chart/chart_test.go", "../../docs/kubernetes.md"},
	{"vagrant/README.md", "", "it needs four virtual machines", "vagrant/test", "vagrant up --no-parallel"},
}

// runElsewhere: what the table says of a command.
func runElsewhere(page string, c testutil.Command) bool {
	for _, e := range elsewhere {
		if e.page == page && strings.HasPrefix(c.Text, e.begins) {
			return true
		}
	}
	return false
}

// told: some story does the page.
func told(file string) bool {
	for _, pages := range stories {
		if slices.ContainsFunc(pages, func(p *page) bool { return p.file == file }) {
			return true
		}
	}
	return false
}

// Every command in a block of a page is on a page that a story does, or the table says who runs it; and what the table says is so.
func TestEveryPage(t *testing.T) {
	used := make([]bool, len(elsewhere))
	blocks := 0
	for _, file := range testutil.Documents(t, root) {
		page, err := filepath.Rel(root, file)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range testutil.Blocks(t, file) {
			blocks++
			if b.Language != "sh" && b.Language != "console" {
				continue
			}
			for _, c := range b.Commands() {
				here := true
				for i, e := range elsewhere {
					if e.page == page && strings.HasPrefix(c.Text, e.begins) {
						here, used[i] = false, true
					}
				}
				if here && !told(page) {
					t.Errorf("%s:%d: nobody runs %s", page, c.Line, c.Text)
				}
			}
		}
	}
	if blocks < 100 {
		t.Errorf("the documents have %d blocks: where are they?", blocks)
	}
	for i, e := range elsewhere {
		if !used[i] {
			t.Errorf("the table says that %q of %s is run elsewhere, and there is no such command", e.begins, e.page)
		}
		content, err := os.ReadFile(filepath.Join(root, e.file))
		if err != nil || !strings.Contains(string(content), e.text) {
			t.Errorf("%q of %s: %s does not run it: there is no %q (%v)", e.begins, e.page, e.file, e.text, err)
		}
	}
}
