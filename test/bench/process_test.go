// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/test/load"
)

// roleEnv makes this binary one of the processes below, so that heap, memory and CPU time of what is measured are its
// own. The value is the role, a space and what the role is given.
const roleEnv = "WEFT_BENCH_ROLE"

var roles = map[string]func(given string, orders <-chan order, answer func(any)) error{
	"etcd":  serveEtcd,
	"agent": serveAgent,
	"bare":  serveBare,
}

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := play(role); err != nil {
			fmt.Fprintf(os.Stderr, "%.20s: %v\n", role, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(testutil.IsolateMain(summarised{m}))
}

// play plays a role until the standard input ends.
func play(role string) error {
	name, given, _ := strings.Cut(role, " ")
	orders := make(chan order)
	go func() {
		defer close(orders)
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			var o order
			if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
				fmt.Fprintf(os.Stderr, "order %q: %v\n", lines.Text(), err)
				return
			}
			orders <- o
		}
	}()
	out := json.NewEncoder(os.Stdout)
	return roles[name](given, orders, func(answer any) { _ = out.Encode(answer) })
}

// order is what a process is told to do. Each is answered when it is done.
type order struct {
	Do       string
	Endpoint string        `json:",omitempty"`
	Prefix   string        `json:",omitempty"`
	Cluster  *load.Cluster `json:",omitempty"`
	First, N int           `json:",omitempty"`
	Rate     int           `json:",omitempty"`
	Span     time.Duration `json:",omitempty"`
}

// process is one of this binary's own kind.
type process struct {
	cmd     *exec.Cmd
	orders  io.WriteCloser
	answers *json.Decoder
}

// priority is that of a process: 0 is like any other, more than 0 goes before all of less. It is one of SCHED_RR, as what nice(1) gives
// counts only within a session where the kernel groups by sessions.
type priority uint32

// Latencies are measured with priorities, as on few cores they are else those of queues. What is measured goes first, since an etcd
// and its writers do not run where agents do. The etcd goes before the machine's other work: between its answer to one watch and
// that to another, which is what is measured, it must not be made to wait.
const (
	ordinary priority = iota
	second
	first
)

// start starts a process that ends with the benchmark.
func start(b *testing.B, role, given string) *process {
	b.Helper()
	return startAt(b, ordinary, role, given)
}

// startAt is start with another priority.
func startAt(b *testing.B, p priority, role, given string) *process {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+role+" "+given)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	orders, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	answers, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := p.inherited(cmd.Start); err != nil {
		b.Fatal(err)
	}
	started := &process{cmd: cmd, orders: orders, answers: json.NewDecoder(answers)}
	b.Cleanup(started.end)
	return started
}

// inherited calls do on a thread of that priority, which its children inherit.
func (p priority) inherited(do func() error) error {
	if p == ordinary {
		return do()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	set := func(policy, p priority) error {
		attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: uint32(policy), Priority: uint32(p)}
		if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
			return fmt.Errorf("priority %d: %w", p, err)
		}
		return nil
	}
	if err := set(unix.SCHED_RR, p); err != nil {
		return err
	}
	return errors.Join(do(), set(unix.SCHED_NORMAL, ordinary))
}

// end ends the process, if it has not ended yet.
func (p *process) end() {
	_ = p.orders.Close()
	_ = p.cmd.Wait()
}

func (p *process) order(b *testing.B, o order) {
	b.Helper()
	line, err := json.Marshal(o)
	if err == nil {
		_, err = p.orders.Write(append(line, '\n'))
	}
	if err != nil {
		b.Fatalf("order %s: %v", o.Do, err)
	}
}

// answer waits for the next answer.
func (p *process) answer(b *testing.B, to any) {
	b.Helper()
	if err := p.answers.Decode(to); err != nil {
		b.Fatalf("a process has ended before it answered: %v", err)
	}
}

func (p *process) ask(b *testing.B, o order, to any) {
	b.Helper()
	p.order(b, o)
	p.answer(b, to)
}

// clock is the system's monotonic clock, which all processes share.
func clock() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return time.Duration(t.Nano())
}

func progress(b *testing.B, format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", time.Now().Format("15:04:05"), b.Name(), fmt.Sprintf(format, args...))
}

// settle waits until the machine rests, so that what the last measurement left behind, such as the kernel's freeing of a
// large map, is not counted to the next one. It does not wait long: on a busy machine, only repetition helps.
func settle(b *testing.B) {
	b.Helper()
	const step = 200 * time.Millisecond
	for range 25 {
		busy, all := cpuTicks(b)
		time.Sleep(step)
		busyNow, allNow := cpuTicks(b)
		if busyNow-busy <= (allNow-all)/10 {
			return
		}
	}
}

// cpuTicks reads how long all cores together were busy, and in all.
func cpuTicks(b *testing.B) (busy, all int) {
	b.Helper()
	content, err := os.ReadFile("/proc/stat")
	if err != nil {
		b.Fatal(err)
	}
	line, _, _ := strings.Cut(string(content), "\n")
	var user, nice, system, idle, wait, irq, soft, steal int
	if _, err := fmt.Sscanf(line, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &wait, &irq, &soft, &steal); err != nil {
		b.Fatalf("%q: %v", line, err)
	}
	busy = user + nice + system + irq + soft + steal
	return busy, busy + idle + wait
}
