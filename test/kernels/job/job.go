// SPDX-License-Identifier: Apache-2.0

// Package job owns what the host and a virtual machine tell each other: the job, a file in the machine's root, and the
// marks that the machine writes between the lines that the tests print.
package job

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// File is where the job lies in the machine.
const File = "/job.json"

// Job is all that a machine does from its boot to its end.
type Job struct {
	// ID begins every mark. It is another one in each machine, so that no test prints a mark by accident.
	ID string
	// Modules are the files of the kernel modules to load, in this order.
	Modules []string
	// Runs are the test binaries to run, in this order. A failed one does not keep the next from running.
	Runs []Run
}

// Run is one test binary.
type Run struct {
	// Package is the tested package's directory below the module's root.
	Package string
	// Dir is the working directory: where the package's files lie in the machine.
	Dir string
	// Binary is the absolute path of the executable, Args what follows its name.
	Binary string
	Args   []string
}

// Read returns the job in a file.
func Read(file string) (Job, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return Job{}, fmt.Errorf("read the job: %w", err)
	}
	var j Job
	if err := json.Unmarshal(content, &j); err != nil {
		return Job{}, fmt.Errorf("read the job: %s: %w", file, err)
	}
	return j, nil
}

// Event is what a mark says.
type Event string

const (
	// Booted: the machine is ready for the tests. Text is the kernel's release.
	Booted Event = "booted"
	// Started: the output that follows is that of Package.
	Started Event = "started"
	// Ended: Package's binary ended with Exit after Took. Text says what ended it, where that was not its own exit.
	Ended Event = "ended"
	// Failed: the machine could not do its job, Text says why.
	Failed Event = "failed"
	// Done: every run is over. Nothing follows.
	Done Event = "done"
)

// Mark is one message of a machine.
type Mark struct {
	Event   Event
	Package string        `json:",omitempty"`
	Exit    int           `json:",omitempty"`
	Took    time.Duration `json:",omitempty"` // nanoseconds
	Text    string        `json:",omitempty"`
}

// Line is the mark as one line without its end.
func (m Mark) Line(id string) string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return id + " " + string(text)
}

// ParseMark returns the mark of a line, and false if the line is not one of the job with that id.
func ParseMark(id, line string) (Mark, bool) {
	rest, ok := strings.CutPrefix(line, id+" ")
	if !ok {
		return Mark{}, false
	}
	var m Mark
	if err := json.Unmarshal([]byte(rest), &m); err != nil {
		return Mark{}, false
	}
	return m, true
}
