// SPDX-License-Identifier: Apache-2.0

package yamldir

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Problem says what is wrong with a file, an entry of it, or, where File is empty, with all of it.
type Problem struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"` // where the entry begins; 0: the file as a whole
	Message string `json:"message"`
}

func (e Problem) Error() string {
	switch {
	case e.File == "":
		return e.Message
	case e.Line == 0:
		return e.File + ": " + e.Message
	}
	return e.File + ":" + strconv.Itoa(e.Line) + ": " + e.Message
}

// Parse reads a file of any number of documents, each an entry or a list of entries, with declare. Entries that are wrong stand
// in rejected, the others are good. The error says that the file as a whole is not YAML; nothing of it may be used then.
func Parse[T any](file string, content []byte, declare func(*yaml.Node) (T, error)) (good []T, rejected []Problem, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	for {
		var document yaml.Node
		switch err := decoder.Decode(&document); {
		case errors.Is(err, io.EOF):
			return good, rejected, nil
		case err != nil:
			return nil, nil, err
		}
		for _, node := range entriesOf(&document) {
			d, err := declare(node)
			if err != nil {
				rejected = append(rejected, Problem{File: file, Line: node.Line, Message: Sentence(err)})
				continue
			}
			good = append(good, d)
		}
	}
}

// entriesOf lists the entries of a document. An empty document has none.
func entriesOf(document *yaml.Node) []*yaml.Node {
	root := document
	if root.Kind == yaml.DocumentNode && len(root.Content) > 0 {
		root = root.Content[0]
	}
	switch {
	case root.Kind == yaml.SequenceNode:
		return root.Content
	case root.Kind == yaml.ScalarNode && root.Tag == "!!null":
		return nil
	}
	return []*yaml.Node{root}
}

// Sentence flattens the several lines of a YAML type error into one.
func Sentence(err error) string {
	var typeError *yaml.TypeError
	if errors.As(err, &typeError) {
		return strings.Join(typeError.Errors, "; ")
	}
	return err.Error()
}
