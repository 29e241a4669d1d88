// SPDX-License-Identifier: Apache-2.0

package job

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMark(t *testing.T) {
	want := Mark{Event: Ended, Package: "bpf", Exit: 2, Took: 3 * time.Second, Text: "signal: killed\n\"quoted\""}
	line := want.Line("run-1f")
	got, ok := ParseMark("run-1f", line)
	if diff := cmp.Diff(want, got); !ok || diff != "" {
		t.Errorf("mark %q (-want +got):\n%s", line, diff)
	}
	for _, other := range []string{"", "ok", "run-1f", "run-1f ok", "run-1f0 {}", " " + line, "x" + line, line[:len(line)-1]} {
		if got, ok := ParseMark("run-1f", other); ok {
			t.Errorf("ParseMark(%q) = %+v, want none", other, got)
		}
	}
}

func TestRead(t *testing.T) {
	want := Job{ID: "run-1f", Modules: []string{"/modules/veth.ko"},
		Runs: []Run{{Package: "bpf", Dir: "/weft/bpf", Binary: "/tests/bpf", Args: []string{"-test.run", "."}}}}
	content, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "job.json")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Read(file)
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("Read: %v (-want +got):\n%s", err, diff)
	}
	if _, err := Read(file + ".absent"); err == nil {
		t.Error("Read of a file that is not there: no error")
	}
}
