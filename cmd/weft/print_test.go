// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"
)

// Every format for programs says the same, whatever the text is.
func TestFormatsAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// What is no UTF-8 has been replaced before it comes to be an object.
		texts := rapid.MapOf(rapid.String(), rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
			evil, "true", "null", "1e3", "", " x", "- x", "a: b", "\n", "|", "0x10", "2026-11-20", "\u2028", "\ufeff", "\U0010ffff", "~",
		}))).Draw(t, "texts")
		object := map[string]any{"map": valid(texts), "list": []int{1, 2}, "none": nil}
		want := decoded(t, json.Unmarshal, printed(t, &output{format: formatJSON}, object))
		for _, f := range []format{formatYAML} {
			text := printed(t, &output{format: f}, object)
			if got := decoded(t, yaml.Unmarshal, text); !cmp.Equal(want, got) {
				t.Fatalf("%s (-json +%s)\n%s\n%s", f, f, cmp.Diff(want, got), text)
			}
		}
	})
}

func valid(texts map[string]string) map[string]string {
	clean := make(map[string]string)
	for k, v := range texts {
		clean[strings.ToValidUTF8(k, "?")] = strings.ToValidUTF8(v, "?")
	}
	return clean
}

func printed(t *rapid.T, out *output, object any) []byte {
	var b bytes.Buffer
	if err := out.object(&b, object); err != nil {
		t.Fatalf("%s: %v", out.format, err)
	}
	for _, r := range b.String() {
		if r != '\n' && unprintable(r) {
			t.Fatalf("%s: %q in %q", out.format, r, b.String())
		}
	}
	return b.Bytes()
}

// decoded is an object with every number as a float, as JSON has them.
func decoded(t *rapid.T, unmarshal func([]byte, any) error, text []byte) any {
	var object any
	if err := unmarshal(text, &object); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	plain, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(plain, &object); err != nil {
		t.Fatal(err)
	}
	return object
}

func TestJSONPath(t *testing.T) {
	object := map[string]any{"items": []map[string]any{
		{"prefix": "10.2.1.10/32", "identity": uint64(1<<63 + 1), "labels": []string{"a=b"}}, {"prefix": "fd00::/64", "identity": 2},
	}}
	for path, want := range map[string]string{
		"jsonpath={.items[*].prefix}":                  "10.2.1.10/32\nfd00::/64\n",
		"jsonpath={.items[0].labels}":                  `["a=b"]` + "\n",
		"jsonpath=$.items[?(@.identity == 2)].prefix":  "fd00::/64\n",
		"jsonpath={.items[1].nothing}":                 "",
		"jsonpath={.items[-1].identity}":               "2\n",
		"jsonpath=$.items[?(@.prefix == 'x')].prefix":  "",
		"jsonpath={.items[?(@.identity == 2)].labels}": "",
	} {
		var out output
		var b strings.Builder
		if err := out.Set(path); err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if err := out.object(&b, object); err != nil || b.String() != want {
			t.Errorf("%s: %q, %v; want %q", path, b.String(), err, want)
		}
	}
}
