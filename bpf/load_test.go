// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// mostVerified bounds what the verifier has to walk through, of the million instructions that it will: a tenth, so that
// a change that makes it explode is seen here before an older kernel refuses it.
const mostVerified = 100_000

// lesson: K7
func TestVerifiedInstructions(t *testing.T) {
	k := loadKernel(t)
	for _, p := range AllPrograms() {
		info, err := k.Programs[p.Name].Info()
		if err != nil {
			t.Fatal(err)
		}
		verified, ok := info.VerifiedInstructions()
		if !ok {
			t.Fatalf("%s: this kernel does not tell how many instructions it verified: want Linux 5.16 or later", p.Name)
		}
		size, err := info.TranslatedSize()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d instructions verified, %d bytes translated, tag %s", p.Name, verified, size, info.Tag)
		if verified > mostVerified {
			t.Errorf("%s: the verifier walked %d instructions, want at most %d", p.Name, verified, mostVerified)
		}
	}
}

// TestTagTellsTheCode: a program's tag depends on neither settings nor sizes of maps, so that a restarted agent can
// tell by it whether the attached program is the one that it would load.
func TestTagTellsTheCode(t *testing.T) {
	a := loadKernel(t)
	b := loadKernel(t, func(spec *ebpf.CollectionSpec) { spec.Maps[MapIPCache].MaxEntries = 1000 })
	b.configure(t, MakeConfig(7, true))
	tags := map[string]string{}
	for _, p := range AllPrograms() {
		for _, k := range []*kernel{a, b} {
			info, err := k.Programs[p.Name].Info()
			if err != nil {
				t.Fatal(err)
			}
			if tag, ok := tags[p.Name]; ok && tag != info.Tag {
				t.Errorf("%s: tags %s and %s", p.Name, tag, info.Tag)
			}
			tags[p.Name] = info.Tag
		}
	}
	if tags[Programs[Ingress].Name] == tags[Programs[Egress].Name] {
		t.Error("the programs have the same tag")
	}
}

// loadOnly, in the environment, makes TestLoadWithTwoCapabilities load the programs and nothing else.
const loadOnly = "WEFT_TEST_LOAD_ONLY"

// No program writes to the kernel's trace: whoever debugs takes that out again.
func TestNoProgramTraces(t *testing.T) {
	all := specs(t)
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"sock": LoadSock, "to_backend": LoadToBackend, "to_client": LoadToClient} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		all[name] = spec
	}
	for object, spec := range all {
		for name, program := range spec.Programs {
			for i, ins := range program.Instructions {
				if ins.IsBuiltinCall() && (ins.Constant == int64(asm.FnTracePrintk) || ins.Constant == int64(asm.FnTraceVprintk)) {
					t.Errorf("%s: %s: instruction %d calls %v", object, name, i, asm.BuiltinFunc(ins.Constant))
				}
			}
		}
	}
}

// TestLoadWithTwoCapabilities runs itself again as an ordinary user with CAP_BPF and CAP_NET_ADMIN alone.
func TestLoadWithTwoCapabilities(t *testing.T) {
	if os.Getenv(loadOnly) != "" {
		spec, err := Load()
		if err != nil {
			t.Fatal(err)
		}
		services, err := LoadServices(hasSetRetval())
		if err != nil {
			t.Fatal(err)
		}
		translation, err := LoadTranslation()
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range []*ebpf.CollectionSpec{spec, services, translation} {
			coll, err := ebpf.NewCollection(spec)
			if err != nil {
				var refused *ebpf.VerifierError
				if errors.As(err, &refused) {
					t.Logf("the verifier's last words: %s", strings.Join(refused.Log[max(0, len(refused.Log)-100):], "\n"))
				}
				t.Fatalf("uid %d: %v", os.Getuid(), err)
			}
			coll.Close()
		}
		return
	}
	testutil.RequireRoot(t)
	const nobody, capNetAdmin, capBPF = 65534, 12, 39
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestLoadWithTwoCapabilities$", "-test.count=1")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), loadOnly+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
		AmbientCaps: []uintptr{capBPF, capNetAdmin},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("load as nobody with CAP_BPF and CAP_NET_ADMIN: %v\n%s", err, out)
	}
}

// dumped is one entry as bpftool prints it.
type dumped struct {
	Key       []string       `json:"key"`
	Formatted map[string]any `json:"formatted"`
}

// TestBPFToolPrintsNames dumps the pinned map with bpftool and wants what it prints of Cilium's map, recorded in
// bpftool_dump.json: every name, every nesting and every value.
func TestBPFToolPrintsNames(t *testing.T) {
	k := loadKernel(t)
	pin := filepath.Join(testutil.MountBPFFS(t), "ipcache")
	m := k.Maps[MapIPCache]
	if err := m.Pin(pin); err != nil {
		t.Fatal(err)
	}
	for prefix := range identities {
		if err := m.Delete(MakeIPCacheKey(prefix)); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(golden.Path(t, "bpftool_dump.json"))
	if err != nil {
		t.Fatal(err)
	}
	want := byKey(t, data)
	for _, v := range vectors(t) {
		// Two vectors share a key: the recording, as this map, has the later one.
		if _, ok := want[v.KeyHex]; ok {
			mustPut(t, m, v.key(), v.value())
		}
	}
	out, err := exec.Command("bpftool", "-j", "map", "dump", "pinned", pin).Output()
	if err != nil {
		t.Fatalf("bpftool: %v", err)
	}
	if diff := cmp.Diff(want, byKey(t, out)); diff != "" {
		t.Errorf("bpftool prints (-Cilium's map +weft's):\n%s", diff)
	}
}

func byKey(t *testing.T, dump []byte) map[string]map[string]any {
	t.Helper()
	var entries []dumped
	if err := json.Unmarshal(dump, &entries); err != nil {
		t.Fatalf("%v in %s", err, dump)
	}
	formatted := map[string]map[string]any{}
	for _, e := range entries {
		formatted[strings.ReplaceAll(strings.Join(e.Key, ""), "0x", "")] = e.Formatted
	}
	return formatted
}
