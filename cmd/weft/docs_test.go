// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// documents are the pages that people write; the reference and the manual pages are made of the commands.
func documents(t *testing.T) map[string]string {
	t.Helper()
	pages := make(map[string]string)
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../docs/design/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			pages[file] = string(content)
		}
	}
	return pages
}

// docCommand is a command that a page shows in a fenced block.
type docCommand struct {
	page string
	line int
	text string
}

func (c docCommand) String() string { return fmt.Sprintf("%s:%d: %q", c.page, c.line, c.text) }

// documentedCommands are the lines of fenced blocks that call program, without what the shell makes of them.
func documentedCommands(t *testing.T, programs ...string) (commands []docCommand) {
	t.Helper()
	for page, content := range documents(t) {
		fenced, language, prompts := false, "", false
		lines := strings.Split(content, "\n")
		for i := 0; i < len(lines); i++ {
			line := lines[i]
			if word, ok := strings.CutPrefix(strings.TrimSpace(line), "```"); ok {
				// In a block with prompts, what has none is what was printed.
				fenced, language, prompts = !fenced, word, i+1 < len(lines) && strings.HasPrefix(lines[i+1], "$ ")
				continue
			}
			if !fenced || language != "" && language != "sh" && language != "console" || prompts && !strings.HasPrefix(line, "$ ") {
				continue
			}
			first := i + 1
			for strings.HasSuffix(line, "\\") && i+1 < len(lines) {
				i++
				line = strings.TrimSuffix(line, "\\") + " " + strings.TrimSpace(lines[i])
			}
			line, _, _ = strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "$ "), " #")
			for _, mark := range []string{" | ", " >", " && ", " ; "} {
				line, _, _ = strings.Cut(line, mark)
			}
			words := strings.Fields(line)
			if len(words) > 0 && slices.Contains(programs, words[0]) {
				commands = append(commands, docCommand{page, first, strings.TrimSpace(line)})
			}
		}
	}
	return commands
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

// notRun are the commands that the test below does not run, and why: their command lines are checked all the same.
var notRun = map[string]string{
	"agent":           "it runs until it is interrupted: agent_test.go",
	"operator":        "it runs until it is interrupted, or needs an etcd: operator_test.go",
	"bpf":             "it reads pins: agent_test.go",
	"kvstore":         "it needs an etcd: kvstore_test.go",
	"troubleshoot":    "it needs an etcd: troubleshoot_test.go",
	"clusters add":    "it needs an etcd: clusters_write_test.go",
	"clusters remove": "it removes a file: clusters_write_test.go",
	"endpoint add":    "it changes the agent: endpoint_write_test.go",
	"endpoint remove": "it changes the agent: endpoint_write_test.go",
	"verify":          "it needs a kernel to compare: verify_test.go",
	"cleanup":         "it needs a kernel to clean: agent_test.go",
	"diagnose":        "it is about this machine: agent_test.go",
	"gather":          "it writes a file: gather_test.go",
	"log-level":       "it changes the agent: agent_test.go",
	"completion":      "it needs no agent: TestExitCodes",
	"bench":           "it measures this machine: bench_test.go",
	"service watch":   "it runs until it is interrupted: list_test.go",
}

// Every command of weft in the documents is one that the command line takes; those that only read are run against an agent,
// and answer.
func TestDocumentedCommands(t *testing.T) {
	env := map[string]string{"WEFT_API_SOCKET": serveAgent(t, lab(true))}
	ran := 0
	for _, c := range documentedCommands(t, "weft", "bin/weft") {
		words := shellWords(strings.TrimSuffix(c.text, "…"))[1:]
		root, _ := newRoot(environment{})
		cmd, args, err := root.Find(words)
		if err == nil {
			err = cmd.ParseFlags(args)
		}
		if err == nil {
			err = cmd.ValidateArgs(cmd.Flags().Args())
		}
		if err != nil {
			t.Errorf("%s: %v", c, err)
			continue
		}
		if slices.Contains(words, "--api-socket") {
			continue // it is about an agent that is not there
		}
		path := strings.TrimPrefix(cmd.CommandPath(), "weft ")
		if notRun[path] != "" || notRun[strings.Fields(path)[0]] != "" || follows(args) {
			continue
		}
		ran++
		if code, stdout, stderr := weft(t, env, words...); code == exitUsage || code == exitUnreachable || code == exitNot && stdout == "" && !strings.Contains(stderr, "not found") {
			t.Errorf("%s: exit code %d\n%s%s", c, code, stdout, stderr)
		}
	}
	if ran < 10 {
		t.Errorf("only %d commands were run: where are the documents?", ran)
	}
}

// follows: a command that goes on until it is interrupted, or that writes a file.
func follows(args []string) bool {
	return slices.ContainsFunc(args, func(a string) bool {
		return slices.Contains([]string{"-f", "--follow", "-w", "--watch", "--wait", "--pcap"}, a)
	})
}

// Every target of make in the documents is one.
func TestDocumentedTargets(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	targets := regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(string(makefile), -1)
	known := func(name string) bool {
		return slices.ContainsFunc(targets, func(m []string) bool { return m[1] == name })
	}
	found := 0
	for _, c := range documentedCommands(t, "make") {
		for _, word := range strings.Fields(c.text)[1:] {
			if strings.Contains(word, "=") || strings.HasPrefix(word, "-") {
				continue
			}
			found++
			if !known(word) {
				t.Errorf("%s: the Makefile has no target %s", c, word)
			}
		}
	}
	inline := regexp.MustCompile("`make ([a-z-]+)`")
	for page, content := range documents(t) {
		for _, m := range inline.FindAllStringSubmatch(content, -1) {
			found++
			if !known(m[1]) {
				t.Errorf("%s: the Makefile has no target %s", page, m[1])
			}
		}
	}
	if found == 0 {
		t.Error("the documents name no target")
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
		// A cause is appended where there is one: because(…).
		text = regexp.MustCompile(`([^ ])%s$`).ReplaceAllString(text, "$1")
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
