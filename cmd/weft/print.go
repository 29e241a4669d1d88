// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// format is how a command prints its result.
type format string

const (
	formatTable format = "table"
	formatJSON  format = "json"
)

func (f *format) String() string { return string(*f) }
func (f *format) Type() string   { return "format" }

func (f *format) Set(text string) error {
	switch format(text) {
	case formatTable, formatJSON:
		*f = format(text)
		return nil
	}
	return fmt.Errorf("want %s or %s", formatTable, formatJSON)
}

// outputFlag gives a command the option to print JSON.
func outputFlag(cmd *cobra.Command) *format {
	f := formatTable
	cmd.Flags().VarP(&f, "output", "o", "table, or json: objects with apiVersion and kind")
	// The error tells of a flag that does not exist; this one does.
	_ = cmd.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions([]cobra.Completion{string(formatTable), string(formatJSON)}, cobra.ShellCompDirectiveNoFileComp))
	return &f
}

// newCommand is a command that takes exactly the arguments that use names in capitals.
func newCommand(use, short string, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	arguments := len(strings.Fields(use)) - 1
	return &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(arguments), RunE: run,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
}

// printable returns s with all that does not print, or would change what is printed around it, escaped as in a Go string.
// Names, labels and reasons come from other clusters and must not drive the reader's terminal.
func printable(s string) string {
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return s
	}
	quoted := strconv.Quote(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// table prints rows in columns. Every cell is made printable.
type table struct {
	w *tabwriter.Writer
}

// newTable begins a table with a header; without one if there are no columns.
func newTable(w io.Writer, columns ...string) *table {
	t := &table{w: tabwriter.NewWriter(w, 5, 0, 3, ' ', 0)}
	if len(columns) > 0 {
		t.row(columns...)
	}
	return t
}

func (t *table) row(cells ...string) {
	for i, cell := range cells {
		cells[i] = printable(cell)
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// printJSON prints an object, indented.
func printJSON(w io.Writer, object any) error {
	text, err := json.MarshalIndent(object, "", "  ")
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, harmless(text)+"\n")
	return err
}

// printLine prints an object as one line.
func printLine(w io.Writer, object any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, harmless(text)+"\n")
	return err
}

// harmless escapes what JSON lets pass but a terminal may act upon: control characters above ASCII, changes of direction.
func harmless(text []byte) string {
	var b strings.Builder
	for _, r := range string(text) {
		switch {
		case r == '\n' || strconv.IsPrint(r):
			b.WriteRune(r)
		case r > 0xffff:
			r -= 0x10000
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// orDash shows what is empty.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// texts turns values into text.
func texts[T fmt.Stringer](values []T) []string {
	s := make([]string, 0, len(values))
	for _, v := range values {
		s = append(s, v.String())
	}
	return s
}
