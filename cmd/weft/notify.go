// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/weftmesh/weft/api"
)

// statusInterval is how often the service manager is told how the agent is, where its watchdog does not want it oftener.
const statusInterval = 10 * time.Second

// notifyTask tells the service manager, over the datagram socket that it gave, that the agent is ready, how it is, that it is
// alive, and that it stops: the protocol of sd_notify(3), of which systemd's units of Type=notify are readers.
type notifyTask struct {
	socket   string        // path, or a name in the abstract name space that begins with @
	watchdog time.Duration // how long the manager waits for a sign of life; 0: for none
	after    []task        // that are ready when the agent is
	// line looks at all of the agent and says how it is. Where it hangs, so does the agent, and the watchdog is right to bite.
	line  func() string
	log   *slog.Logger
	ready chan struct{}

	complained bool // that nobody listens has been logged
}

// newNotifyTask reads what the service manager wants from its variables; nil if there is no manager.
func newNotifyTask(lookup func(string) (string, bool), line func() string, log *slog.Logger) *notifyTask {
	socket, ok := lookup("NOTIFY_SOCKET")
	if !ok || socket == "" {
		return nil
	}
	t := &notifyTask{socket: socket, line: line, log: log, ready: make(chan struct{})}
	if pid, ok := lookup("WATCHDOG_PID"); ok && pid != strconv.Itoa(os.Getpid()) {
		return t // it is another process that is watched
	}
	if text, ok := lookup("WATCHDOG_USEC"); ok {
		microseconds, err := strconv.ParseUint(text, 10, 32) // an hour and more
		if t.watchdog = time.Duration(microseconds) * time.Microsecond; err != nil || microseconds == 0 {
			t.watchdog = 0
			log.Warn("the service manager's watchdog has no sense: no signs of life are given", "WATCHDOG_USEC", text)
		}
	}
	return t
}

func (t *notifyTask) String() string         { return "notify" }
func (t *notifyTask) Ready() <-chan struct{} { return t.ready }

// Run reports until ctx ends, and then that the agent stops. That nobody hears it is no reason to end.
func (t *notifyTask) Run(ctx context.Context) error {
	defer t.send("STOPPING=1")
	for _, task := range t.after {
		t.send("STATUS=starting: waits for " + task.String())
		select {
		case <-ctx.Done():
			return nil
		case <-task.Ready():
		}
	}
	interval := statusInterval
	if t.watchdog > 0 {
		interval = min(interval, t.watchdog/2) // as sd_watchdog_enabled(3) recommends
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	t.send("READY=1", t.statusLine())
	close(t.ready)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		state := []string{t.statusLine()} // this first: a hanging agent must not seem alive
		if t.watchdog > 0 {
			state = append(state, "WATCHDOG=1")
		}
		t.send(state...)
	}
}

// statusLine is how the agent is, as an assignment.
func (t *notifyTask) statusLine() string {
	return "STATUS=" + printable(strings.ReplaceAll(t.line(), "\n", " "))
}

// agentLine says in one line how an agent is.
func agentLine(s api.Status) string {
	ready, remote := 0, 0
	for i := range s.Clusters {
		if s.Clusters[i].Own {
			continue
		}
		remote++
		if s.Clusters[i].Ready {
			ready++
		}
	}
	line := fmt.Sprintf("%d of %d clusters ready, %d prefixes", ready, remote, s.Tables.IPs)
	return line + problemsLine(s.Problems)
}

// operatorLine says in one line how an operator is.
func operatorLine(s api.OperatorStatus) string {
	line := "waits for a leader"
	switch {
	case s.IsLeader:
		line = "leads cluster " + s.Cluster.Name
	case s.Leader != "":
		line = "stands by; the leader is " + s.Leader
	}
	return line + problemsLine(s.Problems)
}

func problemsLine(problems []string) string {
	if len(problems) == 0 {
		return ""
	}
	return fmt.Sprintf("; %d not well: %s", len(problems), problems[0])
}

// send gives the service manager assignments, in one datagram.
func (t *notifyTask) send(assignments ...string) {
	err := func() error {
		conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: t.socket, Net: "unixgram"})
		if err != nil {
			return err
		}
		defer conn.Close()
		// A manager that does not read must not hold the agent up.
		if err := conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		_, err = conn.Write([]byte(strings.Join(assignments, "\n")))
		return err
	}()
	if err != nil && !t.complained {
		t.log.Warn("the service manager does not hear: it may end the agent", "socket", t.socket, "err", err)
	}
	t.complained = err != nil
}
