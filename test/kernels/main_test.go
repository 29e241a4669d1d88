// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/test/kernels/job"
)

func TestArguments(t *testing.T) {
	opts, err := parseArgs([]string{"-v", "-run", "TestX", "-pkg", "bpf", "6.1", "6.6"}, io.Discard)
	want := options{series: []string{"6.1", "6.6"}, suites: suites[:1], run: "TestX", timeout: 30 * time.Minute, verbose: true}
	if diff := cmp.Diff(want, opts, cmp.AllowUnexported(options{}, suite{})); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	opts, err = parseArgs(nil, io.Discard)
	want = options{series: []string{"5.10", "6.1", "6.12"}, suites: suites, run: ".", timeout: 30 * time.Minute}
	if diff := cmp.Diff(want, opts, cmp.AllowUnexported(options{}, suite{})); err != nil || diff != "" {
		t.Errorf("defaults: %v (-want +got):\n%s", err, diff)
	}
	for _, args := range []string{"6", "6.12.1", "6.x", "6.1 -v", "-run ( 6.1", "-pkg mesh", "-fast"} {
		var stderr bytes.Buffer
		if code := run(t.Context(), strings.Fields(args), io.Discard, &stderr); code != 2 || stderr.Len() == 0 {
			t.Errorf("%s: exit code %d, says %q, want 2 and why", args, code, &stderr)
		}
	}
}

func TestSelection(t *testing.T) {
	s := suite{pkg: "x", olderSkip: "^TestNew"}
	for _, tc := range []struct {
		suite       suite
		series, run string
		want        string
	}{
		{s, "6.12", "TestA", "-test.run TestA"},
		{s, "6.6", "TestA", "-test.run TestA"},
		{s, "6.1", "TestA", "-test.run TestA -test.skip ^TestNew"},
		{s, "5.10", "TestA", "-test.run TestA -test.skip ^TestNew"},
		{suite{pkg: "x"}, "6.1", ".", "-test.run . -test.skip "},
	} {
		if got := strings.Join(tc.suite.flags(tc.series, tc.run), " "); got != tc.want {
			t.Errorf("%+v on %s: %q, want %q", tc.suite, tc.series, got, tc.want)
		}
	}
}

// TestRoot checks that everything that the job names lies in the machine's root.
func TestRoot(t *testing.T) {
	host := t.TempDir()
	write := func(name, content string) string {
		file := filepath.Join(host, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o755)); err != nil {
			t.Fatal(err)
		}
		return file
	}
	k := kernel{series: "6.1", modules: filepath.Join(host, "modules")}
	dep := ""
	for _, module := range wantedModules {
		write("modules/kernel/"+module+".ko", module)
		dep += "kernel/" + module + ".ko:\n"
	}
	write("modules/modules.dep", dep)
	write("modules/modules.builtin", "")
	write("src/test/testdata/golden.json", "golden")
	write("src/bpf/testdata/a.json", "a")
	p := payload{
		root: filepath.Join(host, "src"), init: write("init", "init"), suites: suites[:1],
		tests: map[string]string{"bpf": write("bpf.test", "bpf")}, tools: []string{write("ip", "ip")},
	}
	j, modules, err := p.job(k, runID, ".", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := p.fill(newArchive(&out), k, j, modules); err != nil {
		t.Fatal(err)
	}
	root := make(map[string]string)
	for _, e := range unpack(t, out.Bytes()) {
		root["/"+e.Name] = e.Content
	}
	want := map[string]string{
		"/init": "init", p.tools[0]: "ip", j.Runs[0].Binary: "bpf",
		j.Runs[0].Dir + "/testdata/a.json": "a", j.Runs[0].Dir + "/../test/testdata/golden.json": "golden",
	}
	for i, module := range j.Modules {
		want[module] = wantedModules[i]
	}
	for file, content := range want {
		if got, ok := root[filepath.Clean(file)]; !ok || got != content {
			t.Errorf("%s: %q %v, want %q", file, got, ok, content)
		}
	}
	description := filepath.Join(host, "job.json")
	if err := os.WriteFile(description, []byte(root[job.File]), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := job.Read(description)
	if diff := cmp.Diff(j, got); err != nil || diff != "" {
		t.Errorf("job: %v (-want +got):\n%s", err, diff)
	}
}

func TestTable(t *testing.T) {
	good := row{release: "6.12.117", took: 65 * time.Second, results: []result{
		{pkg: "bpf", passed: 28, ended: true, took: 34200 * time.Millisecond},
		{pkg: "datapath", passed: 30, skipped: 1, ended: true, took: 21 * time.Second},
	}}
	bad := row{release: "6.1.0-56", took: 12 * time.Second, wrong: "the machine died in the tests of datapath", results: []result{
		{pkg: "bpf", passed: 1, failed: 1, failures: []string{"TestA", "TestA/b"}, ended: true, exit: 1, took: time.Second},
		{pkg: "datapath"},
	}}
	var out bytes.Buffer
	if table(&out, []row{bad, good}) {
		t.Error("a table with a failure says that all is well")
	}
	want := `
KERNEL    PACKAGE   PASSED  FAILED  SKIPPED  TIME   RESULT
6.1.0-56  bpf       1       1       0        1.0s   exit 1 TestA TestA/b
6.1.0-56  datapath  0       0       0        0.0s   no result
6.1.0-56  all                                12.0s  the machine died in the tests of datapath
6.12.117  bpf       28      0       0        34.2s  ok
6.12.117  datapath  30      0       1        21.0s  ok
6.12.117  all                                65.0s  ok
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
	if !table(io.Discard, []row{good}) {
		t.Error("a table without a failure says that not all is well")
	}
}

func TestIdle(t *testing.T) {
	some, none := result{pkg: "bpf", passed: 1}, result{pkg: "datapath", skipped: 3}
	for _, tc := range []struct {
		results []result
		all     bool
		want    string
	}{
		{[]result{some}, true, ""},
		{[]result{some, none}, true, "datapath: no test ran"},
		{[]result{some, none}, false, ""},
		{[]result{none}, false, "no test ran"},
		{nil, true, "no test ran"},
	} {
		if got := idle(tc.results, tc.all); got != tc.want {
			t.Errorf("idle(%+v, %v) = %q, want %q", tc.results, tc.all, got, tc.want)
		}
	}
}
