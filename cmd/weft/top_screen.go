// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// Sequences of xterm, which all terminals of today know.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l" // another screen, without a cursor
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	goHome      = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

// screen is a terminal to paint on, with keys.
type screen struct{ keys, display *os.File }

// newScreen is the terminal of the command, if it has one for both.
func newScreen(env environment) (screen, bool) {
	keys, typed := terminalOf(env.stdin)
	display, shown := terminalOf(env.stdout)
	return screen{keys, display}, typed && shown
}

// live paints until q is pressed, ctx ends, or the agent is gone. However it ends, the terminal is as before.
func (t *top) live(ctx context.Context, env environment, on screen) (err error) {
	mode, err := term.MakeRaw(int(on.keys.Fd()))
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	pressed, ended := make(chan byte), make(chan struct{})
	go func() {
		defer close(ended)
		on.read(ctx, pressed)
	}()
	defer func() {
		stop()
		<-ended
		_, left := on.display.WriteString(leaveScreen)
		err = errors.Join(err, left, term.Restore(int(on.keys.Fd()), mode))
	}()
	if _, err := on.display.WriteString(enterScreen); err != nil {
		return err
	}
	before, err := t.look(ctx)
	if err != nil {
		return err
	}
	now := before
	if err := t.paint(ctx, env, on, &before, &now); err != nil {
		return err
	}
	ticker := time.NewTicker(t.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case key, ok := <-pressed:
			if !ok || key == 'q' || key == 3 || key == 4 || key == 27 { // Ctrl-C, Ctrl-D, Escape: a raw terminal sends no signals
				return nil
			}
			if key == 's' {
				t.order = (t.order + 1) % topOrders
			}
		case <-ticker.C:
			next, err := t.look(ctx)
			if err != nil {
				return err
			}
			before, now = now, next
		}
		if err := t.paint(ctx, env, on, &before, &now); err != nil {
			return err
		}
	}
}

// keyWait bounds how long the end of a view waits for its reader of keys.
const keyWait = 100 * time.Millisecond

// read sends each key that is pressed, until ctx ends; if the terminal goes, it closes the channel.
func (s screen) read(ctx context.Context, pressed chan<- byte) {
	defer close(pressed)
	poll := []unix.PollFd{{Fd: int32(s.keys.Fd()), Events: unix.POLLIN}}
	for ctx.Err() == nil {
		n, err := unix.Poll(poll, int(keyWait.Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR), err == nil && n == 0:
			continue
		case err != nil, poll[0].Revents&unix.POLLIN == 0:
			return
		}
		var key [1]byte
		if n, err := s.keys.Read(key[:]); n == 0 || err != nil {
			return
		}
		select {
		case pressed <- key[0]:
		case <-ctx.Done():
		}
	}
}

// paint shows what happened between two looks, as much of it as the terminal has room for.
func (t *top) paint(ctx context.Context, env environment, on screen, before, now *look) error {
	v := t.compare(ctx, before, now)
	var text bytes.Buffer
	to := env
	to.stdout, to.stderr = &text, &text
	if err := t.print(&output{format: formatTable}, to, &v); err != nil {
		return err
	}
	width, height, err := term.GetSize(int(on.display.Fd()))
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	lines := strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
	lines[0] = v.title(env.now(), env.ink())
	lines = append([]string{"weft top   q: quit   s: sort by " + ((t.order + 1) % topOrders).String() + " (now " + t.order.String() + ")"}, lines...)
	var frame strings.Builder
	frame.WriteString(goHome)
	for i, line := range lines[:min(len(lines), max(height, 1))] {
		if i > 0 {
			frame.WriteString("\r\n")
		}
		if !strings.Contains(line, "\x1b") { // colours stand in short lines alone
			line = firstRunes(line, width)
		}
		frame.WriteString(line + clearLine)
	}
	frame.WriteString(clearBelow)
	_, err = on.display.WriteString(frame.String())
	return err
}

// firstRunes cuts a line to a number of characters.
func firstRunes(line string, n int) string {
	if utf8.RuneCountInString(line) <= n {
		return line
	}
	return string([]rune(line)[:max(n, 0)])
}
