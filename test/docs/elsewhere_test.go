// SPDX-License-Identifier: Apache-2.0

package docs

// elsewhere are the commands that cannot be run here, why, and who runs them.
var elsewhere = map[string]struct {
	why  string
	file string // that runs it
	text string // as it stands there
}{
	"weft-lab demo": {"it makes a lab of its own, and takes long", "cmd/weft-lab/demo_test.go", `l.must("demo")`},
	"make packages": {"it builds what is installed here by hand", "test/packages/main.go", "deploy/packages/build"},
	"apt-get install ./bin/packages/weft_*_amd64.deb etcd-server": {"it needs a system of its own", "test/packages/guest", "dpkg -i weft.deb"},
}
