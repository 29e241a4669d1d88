// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"os"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Terminal is a pseudo-terminal: what a program prints on Slave is its Screen, and what is typed it reads there.
type Terminal struct {
	Slave *os.File // the program's side

	master *os.File
	mu     sync.Mutex
	screen []byte // guarded by mu
}

// OpenTerminal opens a terminal of 120 columns and 40 rows. It is closed at the end of the test.
func OpenTerminal(t testing.TB) *Terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd := int(master.Fd()) // which makes it blocking, so that it ends with the slave
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 120})
	}
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	term := &Terminal{Slave: slave, master: master}
	read := make(chan struct{})
	go func() {
		defer close(read)
		buffer := make([]byte, 64<<10)
		for {
			n, err := master.Read(buffer)
			term.mu.Lock()
			term.screen = append(term.screen, buffer[:n]...)
			term.mu.Unlock()
			if err != nil {
				return // the last slave is closed
			}
		}
	}()
	t.Cleanup(func() {
		_ = slave.Close()
		<-read
		_ = master.Close()
	})
	return term
}

// Screen is all that was printed so far, with the sequences that drive the terminal.
func (p *Terminal) Screen() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.screen)
}

// Type presses keys.
func (p *Terminal) Type(t testing.TB, keys string) {
	t.Helper()
	if _, err := p.master.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// Mode is how the terminal treats what is typed and printed.
func (p *Terminal) Mode(t testing.TB) unix.Termios {
	t.Helper()
	mode, err := unix.IoctlGetTermios(int(p.Slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *mode
}
