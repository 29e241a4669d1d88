// SPDX-License-Identifier: Apache-2.0

package test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// step is a fenced block of a document that begins with "# on MACHINE".
type step struct {
	line            int
	machine, script string
}

func steps(t *testing.T, page string) (all []step) {
	t.Helper()
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var block []string
	fenced := false
	for i, line := range strings.Split(string(content), "\n") {
		switch {
		case !strings.HasPrefix(line, "```"):
			block = append(block, line)
		case !fenced:
			fenced, block = true, nil
		default:
			fenced = false
			if len(block) == 0 {
				continue
			}
			if machine, ok := strings.CutPrefix(block[0], "# on "); ok {
				all = append(all, step{i + 1 - len(block), machine, strings.Join(block, "\n")})
			}
		}
	}
	return all
}

// standIns are the programs of a machine that cannot run in a network namespace, as far as the document uses them: there is
// no service manager, and no ssh. The units are the project's; what they are under systemd is shown by test/packages.
var standIns = map[string]string{
	"systemctl": `
set -euo pipefail
for unit; do
	case $unit in
	etcd)
		(set -a; . /etc/default/etcd; exec setsid /usr/bin/etcd) </dev/null >/var/log/etcd.log 2>&1 & ;;
	weft-*)
		setsid $(sed -n 's,^ExecStart=/usr/bin/,,p' "$UNITS/$unit.service") </dev/null >"/var/log/$unit.log" 2>&1 &
		noun=; [ "$unit" = weft-agent ] || noun=operator
		for ((i = 0; i < 600; i++)); do # Type=notify
			weft $noun status >/dev/null 2>&1 && exit_code=0 || exit_code=$?
			[ "$unit:$exit_code" != weft-agent:1 ] && [ "$exit_code" != 0 ] || continue 2
			sleep 0.1
		done
		tail -5 "/var/log/$unit.log" >&2
		exit 1 ;;
	esac
done
`,
	"scp": `
set -euo pipefail
to=${!#}
for from in "${@:1:$#-1}"; do cp -p "$MACHINES/${from%%:*}/upper${from#*:}" "$to"; done
`,
}

// machine is what a step runs on: namespaces for network, mounts and processes, with directories of its own in the place of
// those that a machine does not share. All of it ends with its first process.
type machine struct {
	name string
	pid  int
	env  []string
}

func newMachine(t *testing.T, dir, name string, env []string) *machine {
	t.Helper()
	const setUp = `
set -eu
for d in etc var run; do
	mkdir -p "$1/upper/$d" "$1/work/$d"
	mount -t overlay overlay -o "lowerdir=/$d,upperdir=$1/upper/$d,workdir=$1/work/$d" "/$d"
done
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
# What the package brings.
grep -q ^weft: /etc/group || groupadd --system weft
mkdir -p /etc/weft/clustermesh /run/weft /var/lib/weft /var/log
chgrp weft /etc/weft /etc/weft/clustermesh
echo ready
exec sleep infinity
`
	cmd := exec.Command("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
		"bash", "-c", setUp, "bash", filepath.Join(dir, name))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := stdout.Read(make([]byte, len("ready\n"))); err != nil {
		t.Fatalf("machine %s: %v\n%s", name, err, &stderr)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
	m := &machine{name: name, env: env}
	if _, scanErr := fmt.Sscan(string(children), &m.pid); err != nil || scanErr != nil {
		t.Fatalf("machine %s: its first process: %v, %v", name, err, scanErr)
	}
	return m
}

// run runs a script on the machine, and returns what it printed.
func (m *machine) run(t *testing.T, what, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", "--net", "--mount", "--pid", "--target", fmt.Sprint(m.pid),
		"bash", "-euo", "pipefail", "-c", script)
	cmd.Env = m.env
	cmd.WaitDelay = time.Second // what it left running has its output elsewhere
	out, err := cmd.CombinedOutput()
	if err != nil {
		logs, _ := exec.Command("nsenter", "--mount", "--target", fmt.Sprint(m.pid), "bash", "-c", "tail -n 20 /var/log/{etcd,weft-*}.log").CombinedOutput()
		t.Fatalf("%s: %v\n%s\nlogs of %s:\n%s", what, err, out, m.name, logs)
	}
	return string(out)
}

// docs/vms.md, step by step, as it stands: two machines with an etcd, an operator and an agent each come to know the
// workloads of each other.
func TestWalkThroughMachines(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// An overlay on an overlay needs a directory of another kind.
	command(t, "mount", "-t", "tmpfs", "tmpfs", dir)
	t.Cleanup(func() { command(t, "umount", "--lazy", dir) })
	bin := filepath.Join(dir, "bin")
	command(t, "mkdir", bin)
	for name, script := range standIns {
		testutil.MustWriteFile(t, filepath.Join(bin, name), []byte("#!/bin/bash\n"+script))
	}
	command(t, "chmod", "-R", "755", bin)
	command(t, "cp", os.Getenv(weftEnv), filepath.Join(bin, "weft"))
	units, err := filepath.Abs("../deploy/systemd")
	if err != nil {
		t.Fatal(err)
	}
	env := append(os.Environ(), "PATH="+bin+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "UNITS="+units, "MACHINES="+dir)
	east, west := newMachine(t, dir, "east-1", env), newMachine(t, dir, "west-1", env)
	command(t, "ip", "link", "add", "eth0", "netns", fmt.Sprint(east.pid), "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(west.pid))
	east.run(t, "network", "ip address add 192.0.2.11/24 dev eth0; ip link set eth0 up")
	west.run(t, "network", "ip address add 192.0.2.21/24 dev eth0; ip link set eth0 up")

	const page = "../docs/vms.md"
	var last string
	all := steps(t, page)
	for _, s := range all {
		m := map[string]*machine{"east-1": east, "west-1": west}[s.machine]
		if m == nil {
			t.Fatalf("%s:%d: there is no machine %s", page, s.line, s.machine)
		}
		last = m.run(t, fmt.Sprintf("%s:%d, on %s", page, s.line, s.machine), s.script)
	}
	if len(all) < 10 {
		t.Fatalf("%s has %d steps: where are they?", page, len(all))
	}
	t.Logf("the last step printed\n%s", last)
	for _, want := range []string{"3 received", "shop/web-2", "shop/app=web @west", " 0 differences"} {
		if !strings.Contains(last, want) {
			t.Errorf("the last step does not show %q", want)
		}
	}
}
