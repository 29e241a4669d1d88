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

// ahead is the priority of a process that goes before all others. On few cores, latencies are else those of the queue behind an
// etcd and its writers, which do not run where agents do.
const ahead = -10

// start starts a process that ends with the benchmark.
func start(b *testing.B, role, given string) *process {
	b.Helper()
	return startAt(b, 0, role, given)
}

// startAt is start with another priority, as of nice(1).
func startAt(b *testing.B, nice int, role, given string) *process {
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
	if err := withPriority(nice, cmd.Start); err != nil {
		b.Fatal(err)
	}
	p := &process{cmd: cmd, orders: orders, answers: json.NewDecoder(answers)}
	b.Cleanup(p.end)
	return p
}

// withPriority calls do on a thread of that priority, which its children inherit.
func withPriority(nice int, do func() error) error {
	if nice == 0 {
		return do()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), nice); err != nil {
		return fmt.Errorf("priority %d: %w", nice, err)
	}
	return errors.Join(do(), unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 0))
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
