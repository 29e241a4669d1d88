// SPDX-License-Identifier: Apache-2.0

package yamldir

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// parseWords reads files of words.
func parseWords(file string, content []byte) ([]string, []Problem, error) {
	return Parse(file, content, func(node *yaml.Node) (word string, err error) { return word, node.Decode(&word) })
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, d *Dir[string], words ...string) {
	t.Helper()
	if got, _ := d.All(); !slices.Equal(got, words) {
		t.Errorf("got %q, want %q", got, words)
	}
}

// A thorough scan sees what attributes do not show, and what it sees a second time is no change.
func TestThoroughScanReadsUnchangedFiles(t *testing.T) {
	f := filepath.Join(t.TempDir(), "a.yaml")
	write(t, f, "one")
	d := New[string](filepath.Dir(f), "words")
	if !d.Scan(true, parseWords) || d.Scan(true, parseWords) {
		t.Error("the first scan is a change, and the second one none")
	}
	now, err := attributesOf(f)
	if err != nil {
		t.Fatal(err)
	}
	write(t, f, "two")
	if err := os.Chtimes(f, time.Time{}, now.mtime); err != nil {
		t.Fatal(err)
	}
	// As a file system without change times would have it.
	later, err := attributesOf(f)
	if err != nil {
		t.Fatal(err)
	}
	d.files["a.yaml"].seen, d.files["a.yaml"].taken = later, later
	if d.Scan(false, parseWords) {
		t.Error("a scan that is not thorough has read a file that seems unchanged")
	}
	want(t, d, "one")
	if !d.Scan(true, parseWords) || d.Scan(true, parseWords) {
		t.Error("a thorough scan did not read the file, or twice")
	}
	want(t, d, "two")
}

// Files are taken at rest, bad ones leave what they said last in force, and gone ones go.
func TestDirFollowsFiles(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yml")
	d := New[string](dir, "words")
	d.Scan(false, parseWords)
	write(t, a, "- one\n- [two]\n- three\n---\nfour\n")
	write(t, filepath.Join(dir, ".hidden.yaml"), "hidden")
	write(t, filepath.Join(dir, "notes.txt"), "notes")
	if d.Scan(false, parseWords) {
		t.Error("a file was taken at first sight")
	}
	d.Scan(false, parseWords)
	want(t, d, "one", "three", "four")
	if _, problems := d.All(); len(problems) != 1 || problems[0].File != "a.yaml" || problems[0].Line != 2 {
		t.Errorf("problems %v", problems)
	}
	write(t, b, "five")
	write(t, a, "{")
	d.Scan(false, parseWords)
	d.Scan(false, parseWords)
	want(t, d, "one", "three", "four", "five")
	if _, problems := d.All(); len(problems) != 1 || !strings.HasSuffix(problems[0].Message, "; its last good version stays in force") {
		t.Errorf("problems %v", problems)
	}
	if err := os.Remove(a); err != nil {
		t.Fatal(err)
	}
	d.Scan(false, parseWords)
	want(t, d, "one", "three", "four", "five")
	d.Scan(false, parseWords)
	want(t, d, "five")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	d.Scan(false, parseWords)
	want(t, d, "five")
	if _, problems := d.All(); len(problems) != 1 || !strings.HasPrefix(problems[0].Error(), "words directory: ") {
		t.Errorf("problems %v", problems)
	}
}
