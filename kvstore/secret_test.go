// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// However a configuration is printed, logged or encoded, its password is not in it; nor is it in the error of a configuration
// that is refused.
func TestSecretIsNeverShown(t *testing.T) {
	const password = "correct horse battery staple"
	cfg, err := ParseConfig([]byte("endpoints: [http://127.0.0.1:2379]\nusername: u\npassword: " + password + "\n"))
	if err != nil || string(cfg.Password) != password {
		t.Fatalf("parsed %q, %v", string(cfg.Password), err)
	}
	var shown bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d", "%T"} {
		fmt.Fprintf(&shown, verb+" "+verb+" "+verb+"\n", cfg.Password, cfg, &cfg)
	}
	for _, handler := range []slog.Handler{slog.NewTextHandler(&shown, nil), slog.NewJSONHandler(&shown, nil)} {
		slog.New(handler).Info("config", "password", cfg.Password, "cfg", cfg, "pointer", &cfg, "err", fmt.Errorf("with %v", cfg))
	}
	if err := errors.Join(json.NewEncoder(&shown).Encode(cfg), yaml.NewEncoder(&shown).Encode(cfg)); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"endpoints: [ftp://x]\nusername: u\npassword: " + password, "endpoints: [http://x:1]\npassword: " + password} {
		c, err := ParseConfig([]byte(bad))
		if err == nil {
			err = c.Validate()
		}
		if err == nil {
			t.Errorf("%s is accepted", bad)
		}
		fmt.Fprintln(&shown, err)
	}
	for _, word := range append(strings.Fields(password), fmt.Sprintf("%x", password)) {
		if strings.Contains(shown.String(), word) {
			t.Errorf("%q of the password is in:\n%s", word, &shown)
		}
	}
	if !strings.Contains(shown.String(), redacted) {
		t.Errorf("nothing says that there is a password:\n%s", &shown)
	}
	if text := fmt.Sprint(Secret("")); text != "" {
		t.Errorf("no secret is shown as %q", text)
	}
}
