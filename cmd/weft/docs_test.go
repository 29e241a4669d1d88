// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// documents are the pages that people write, by file; the reference and the manual pages are made of the commands.
func documents(t *testing.T) map[string]string {
	t.Helper()
	pages := make(map[string]string)
	for _, file := range testutil.Documents(t, "../..") {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		pages[file] = string(content)
	}
	return pages
}

// shellWords parts a command line as a shell does, as far as quotes go.
func shellWords(line string) (words []string) {
	word, quote, within := "", rune(0), false
	for _, r := range line {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word += string(r)
		case r == '\'' || r == '"':
			quote, within = r, true
		case r == ' ' || r == '\t':
			if within {
				words = append(words, word)
			}
			word, within = "", false
		default:
			word, within = word+string(r), true
		}
	}
	if within {
		words = append(words, word)
	}
	return words
}

// Every fenced block says what it is, by which test/docs knows what to do with it, and is that.
func TestDocumentedBlocks(t *testing.T) {
	blocks := 0
	for page := range documents(t) {
		for _, b := range testutil.Blocks(t, page) {
			blocks++
			switch b.Language {
			case "sh", "text", "ini":
			case "console":
				if len(b.Lines) == 0 || !strings.HasPrefix(b.Lines[0], "$ ") {
					t.Errorf("%s: what a terminal shows begins with a command, after \"$ \"", b)
				}
			case "yaml", "json":
				decoder := yaml.NewDecoder(strings.NewReader(strings.Join(b.Lines, "\n")))
				var err error
				for err == nil {
					var document any
					err = decoder.Decode(&document)
				}
				if !errors.Is(err, io.EOF) {
					t.Errorf("%s: %v", b, err)
				}
			default:
				t.Errorf("%s: a block of %q: say whether it is sh, console, yaml, json, ini or text", b, b.Language)
			}
		}
	}
	if blocks < 100 {
		t.Errorf("the documents have %d blocks: where are they?", blocks)
	}
}

// inlineCommand is a command in the text of a page; those in blocks of their own are run by test/docs.
var inlineCommand = regexp.MustCompile("`(?:bin/)?(weft [^`]+)`")

// Every command of weft that a page names within a sentence is one that the command line takes, with its options. What stands for
// something else is in capitals, or is … itself.
func TestDocumentedCommands(t *testing.T) {
	found := 0
	for page, content := range documents(t) {
		fenced := false
		for line := range strings.Lines(content) {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				fenced = !fenced
			}
			if fenced {
				continue
			}
			for _, m := range inlineCommand.FindAllStringSubmatch(line, -1) {
				found++
				if err := takes(shellWords(m[1])[1:]); err != nil {
					t.Errorf("%s: %s: %v", page, m[1], err)
				}
			}
		}
	}
	if found < 50 {
		t.Errorf("the documents name %d commands: where are they?", found)
	}
}

// takes: the command line has this command and its options. Values and arguments are placeholders as often as not.
func takes(words []string) error {
	root, _ := newRoot(environment{})
	cmd, args, err := root.Find(slices.DeleteFunc(words, func(w string) bool { return w == "…" }))
	if err != nil {
		return err
	}
	for _, arg := range args {
		name, isFlag := strings.CutPrefix(arg, "--")
		name, _, _ = strings.Cut(name, "=")
		name, _, _ = strings.Cut(name, "|")
		if isFlag && cmd.Flags().Lookup(name) == nil && cmd.InheritedFlags().Lookup(name) == nil && name != "help" {
			return fmt.Errorf("it has no option --%s", name)
		}
	}
	if len(args) > 0 && cmd.HasSubCommands() && !cmd.Runnable() && !strings.HasPrefix(args[0], "-") {
		return fmt.Errorf("it has no command %s", args[0])
	}
	return nil
}

// Every target of make in the documents is one.
func TestDocumentedTargets(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(string(makefile), -1) {
		known[m[1]] = true
	}
	named := regexp.MustCompile(`^(?:WEFT_[A-Z]+=\S+ )?make ([a-z-]+)`)
	inline := regexp.MustCompile("`(make [^`]+)`")
	found := 0
	check := func(page, command string) {
		if m := named.FindStringSubmatch(command); m != nil {
			if found++; !known[m[1]] {
				t.Errorf("%s: %s: the Makefile has no target %s", page, command, m[1])
			}
		}
	}
	for page, content := range documents(t) {
		for _, m := range inline.FindAllStringSubmatch(content, -1) {
			check(page, m[1])
		}
		for _, b := range testutil.Blocks(t, page) {
			for _, c := range b.Commands() {
				check(page, c.Text)
			}
		}
	}
	if found < 20 {
		t.Errorf("the documents name %d targets: where are they?", found)
	}
}

var (
	docLink    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	docHeading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInSlug  = regexp.MustCompile("[^a-z0-9 _-]")
)

// anchors are the places in a page that a link can lead to, by GitHub's rule.
func anchors(content string) (all []string) {
	for _, m := range docHeading.FindAllStringSubmatch(content, -1) {
		slug := notInSlug.ReplaceAllString(strings.ToLower(strings.TrimSpace(m[1])), "")
		all = append(all, strings.ReplaceAll(slug, " ", "-"))
	}
	return all
}

// Every link between the documents leads to something that is there.
func TestDocumentedLinks(t *testing.T) {
	found := 0
	for page, content := range documents(t) {
		for _, m := range docLink.FindAllStringSubmatch(content, -1) {
			target, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			found++
			file := page
			if target != "" {
				file = filepath.Join(filepath.Dir(page), target)
			}
			text, err := os.ReadFile(file)
			if info, statErr := os.Stat(file); statErr != nil || err != nil && !info.IsDir() {
				t.Errorf("%s: link to %s, which is not there", page, m[1])
				continue
			}
			if anchor != "" && !slices.Contains(anchors(string(text)), anchor) {
				t.Errorf("%s: link to %s: the page has no such heading", page, m[1])
			}
		}
	}
	if found == 0 {
		t.Error("no document has a link")
	}
}

// statusTexts are the problems that status can name, as their functions of package api write them, with … for what varies.
func statusTexts(t *testing.T, file string) (texts []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		name, isAdd := call.Fun.(*ast.Ident)
		format, isText := call.Args[0].(*ast.BasicLit)
		if !isAdd || name.Name != "add" || !isText {
			return true
		}
		text, err := strconv.Unquote(format.Value)
		if err != nil {
			t.Fatal(err)
		}
		// A cause is appended where there is one: because(…). What stands in a table as code has no quotes.
		text = strings.ReplaceAll(regexp.MustCompile(`([a-z])%s(:|$)`).ReplaceAllString(text, "$1$2"), "`", "")
		texts = append(texts, regexp.MustCompile(`%[a-z]`).ReplaceAllString(text, "…"))
		return true
	})
	return texts
}

// Every problem that the status can name has a row in the operator's manual.
func TestDocumentedProblems(t *testing.T) {
	operations, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"../../api/status.go", "../../api/operator.go"} {
		texts := statusTexts(t, file)
		if len(texts) < 4 {
			t.Errorf("%s: %d problems found: are they added in another way now?", file, len(texts))
		}
		for _, text := range texts {
			if !strings.Contains(string(operations), "| `"+text+"` |") {
				t.Errorf("docs/operations.md has no row for %q of %s", text, file)
			}
		}
	}
}

// docs/agent.md has a row for each option of the agent, and for nothing else.
func TestDocumentedOptions(t *testing.T) {
	page := documents(t)["../../docs/agent.md"]
	_, table, _ := strings.Cut(page, "| option | default |")
	table, _, _ = strings.Cut(table, "\n\n")
	rows := make(map[string]bool)
	for line := range strings.Lines(table) {
		first, _, _ := strings.Cut(strings.TrimPrefix(line, "|"), "|")
		for _, m := range regexp.MustCompile("`([a-z-]+)`").FindAllStringSubmatch(first, -1) {
			rows[m[1]] = true
		}
	}
	root, _ := newRoot(environment{})
	agent, _, err := root.Find([]string{"agent"})
	if err != nil {
		t.Fatal(err)
	}
	agent.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" && !f.Hidden && !rows[f.Name] {
			t.Errorf("docs/agent.md has no row for the option %s", f.Name)
		}
		delete(rows, f.Name)
	})
	for name := range rows {
		if agent.InheritedFlags().Lookup(name) == nil {
			t.Errorf("docs/agent.md has a row for %s, which is no option of the agent", name)
		}
	}
}
