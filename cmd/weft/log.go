// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
)

// newLog writes text for people at a terminal, and JSON for all others.
func newLog(env environment, level slog.Level) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if env.terminal {
		return slog.New(slog.NewTextHandler(env.stderr, options))
	}
	return slog.New(slog.NewJSONHandler(env.stderr, options))
}
