// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"
)

// progressInterval is how often progress is painted, and after which time first: what is done sooner needs none.
const progressInterval = 500 * time.Millisecond

// wipeLine makes the line that the cursor is in empty.
const wipeLine = "\r" + clearLine

// progress tells how far long work is, in one line of standard error that is painted again and again and is gone at the end.
// Where standard error is no terminal there is none: a nil progress can be used, and tells nothing. Its methods may be called
// at the same time.
type progress struct {
	to      *os.File
	begun   time.Time
	stop    chan struct{}
	stopped chan struct{}

	mu      sync.Mutex // of what follows, and of the terminal
	text    string     // what is done now
	ask     func() int // how much is done; nil if that is told
	done    int        // of what is counted, if unit has a name
	total   int        // how many there are; 0 if nobody knows
	unit    string
	painted bool
	within  bool // the cursor is in a line of somebody else
}

// startProgress begins to tell of work that may take a while. It must be ended.
func startProgress(env environment) *progress {
	to, ok := terminalOf(env.stderr)
	if kind, _ := env.lookup("TERM"); !ok || kind == "dumb" {
		return nil
	}
	p := &progress{to: to, begun: time.Now(), stop: make(chan struct{}), stopped: make(chan struct{})}
	go p.run()
	return p
}

func (p *progress) run() {
	defer close(p.stopped)
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-tick.C:
			p.paint()
		}
	}
}

// end leaves the terminal as if nothing had been told.
func (p *progress) end() {
	if p == nil {
		return
	}
	close(p.stop)
	<-p.stopped
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wipe()
}

// say tells what is done now.
func (p *progress) say(format string, args ...any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text, p.unit, p.ask = fmt.Sprintf(format, args...), "", nil
}

// did tells how many of something are done since the start.
func (p *progress) did(n int, unit string) { p.didOf(n, 0, unit) }

// countBy has progress ask how many of something are done since the start.
func (p *progress) countBy(done func() int, unit string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ask, p.total, p.unit = done, 0, unit
}

// didOf tells how many of how many are done since the start. What say told last is told, too.
func (p *progress) didOf(n, total int, unit string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.total, p.unit, p.ask = n, total, unit, nil
}

// above is where to print to meanwhile, instead of to w, so that nothing is printed into the line.
func (p *progress) above(w io.Writer) io.Writer {
	if _, shown := terminalOf(w); p == nil || !shown {
		return w
	}
	return aboveProgress{p, w}
}

type aboveProgress struct {
	p *progress
	w io.Writer
}

func (a aboveProgress) Write(text []byte) (int, error) {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	a.p.wipe()
	if len(text) > 0 {
		a.p.within = !bytes.HasSuffix(text, []byte("\n"))
	}
	return a.w.Write(text)
}

// wipe takes the line away. mu is held.
func (p *progress) wipe() {
	if p.painted {
		_, _ = io.WriteString(p.to, wipeLine) // the work does not depend on who looks on
		p.painted = false
	}
}

func (p *progress) paint() {
	p.mu.Lock()
	defer p.mu.Unlock()
	width, _, err := term.GetSize(int(p.to.Fd()))
	line := p.line(time.Now(), width)
	if err != nil || line == "" || p.within {
		return
	}
	_, _ = io.WriteString(p.to, wipeLine+line)
	p.painted = true
}

// counted is how much is done: 12 keys, or 12 of 400 keys (3%). mu is held.
func (p *progress) counted() string {
	if p.total == 0 {
		return count(p.done, p.unit)
	}
	return fmt.Sprintf("%d of %s (%d%%)", p.done, count(p.total, p.unit), 100*p.done/p.total)
}

// line is what to paint into a terminal of this width; "" before there is anything to tell. mu is held.
func (p *progress) line(now time.Time, width int) string {
	text, since := p.text, age(now, p.begun)
	if p.ask != nil {
		p.done = p.ask()
	}
	if p.unit != "" {
		rate := float64(p.done) / max(now.Sub(p.begun).Seconds(), 0.001)
		if text != "" {
			text += ": "
		}
		text += fmt.Sprintf("%s, %.0f a second", p.counted(), rate)
	}
	if text == "" {
		return ""
	}
	shown := []rune(printable(text))
	if room := max(width-len(", ")-len(since)-1, 0); len(shown) > room {
		shown = shown[:room] // a line that is broken in two could not be wiped
	}
	return string(shown) + ", " + since
}
