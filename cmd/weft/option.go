// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Options are declared once, as flags. What a flag does not give comes from the environment, then from a file.

const environmentPrefix = "WEFT_"

// environmentName is the variable that stands for a flag: WEFT_API_SOCKET for api-socket.
func environmentName(flag string) string {
	return environmentPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// originAnnotation is where a flag keeps who has set it, if it was not the command line.
const originAnnotation = "weft-origin"

func setOrigin(f *pflag.Flag, origin string) {
	f.Annotations = map[string][]string{originAnnotation: {origin}}
}

// originOf says who has set a flag: flag, a variable of the environment, a file with its line, or default.
func originOf(f *pflag.Flag) string {
	switch origin := f.Annotations[originAnnotation]; {
	case len(origin) == 1:
		return origin[0]
	case f.Changed:
		return "flag"
	}
	return "default"
}

// fromEnvironment sets the flags that were not given from the environment. An empty variable counts as none.
func fromEnvironment(flags *pflag.FlagSet, lookup func(string) (string, bool)) (err error) {
	flags.VisitAll(func(f *pflag.Flag) {
		value, ok := lookup(environmentName(f.Name))
		if err != nil || f.Changed || !ok || value == "" || f.Name == "help" {
			return
		}
		if cause := flags.Set(f.Name, value); cause != nil {
			err = usagef("%s=%q: %w", environmentName(f.Name), value, reason(cause))
			return
		}
		setOrigin(f, environmentName(f.Name))
	})
	return err
}

// fromFile sets the flags that were given neither as flag nor in the environment from a YAML file of the same names. Lists
// are sequences. Keys that no option has, and those in except, are errors that name file and line.
func fromFile(flags *pflag.FlagSet, file string, except ...string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return usagef("config: %w", err)
	}
	var document yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	switch err := decoder.Decode(&document); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return usagef("config %s: %w", file, err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return usagef("config %s: want one document", file)
	}
	root := document.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil
	}
	if root.Kind != yaml.MappingNode {
		return usagef("config %s:%d: want a mapping of options to values", file, root.Line)
	}
	return fromMapping(flags, file, root, except)
}

func fromMapping(flags *pflag.FlagSet, file string, root *yaml.Node, except []string) error {
	given := make(map[string]int)
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		f := flags.Lookup(key.Value)
		if f == nil || f.Name == "help" {
			return usagef("config %s:%d: unknown option %q", file, key.Line, key.Value)
		}
		for _, name := range except {
			if key.Value == name {
				return usagef("config %s:%d: option %q cannot stand in a file", file, key.Line, key.Value)
			}
		}
		if line, ok := given[key.Value]; ok {
			return usagef("config %s:%d: option %q stands already in line %d", file, key.Line, key.Value, line)
		}
		given[key.Value] = key.Line
		if err := fromNode(f, value); err != nil {
			return usagef("config %s:%d: %s: %w", file, value.Line, key.Value, err)
		}
		if !f.Changed {
			setOrigin(f, fmt.Sprintf("%s:%d", file, key.Line))
		}
	}
	return nil
}

// fromNode sets one flag, if nothing stronger has set it; that its value is good is checked all the same.
func fromNode(f *pflag.Flag, node *yaml.Node) error {
	list, isList := f.Value.(pflag.SliceValue)
	var values []string
	switch {
	case node.Kind == yaml.ScalarNode:
		values = []string{node.Value}
	case node.Kind == yaml.SequenceNode && isList:
		for _, element := range node.Content {
			if element.Kind != yaml.ScalarNode {
				return fmt.Errorf("line %d: want a plain value", element.Line)
			}
			values = append(values, element.Value)
		}
	case isList:
		return errors.New("want a value or a list of values")
	default:
		return errors.New("want a plain value")
	}
	if isList {
		before := list.GetSlice()
		if err := list.Replace(values); err != nil || f.Changed {
			return errors.Join(err, list.Replace(before))
		}
		return nil
	}
	before := f.Value.String()
	if err := f.Value.Set(values[0]); err != nil {
		return reason(err)
	}
	if f.Changed {
		return f.Value.Set(before)
	}
	return nil
}

// reason strips what pflag puts around the cause.
func reason(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}

// list is a flag of several values, given with commas, or by giving the flag several times.
type list[T any] struct {
	values *[]T
	parse  func(string) (T, error)
	format func(T) string
	what   string
	given  bool // what is there is not the default any more
}

var _ pflag.SliceValue = (*list[string])(nil)

func (l *list[T]) Type() string   { return l.what }
func (l *list[T]) String() string { return strings.Join(l.GetSlice(), ",") }

// Set adds the values of a list with commas.
func (l *list[T]) Set(text string) error {
	fields, err := csv.NewReader(strings.NewReader(text)).Read()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if !l.given {
		*l.values, l.given = nil, true
	}
	for _, field := range fields {
		if err := l.Append(field); err != nil {
			return err
		}
	}
	return nil
}

// Append adds one value.
func (l *list[T]) Append(text string) error {
	v, err := l.parse(strings.TrimSpace(text))
	if err == nil {
		*l.values = append(*l.values, v)
	}
	return err
}

// Replace puts other values in place of those that are there.
func (l *list[T]) Replace(texts []string) error {
	before := *l.values
	*l.values = nil
	for _, text := range texts {
		if err := l.Append(text); err != nil {
			*l.values = before
			return err
		}
	}
	return nil
}

// GetSlice returns the values as text.
func (l *list[T]) GetSlice() []string {
	texts := []string{}
	for _, v := range *l.values {
		texts = append(texts, l.format(v))
	}
	return texts
}
