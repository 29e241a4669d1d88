// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"fmt"
	"io"
	"log/slog"
)

// redacted stands for a secret wherever one is printed.
const redacted = "<redacted>"

// Secret is a text that only who asks for it by a conversion gets: printed, logged or encoded in whatever way, alone or as
// a part of something else, it is "<redacted>", and empty if there is none.
type Secret string

var (
	_ fmt.Formatter  = Secret("")
	_ slog.LogValuer = Secret("")
)

func (s Secret) mask() string {
	if s == "" {
		return ""
	}
	return redacted
}

// String returns what stands for the secret.
func (s Secret) String() string { return s.mask() }

// Format prints what stands for the secret, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.mask()) }

// LogValue is what a log has of the secret.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.mask()) }

// MarshalText is what encoders of JSON, YAML and the like get.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.mask()), nil }
