// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"

	"golang.org/x/term"
)

// Sequences of a terminal (ECMA-48).
const (
	clearScreen = "\x1b[H\x1b[2J"
	resetColor  = "\x1b[0m"
)

// mood is what a colour says.
type mood string

const (
	good   mood = "\x1b[32m" // green
	doubt  mood = "\x1b[33m" // yellow
	bad    mood = "\x1b[31m" // red
	strong mood = "\x1b[1m"
)

// ink paints words for a terminal. The zero value paints nothing.
type ink bool

// paint colours a text that is printable.
func (i ink) paint(m mood, text string) string {
	if !i || m == "" {
		return text
	}
	return string(m) + text + resetColor
}

// mark begins the line of something that was tried.
type mark string

const (
	passed mark = "✓"
	warned mark = "!"
	failed mark = "✗"
)

func (i ink) mark(m mark) string {
	return i.paint(map[mark]mood{passed: good, warned: doubt, failed: bad}[m], string(m))
}

// ink paints only where the output is a terminal that knows colours, and NO_COLOR (https://no-color.org) is not set.
func (e *environment) ink() ink {
	if _, ok := terminalOf(e.stdout); !ok {
		return false
	}
	if forbidden, _ := e.lookup("NO_COLOR"); forbidden != "" {
		return false
	}
	kind, _ := e.lookup("TERM")
	return kind != "dumb"
}

// terminalOf is the file of a stream that is a terminal.
func terminalOf(stream any) (*os.File, bool) {
	f, ok := stream.(*os.File)
	return f, ok && f != nil && term.IsTerminal(int(f.Fd()))
}
