// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// askEvery is the pause between two requests of an asker.
const askEvery = 5 * time.Millisecond

// asker is a client in a pod: a process that sends one request after the other, each from a socket of its own.
type asker struct {
	cmd       *exec.Cmd
	complaint bytes.Buffer
	read      chan struct{} // closed when all that it says has been read

	mu       sync.Mutex
	answers  map[string]int // guarded by mu; by who answered
	last     string         // guarded by mu; who answered last
	failures []string       // guarded by mu
}

// ask starts a client in a pod of a node, which asks an address over "tcp" or "udp" until it is stopped. With more options it is
// started otherwise by `weft-lab exec`.
func (l *lab) ask(p podPlan, protocol string, to netip.AddrPort, options ...string) (*asker, error) {
	args := append([]string{"--state-dir", l.dir, "exec"}, options...)
	return startAsker(exec.Command(l.self, append(args, p.path(),
		l.self, "request", protocol, to.String(), "--every", askEvery.String())...))
}

// startAsker starts a `weft-lab request --every`.
func startAsker(cmd *exec.Cmd) (*asker, error) {
	a := &asker{cmd: cmd, answers: make(map[string]int), read: make(chan struct{})}
	cmd.Stderr = &a.complaint
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C is for the story, which ends it
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go a.listen(stdout)
	return a, nil
}

func (a *asker) listen(from io.Reader) {
	defer close(a.read)
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		a.note(lines.Text())
	}
}

func (a *asker) note(line string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if failure, failed := strings.CutPrefix(line, failedPrefix); failed {
		a.failures = append(a.failures, failure)
		return
	}
	who, _, _ := strings.Cut(line, ":")
	a.answers[who]++
	a.last = who
}

// counts returns how many answers came from whom.
func (a *asker) counts() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.answers)
}

// all returns how many answers came.
func (a *asker) all() int {
	n := 0
	for _, count := range a.counts() {
		n += count
	}
	return n
}

// from returns how many answers came from pods of a cluster.
func (a *asker) from(cluster string) int {
	n := 0
	for who, count := range a.counts() {
		if strings.HasPrefix(who, cluster+"-") {
			n += count
		}
	}
	return n
}

// failure returns an error if a request was not answered.
func (a *asker) failure() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.failures) == 0 {
		return nil
	}
	return fmt.Errorf("%d requests failed, the first: %s", len(a.failures), a.failures[0])
}

// answered waits until each client has had n more answers from pods of a cluster.
func answered(ctx context.Context, askers []*asker, cluster string, n int) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	want := make([]int, len(askers))
	for i, a := range askers {
		want[i] = a.from(cluster) + n
	}
	return poll(ctx, askEvery, func() error {
		for i, a := range askers {
			if missing := want[i] - a.from(cluster); missing > 0 {
				return errors.Join(fmt.Errorf("%d of %d answers from %s have not come: %v", missing, n, cluster, a.counts()), a.failure())
			}
		}
		return nil
	})
}

// stop lets the last request end, and returns an error if one was not answered. It may be called again.
func (a *asker) stop() error {
	select {
	case <-a.read:
		return a.failure()
	default:
	}
	err := a.cmd.Process.Signal(syscall.SIGTERM)
	<-a.read
	if errors.Is(err, syscall.ESRCH) {
		err = nil
	}
	var exit *exec.ExitError
	if waited := a.cmd.Wait(); waited != nil && (!errors.As(waited, &exit) || a.failure() == nil) {
		err = errors.Join(err, fmt.Errorf("%w: %s", waited, &a.complaint))
	}
	return errors.Join(err, a.failure())
}
