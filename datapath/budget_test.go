// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
)

// What the kernels' verifiers allow a program, and the part of it that ours may use: another kernel, or another compiler,
// needs more.
const (
	verifierInstructions = 1_000_000
	verifierStack        = 512
	instructionsPercent  = 50
	stackPercent         = 75
)

// TestVerifierBudget prints what each program costs the verifier of this kernel.
//
// lesson: K7
func TestVerifierBudget(t *testing.T) {
	testutil.RequireRoot(t)
	spec, err := bpf.Load()
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	for _, p := range bpf.AllPrograms() {
		log := loaded.Programs[p.Name].VerifierLog
		instructions := logged(t, log, `processed (\d+) insns`)
		stack := 0
		for _, depth := range strings.Split(regexp.MustCompile(`stack depth ([\d+]+)`).FindStringSubmatch(log + "stack depth 0")[1], "+") {
			n, err := strconv.Atoi(depth)
			if err != nil {
				t.Fatalf("stack depth %q", depth)
			}
			stack += n
		}
		line := fmt.Sprintf("verifier budget: %-18s Linux %s: %6d instructions processed (%.1f%% of %d), stack %d bytes (%.0f%% of %d)",
			p.Name, kernelRelease(), instructions, 100*float64(instructions)/verifierInstructions, verifierInstructions,
			stack, 100*float64(stack)/verifierStack, verifierStack)
		t.Log(line)
		if instructions*100 > verifierInstructions*instructionsPercent || stack*100 > verifierStack*stackPercent {
			t.Errorf("%s: more than %d%% of the instructions or %d%% of the stack", line, instructionsPercent, stackPercent)
		}
		if instructions == 0 || stack == 0 {
			t.Errorf("%s: the verifier's log says nothing of it:\n%s", p.Name, log)
		}
	}
}

// logged finds a number in a log.
func logged(t *testing.T, log, pattern string) int {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(log)
	if found == nil {
		t.Fatalf("no %q in the verifier's log:\n%s", pattern, log)
	}
	n, err := strconv.Atoi(found[1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}
