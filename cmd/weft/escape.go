// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// printable returns s with all that does not print, or would change what is printed around it, escaped as in a Go string.
// Names, labels and reasons come from other clusters and must not drive the reader's terminal.
func printable(s string) string {
	if utf8.ValidString(s) && !strings.ContainsFunc(s, unprintable) {
		return s
	}
	quoted := strconv.Quote(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

func unprintable(r rune) bool { return !strconv.IsPrint(r) }

// harmless escapes what JSON lets pass but a terminal may act upon: control characters above ASCII, changes of direction.
func harmless(text []byte) string {
	return escape(text, func(r rune) string {
		r -= 0x10000
		return fmt.Sprintf(`\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
	})
}

// harmlessYAML does the same for YAML, of which JSON is nearly a part: it has no surrogate pairs.
func harmlessYAML(text []byte) string {
	return escape(text, func(r rune) string { return fmt.Sprintf(`\U%08x`, r) })
}

// escape writes what does not print as a \u escape of four hex digits, and as beyond says what that has no room for.
func escape(text []byte, beyond func(rune) string) string {
	var b strings.Builder
	for _, r := range string(text) {
		switch {
		case r == '\n' || !unprintable(r):
			b.WriteRune(r)
		case r > 0xffff:
			b.WriteString(beyond(r))
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}
