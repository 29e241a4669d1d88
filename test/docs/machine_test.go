// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"context"
	"errors"
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

// patience is how long anything may take that a page has told to begin.
const patience = 60 * time.Second

// standIns are the programs of a machine that cannot run in namespaces, as far as the documents use them: there is no service manager,
// and no ssh. The units are the project's; what they are under systemd is shown by test/packages.
var standIns = map[string]string{
	"systemctl": `
set -euo pipefail
verb=$1
for unit; do
	pid=/run/$unit.pid
	if [[ $verb = *stop || $verb = *restart ]] && [ -e "$pid" ]; then
		kill "$(cat "$pid")"
		while readlink "/proc/$(cat "$pid")/exe" >/dev/null; do sleep 0.05; done
		rm "$pid"
	fi
	case $verb:$unit in
	stop:*) ;;
	*:etcd)
		(set -a; . /etc/default/etcd; exec setsid /usr/bin/etcd) </dev/null >/var/log/etcd.log 2>&1 &
		echo $! >"$pid" ;;
	*:weft-*)
		setsid $(sed -n 's,^ExecStart=/usr/bin/,,p' "$UNITS/$unit.service") </dev/null >"/var/log/$unit.log" 2>&1 &
		echo $! >"$pid"
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
	"editor": `
set -eu
[ -d "$(dirname "$1")" ]
`,
	"scp": `
set -euo pipefail
to=${!#}
for from in "${@:1:$#-1}"; do cp -p "$MACHINES/${from%%:*}/upper${from#*:}" "$to"; done
`,
}

// machine is what a block runs on: namespaces for network, mounts, processes and cgroups, with directories of its own in the place of
// those that machines do not share. All of it ends with its first process.
type machine struct {
	name string
	pid  int
	env  []string
}

const setUp = `
set -eu
for d in etc var; do
	mkdir -p "$1/upper/$d" "$1/work/$d"
	mount -t overlay overlay -o "lowerdir=/$d,upperdir=$1/upper/$d,workdir=$1/work/$d" "/$d"
done
mount --rbind "$2" /mnt # where each sees what the others keep
mount --rbind /mnt/bin /usr/local/bin
# Others' mounts of the hierarchy, which may go by themselves with their directories meanwhile.
for ((i = 0; i < 1000; i++)); do
	d=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
	[ -n "$d" ] || break
	umount --lazy "$d" || true
done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for d in run tmp root; do mount -t tmpfs tmpfs /$d; done
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
# What the package brings.
grep -q ^weft: /etc/group || groupadd --system weft
mkdir -p /etc/weft/clustermesh /run/weft /var/lib/weft /var/log
cp /mnt/agent.yaml /etc/weft
chgrp weft /etc/weft /etc/weft/clustermesh
echo ready
exec sleep infinity
`

// world is the machines of a story.
type world struct {
	dir      string
	machines map[string]*machine
}

// newWorld makes machines, with weft and weft-lab on them, that know nothing of each other yet.
func newWorld(t *testing.T, names ...string) *world {
	t.Helper()
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
	command(t, "cp", filepath.Join(os.Getenv(binariesEnv), "weft"), filepath.Join(os.Getenv(binariesEnv), "weft-lab"), bin)
	command(t, "chmod", "-R", "755", bin)
	apiserver := filepath.Join(bin, "kube-apiserver")
	testutil.MustWriteFile(t, apiserver, nil)
	command(t, "mount", "--bind", testutil.KubeAPIServerPath(t), apiserver)
	command(t, "cp", "-r", "../../deploy/systemd", filepath.Join(dir, "units"))
	command(t, "cp", "../../deploy/packages/agent.yaml", dir)
	w := &world{dir: dir, machines: make(map[string]*machine)}
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", "TERM=dumb", "SHELL=/bin/bash",
		"UNITS=/mnt/units", "MACHINES=/mnt",
	}
	for _, name := range names {
		w.machines[name] = newMachine(t, dir, name, env)
	}
	return w
}

func newMachine(t *testing.T, dir, name string, env []string) *machine {
	t.Helper()
	group := testutil.NewCgroup(t)
	groupDir, err := os.Open(group.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer groupDir.Close()
	cmd := exec.Command("unshare", "--net", "--mount", "--pid", "--cgroup", "--fork", "--kill-child", "--mount-proc",
		"bash", "-c", setUp, "bash", filepath.Join(dir, name), dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, UseCgroupFD: true, CgroupFD: int(groupDir.Fd())}
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
		testutil.Eventually(t, patience, func() error { return emptied(group.Path()) })
	})
	if _, err := stdout.Read(make([]byte, len("ready\n"))); err != nil {
		_ = cmd.Wait()
		t.Fatalf("machine %s: %v\n%s", name, err, &stderr)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
	m := &machine{name: name, env: env}
	if _, scanErr := fmt.Sscan(string(children), &m.pid); err != nil || scanErr != nil {
		t.Fatalf("machine %s: its first process: %v, %v", name, err, scanErr)
	}
	return m
}

// emptied removes what a machine's processes have left of cgroups below its own, when the last of them is gone.
func emptied(group string) error {
	events, err := os.ReadFile(filepath.Join(group, "cgroup.events"))
	if err != nil {
		return err
	}
	if !strings.Contains(string(events), "populated 0") {
		return fmt.Errorf("%s has processes", group)
	}
	below, err := filepath.Glob(filepath.Join(group, "*", "cgroup.procs"))
	for _, procs := range below {
		err = errors.Join(err, os.Remove(filepath.Dir(procs)))
	}
	return err
}

// join puts a wire between two machines, eth0 on both, with these addresses.
func (w *world) join(t *testing.T, a, addressOfA, b, addressOfB string) {
	t.Helper()
	command(t, "ip", "link", "add", "eth0", "netns", fmt.Sprint(w.machines[a].pid), "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(w.machines[b].pid))
	w.machines[a].must(t, "network", "ip address add "+addressOfA+" dev eth0; ip link set eth0 up")
	w.machines[b].must(t, "network", "ip address add "+addressOfB+" dev eth0; ip link set eth0 up")
}

// script is a command that runs a script on the machine.
func (m *machine) script(ctx context.Context, script string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", "--net", "--mount", "--pid", "--cgroup", "--target", fmt.Sprint(m.pid),
		"bash", "-euo", "pipefail", "-c", "cd /root; "+script)
	cmd.Env = m.env
	cmd.WaitDelay = time.Second // what it left running has its output elsewhere
	return cmd
}

// run runs a script on the machine, and returns what it printed and its exit code.
func (m *machine) run(t *testing.T, script string) (printed string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	cmd := m.script(ctx, script)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || ctx.Err() != nil) {
		t.Fatalf("%s, on %s: %v\n%s", script, m.name, errors.Join(err, ctx.Err()), out)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// must runs a script that must succeed.
func (m *machine) must(t *testing.T, what, script string) string {
	t.Helper()
	out, code := m.run(t, script)
	if code != 0 {
		logs, _ := m.run(t, "tail -n 20 /var/log/{etcd,weft-*}.log")
		t.Fatalf("%s: exit code %d\n%s\nlogs of %s:\n%s", what, code, out, m.name, logs)
	}
	return out
}

// command runs a program that must succeed.
func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
}
