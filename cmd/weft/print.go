// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/ohler55/ojg/jp"
	"github.com/ohler55/ojg/oj"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// format is how a command prints its result.
type format string

const (
	formatTable    format = "table"
	formatWide     format = "wide"
	formatTSV      format = "tsv"
	formatJSON     format = "json"
	formatYAML     format = "yaml"
	formatJSONPath format = "jsonpath"
)

// output is how a command prints its result, in every form that there is. It is the value of --output.
type output struct {
	format    format
	text      string  // as given
	path      jp.Expr // of jsonpath
	noHeaders bool
}

// outputFlags gives a command the options that say how its result is printed.
func outputFlags(cmd *cobra.Command) *output {
	o := &output{format: formatTable, text: string(formatTable)}
	cmd.Flags().VarP(o, "output", "o", "table, wide (all columns), tsv (these, parted by tabs), json or yaml (objects with apiVersion and "+
		"kind), or jsonpath=PATH into these")
	cmd.Flags().BoolVar(&o.noHeaders, "no-headers", false, "leave out the titles of the columns")
	// The error tells of a flag that does not exist; this one does.
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]cobra.Completion{
		string(formatTable), string(formatWide), string(formatTSV), string(formatJSON), string(formatYAML), string(formatJSONPath) + "=",
	}, cobra.ShellCompDirectiveNoFileComp))
	return o
}

func (o *output) String() string { return o.text }
func (o *output) Type() string   { return "format" }

func (o *output) Set(text string) error {
	name, path, hasPath := strings.Cut(text, "=")
	switch f := format(name); {
	case f == formatJSONPath && hasPath:
		// As for kubectl: {.items[*].prefix}. What it prints around a path, and range, is not known here.
		path = strings.TrimSuffix(strings.TrimPrefix(path, "{"), "}")
		if !strings.HasPrefix(path, "$") {
			path = "$" + path
		}
		expr, err := jp.ParseString(path)
		if err != nil {
			return fmt.Errorf("jsonpath %s: %w", path, err)
		}
		o.format, o.path = f, expr
	case hasPath:
		return o.unknown()
	case f == formatTable || f == formatWide || f == formatTSV || f == formatJSON || f == formatYAML:
		o.format = f
	default:
		return o.unknown()
	}
	o.text = text
	return nil
}

func (*output) unknown() error {
	return fmt.Errorf("want table, wide, tsv, json, yaml, or jsonpath= and a path such as {.items[*].prefix}")
}

// forPrograms: an object is printed, not a table.
func (o *output) forPrograms() bool {
	return o.format == formatJSON || o.format == formatYAML || o.format == formatJSONPath
}

// forPeople: what is printed may have sentences.
func (o *output) forPeople() bool { return !o.forPrograms() && o.format != formatTSV }

// full: every column is shown.
func (o *output) full() bool { return o.format == formatWide || o.format == formatTSV }

// object prints an object for programs.
func (o *output) object(w io.Writer, object any) error {
	switch o.format {
	case formatYAML:
		return printYAML(w, object)
	case formatJSONPath:
		return o.printPath(w, object)
	}
	return printJSON(w, object)
}

// line prints an object as one of many: JSON in one line, YAML as a document.
func (o *output) line(w io.Writer, object any) error {
	switch o.format {
	case formatYAML:
		if _, err := io.WriteString(w, "---\n"); err != nil {
			return err
		}
		return printYAML(w, object)
	case formatJSONPath:
		return o.printPath(w, object)
	}
	return printLine(w, object)
}

// show prints an object for programs, or else as people does.
func (o *output) show(w io.Writer, object any, people func(*table)) error {
	if o.forPrograms() {
		return o.object(w, object)
	}
	t := o.table(w)
	people(t)
	return t.flush()
}

// result prints what has become of something: for people a sentence, and nothing if it is empty; as TSV, cells.
func (o *output) result(w io.Writer, object any, sentence string, cells ...string) error {
	switch {
	case o.forPrograms():
		return o.object(w, object)
	case o.format == formatTSV:
		t := o.table(w)
		t.row(cells...)
		return t.flush()
	case sentence == "":
		return nil
	}
	_, err := fmt.Fprintln(w, printable(sentence))
	return err
}

// table begins a table in the form that was asked for.
func (o *output) table(w io.Writer, columns ...string) *table {
	t := newTable(w)
	t.bare = o.format == formatTSV
	if len(columns) > 0 && !o.noHeaders && !o.forPrograms() {
		t.row(columns...)
	}
	return t
}

// printPath prints what the path leads to, each value in a line: text as it is, all else as JSON.
func (o *output) printPath(w io.Writer, object any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	parsed, err := oj.Parse(text)
	if err != nil {
		return err
	}
	for _, value := range o.path.Get(parsed) {
		line, isText := value.(string)
		if !isText {
			text, err := json.Marshal(value)
			if err != nil {
				return err
			}
			line = harmless(text)
		}
		if _, err := fmt.Fprintln(w, printable(line)); err != nil {
			return err
		}
	}
	return nil
}

// table prints rows in columns. Every cell is made printable.
type table struct {
	out  io.Writer
	w    *tabwriter.Writer
	bare bool // columns are parted by one tab each, for programs
	ink  ink
}

// newTable begins a table with a header; without one if there are no columns.
func newTable(w io.Writer, columns ...string) *table {
	t := &table{out: w, w: tabwriter.NewWriter(w, 5, 0, 3, ' ', 0)}
	if len(columns) > 0 {
		t.row(columns...)
	}
	return t
}

func (t *table) row(cells ...string) {
	for i, cell := range cells {
		cells[i] = printable(cell)
	}
	if t.bare {
		fmt.Fprintln(t.out, strings.Join(cells, "\t"))
		return
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

// marked prints a row that begins with a mark. Every row of the table must, so that colours do not shift columns.
func (t *table) marked(m mark, cells ...string) {
	for i, cell := range cells {
		cells[i] = printable(cell)
	}
	fmt.Fprintln(t.w, t.ink.mark(m)+"\t"+strings.Join(cells, "\t"))
}

// rows prints values below each other, the first one titled.
func (t *table) rows(title string, values []string) {
	for _, v := range values {
		t.row(title, v)
		title = ""
	}
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

// printYAML prints an object with the names and the order that it has in JSON.
func printYAML(w io.Writer, object any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	var document yaml.Node
	if err := yaml.Unmarshal([]byte(harmlessYAML(text)), &document); err != nil {
		return err
	}
	inBlocks(&document)
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(&document); err != nil {
		return err
	}
	_, err = io.WriteString(w, harmlessYAML(out.Bytes()))
	return err
}

// inBlocks lays out what was JSON as people write YAML. Only between quotes can an escape stand, so what needs one keeps them.
func inBlocks(n *yaml.Node) {
	if n.Kind != yaml.ScalarNode || !strings.ContainsFunc(n.Value, unprintable) {
		n.Style = 0
	}
	for _, child := range n.Content {
		inBlocks(child)
	}
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
