// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Documents returns the pages that people write, below root: the reference and the manual pages are made of the commands.
func Documents(t testing.TB, root string) (pages []string) {
	t.Helper()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/design/*.md", "vagrant/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %d pages, %v", pattern, len(found), err)
		}
		pages = append(pages, found...)
	}
	return pages
}

// Block is a fenced block of a page. Its language says what it is: "sh", a script; "console", what a terminal shows, commands after
// "$ " and what they print; "yaml" and so on, the content of a file; "text", nothing that a program reads.
type Block struct {
	Page     string
	Line     int // of what is within
	Language string
	Lines    []string
}

func (b Block) String() string { return fmt.Sprintf("%s:%d", b.Page, b.Line) }

// Command is a command of a block, with the lines that the page shows below it.
type Command struct {
	Line   int
	Text   string
	Output []string
}

// Blocks returns the fenced blocks of a page.
func Blocks(t testing.TB, page string) (blocks []Block) {
	t.Helper()
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	indent, fenced := "", false
	for i, line := range strings.Split(string(content), "\n") {
		text := strings.TrimLeft(line, " ")
		switch word, isFence := strings.CutPrefix(text, "```"); {
		case isFence && !fenced:
			indent, fenced = line[:len(line)-len(text)], true
			blocks = append(blocks, Block{Page: page, Line: i + 2, Language: word})
		case isFence:
			fenced = false
		case fenced:
			b := &blocks[len(blocks)-1]
			b.Lines = append(b.Lines, strings.TrimPrefix(line, indent))
		}
	}
	if fenced {
		t.Fatalf("%s: the last block has no end", page)
	}
	return blocks
}

// Commands returns the commands of a block of a terminal, or of a script that is nothing but commands. One that goes on in the next
// line ends with a backslash there.
func (b Block) Commands() (commands []Command) {
	joined := false
	for i, line := range b.Lines {
		text, prompt := strings.CutPrefix(line, "$ ")
		switch last := len(commands) - 1; {
		case joined:
			commands[last].Text += "\n" + line
		case b.Language == "console" && !prompt:
			if last >= 0 {
				commands[last].Output = append(commands[last].Output, line)
			}
			continue
		case strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#"):
			continue
		default:
			commands = append(commands, Command{Line: b.Line + i, Text: text})
		}
		joined = strings.HasSuffix(line, "\\")
	}
	return commands
}

// Bare is a command without the remark that stands behind it.
func (c Command) Bare() string {
	text, _, _ := strings.Cut(c.Text, "  #")
	return strings.TrimSpace(text)
}

// same stands for a part of a line that is the same in every run.
const same = "="

// shapes are the parts of a line, the first that fits, and what stands for them: they differ from run to run.
var shapes = []struct {
	pattern, sign string
}{
	{`\s*\(\d+\.\d s\)`, ""}, // told of what took long
	{`\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d:\d\d)?(?: UTC|Z)?`, "TIME"},
	{`\d\d:\d\d:\d\d\.\d+`, "TIME"},
	{`\b[0-9a-f]{12,64}\b`, "HEX"},
	{`identity=\d+`, same},
	{`\d+\.\d+\.\d+\.\d+(?:/\d+)?`, same},
	{`[0-9a-f]*:[0-9a-f]*:[0-9a-f:]+(?:/\d+)?`, same},
	{`v\d+\.\d+\.\d+`, same},
	{`[a-z]+-\d{6,}`, "NAME"},
	{`over (?:\d+(?:\.\d+)?(?:ns|µs|ms|s|m|h))+\b`, "TIME"},
	{`[A-Za-z_][\w-]*`, same},
	{`(?:\d+(?:\.\d+)?(?:ns|µs|ms|s|m|h))+\b`, "TIME"},
	{`-?\d+(?:\.\d+)?(?:e[-+]?\d+)?`, "N"},
	{`\s+`, " "},
	{`.`, same},
}

var shape = func() *regexp.Regexp {
	var all []string
	for _, s := range shapes {
		all = append(all, "("+s.pattern+")")
	}
	return regexp.MustCompile(strings.Join(all, "|"))
}()

// Shape is a line of output without what differs from run to run: times, numbers, numbers that name a lease or a member of etcd, and
// how wide columns are. Addresses, identities, names and words stay.
func Shape(line string) string {
	var out strings.Builder
	line = strings.TrimSpace(line)
	for _, at := range shape.FindAllStringSubmatchIndex(line, -1) {
		for i, s := range shapes {
			if at[2*i+2] < 0 {
				continue
			}
			if s.sign == same {
				out.WriteString(line[at[0]:at[1]])
			} else {
				out.WriteString(s.sign)
			}
		}
	}
	return out.String()
}

// SameShape compares what a page shows with what was printed: line by line by their shapes, where a line "…" stands for any lines, and …
// within a line for any text. It returns the first line that the page shows and that is not there.
func SameShape(shown []string, printed string) error {
	var lines []string
	for line := range strings.Lines(strings.TrimRight(printed, "\n ")) {
		lines = append(lines, Shape(line))
	}
	for len(shown) > 0 && strings.TrimSpace(shown[len(shown)-1]) == "" {
		shown = shown[:len(shown)-1]
	}
	skip := false
	for _, want := range shown {
		if strings.TrimSpace(want) == "…" {
			skip = true
			continue
		}
		at := slices.IndexFunc(lines, func(line string) bool { return fits(Shape(want), line) })
		if at < 0 || at > 0 && !skip {
			next := "the end"
			if len(lines) > 0 {
				next = fmt.Sprintf("%q", lines[0])
			}
			return fmt.Errorf("the page shows %q, and printed was %s", Shape(want), next)
		}
		lines, skip = lines[at+1:], false
	}
	if len(lines) > 0 && !skip {
		return fmt.Errorf("the page does not show %q", lines[0])
	}
	return nil
}

// fits: where … stands for any text.
func fits(pattern, line string) bool {
	parts := strings.Split(pattern, "…")
	rest, ok := strings.CutPrefix(line, parts[0])
	for i, part := range parts[1:] {
		if !ok {
			return false
		}
		if i == len(parts)-2 {
			return strings.HasSuffix(rest, part)
		}
		_, rest, ok = strings.Cut(rest, part)
	}
	return ok && rest == ""
}
