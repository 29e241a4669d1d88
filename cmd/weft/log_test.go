// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftmesh/weft/kvstore"
)

// A flood of one message about one cluster is cut, that of another is not; both say what was left out.
func TestLogLimitsRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		log := newLog(environment{stderr: &b}, slog.LevelInfo)
		west, north := log.With("task", "mesh", "cluster", "west"), log.With("task", "mesh", "cluster", "north")
		for i := range 500 {
			west.Warn("key rejected", "key", fmt.Sprintf("k%d", i))
		}
		north.Warn("key rejected", "key", "n")
		west.Error("connection lost")
		log.Warn("key rejected", "cluster", "south", "key", "s")
		lines := readLog(t, &b)
		if len(lines) != maxSameLines+3 {
			t.Fatalf("%d lines, want %d", len(lines), maxSameLines+3)
		}
		for i, line := range lines {
			if _, noted := line["note"]; noted != (i == maxSameLines-1) {
				t.Errorf("line %d: %v", i, line)
			}
		}
		time.Sleep(lineWindow)
		for range 2 {
			west.Warn("key rejected", "key", "later")
		}
		lines = readLog(t, &b)
		if len(lines) != 2 || lines[0]["leftOut"] != float64(450) || lines[1]["leftOut"] != nil {
			t.Errorf("after a minute: %v", lines)
		}
	})
}

// What is logged for debugging is whole, and what is remembered is bounded.
func TestLogLimitsOnlyRepeats(t *testing.T) {
	var b bytes.Buffer
	level := new(slog.LevelVar)
	level.Set(slog.LevelDebug)
	log := newLog(environment{stderr: &b}, level)
	for range maxSameLines * 3 {
		log.Debug("detail")
	}
	if n := len(readLog(t, &b)); n != maxSameLines*3 {
		t.Errorf("%d lines for debugging, want all", n)
	}
	for i := range maxLineKinds * 2 {
		log.Info("cluster", "cluster", fmt.Sprint(i))
	}
	if n := len(readLog(t, &b)); n != maxLineKinds*2 {
		t.Errorf("%d lines of as many kinds, want %d", n, maxLineKinds*2)
	}
	if n := len(log.Handler().(*limitedLog).lines.counts); n > maxLineKinds {
		t.Errorf("%d kinds are remembered, want at most %d", n, maxLineKinds)
	}
	level.Set(slog.LevelError)
	log.Warn("not logged")
	if b.Len() != 0 {
		t.Errorf("below the level: %s", &b)
	}
}

// A password does not get into the log, in neither form.
func TestLogHasNoSecrets(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		var b bytes.Buffer
		log := newLog(environment{stderr: &b, terminal: terminal}, slog.LevelInfo)
		cfg := kvstore.Config{Username: "u", Password: "correct-horse"}
		log.With("kvstore", cfg).WithGroup("g").Info("config", "password", cfg.Password, "cfg", &cfg)
		if strings.Contains(b.String(), "correct") || !strings.Contains(b.String(), "redacted") {
			t.Errorf("terminal %t: %s", terminal, &b)
		}
	}
}

// readLog takes the lines out of a log in JSON.
func readLog(t *testing.T, b *bytes.Buffer) (lines []map[string]any) {
	t.Helper()
	for decoder := json.NewDecoder(b); decoder.More(); {
		var line map[string]any
		if err := decoder.Decode(&line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	b.Reset()
	return lines
}
