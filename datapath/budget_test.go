// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

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

// budgetEnv, if it is in the environment, makes TestVerifierBudget measure as whoever it runs as.
const budgetEnv = "WEFT_TEST_BUDGET"

// TestVerifierBudget prints what each program costs the verifier of this kernel, as root and with the two capabilities that
// suffice, where the verifier thinks of speculation and so walks more.
//
// lesson: K7
func TestVerifierBudget(t *testing.T) {
	if who := os.Getenv(budgetEnv); who != "" {
		measureBudget(t, who)
		return
	}
	testutil.RequireRoot(t)
	measureBudget(t, "root")
	if olderThan(kernelRelease(), "5.11") {
		return // which takes CAP_PERFMON, too
	}
	cmd := exec.Command(copyOfThis(t), "-test.run=^TestVerifierBudget$", "-test.v")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), budgetEnv+"=two capabilities")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: 65534, Gid: 65534},
		AmbientCaps: []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN},
		Pdeathsig:   syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if _, line, ok := strings.Cut(line, "verifier budget: "); ok {
			t.Log("verifier budget: " + strings.TrimSpace(line))
		}
	}
	if err != nil {
		t.Errorf("as nobody with two capabilities: %v\n%s", err, out)
	}
}

func measureBudget(t *testing.T, who string) {
	t.Helper()
	raiseMemlock()
	spec, err := bpf.Load()
	if err != nil {
		t.Fatal(err)
	}
	services, err := bpf.LoadServices(refusesProperly())
	if err != nil {
		t.Fatal(err)
	}
	measureBudgetOf(t, who, spec, bpf.AllPrograms())
	measureBudgetOf(t, who, services, bpf.ServicePrograms[:])
	translation, err := bpf.LoadTranslation()
	if err != nil {
		t.Fatal(err)
	}
	measureBudgetOf(t, who, translation, bpf.TranslationPrograms[:])
}

func measureBudgetOf(t *testing.T, who string, spec *ebpf.CollectionSpec, programs []bpf.Program) {
	t.Helper()
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	for _, p := range programs {
		log := loaded.Programs[p.Name].VerifierLog
		instructions := logged(t, log, `processed (\d+) insns`)
		stack := deepestStack(t, spec.Programs[p.Name].Instructions, log)
		line := fmt.Sprintf("verifier budget: %-18s Linux %s, %s: %6d instructions processed (%.1f%% of %d), stack %d bytes (%.0f%% of %d)",
			p.Name, kernelRelease(), who, instructions, 100*float64(instructions)/verifierInstructions, verifierInstructions,
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

// deepestStack is the stack, in bytes, of the deepest chain of calls in a program, each function rounded up as by the kernel.
// The verifier's log tells the functions' depths in the order of their code.
func deepestStack(t *testing.T, code asm.Instructions, log string) int {
	t.Helper()
	found := regexp.MustCompile(`stack depth ([\d+]+)`).FindStringSubmatch(log)
	if found == nil {
		t.Fatalf("no stack depth in the verifier's log:\n%s", log)
	}
	own, calls, functions := map[string]int{}, map[string][]string{}, []string{}
	for i := range code {
		if name := code[i].Symbol(); name != "" && (i == 0 || !strings.HasPrefix(name, "LBB")) {
			functions = append(functions, name)
		}
		if code[i].IsFunctionCall() {
			in := functions[len(functions)-1]
			calls[in] = append(calls[in], code[i].Reference())
		}
	}
	depths := strings.Split(found[1], "+")
	if len(depths) != len(functions) {
		t.Fatalf("stack depths %v of functions %v", depths, functions)
	}
	for i, depth := range depths {
		n, err := strconv.Atoi(depth)
		if err != nil {
			t.Fatalf("stack depth %q", depth)
		}
		const unit = 32
		own[functions[i]] = (max(n, 1) + unit - 1) / unit * unit
	}
	var deepest func(string) int
	deepest = func(name string) int {
		under := 0
		for _, callee := range calls[name] {
			if _, ok := own[callee]; !ok {
				t.Fatalf("%s calls %q, which is none of %v", name, callee, functions)
			}
			under = max(under, deepest(callee))
		}
		return own[name] + under
	}
	return deepest(functions[0])
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
