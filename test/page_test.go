// SPDX-License-Identifier: Apache-2.0

package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// The page of a real agent, in a real browser: the mesh with the remote cluster, an answer to a question that is typed, and
// a cluster that is lost.
func TestPage(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	west.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	a := h.start(t, "east", 1, "--page-address", "127.0.0.1:0")
	h.awaitVerified(t)
	url := strings.TrimSpace(string(command(t, os.Getenv(weftEnv), "page", "--api-socket", h.socket)))
	content, err := os.ReadFile(a.log.Name())
	if err != nil {
		t.Fatal(err)
	}
	base, token, ok := strings.Cut(url, "?token=")
	if !ok || !strings.Contains(string(content), base) || strings.Contains(string(content), token) {
		t.Fatalf("weft page prints %q; the log is to have the address, and not the token:\n%s", url, content)
	}

	b := testutil.StartBrowser(t)
	shows := func(selector string, texts ...string) {
		t.Helper()
		testutil.Eventually(t, 60*time.Second, func() error {
			shown := b.Text(t, selector)
			for _, text := range texts {
				if !strings.Contains(shown, text) {
					return fmt.Errorf("%s shows %q, want %q", selector, shown, text)
				}
			}
			return nil
		})
	}
	b.Open(t, base)
	shows("body", "weft page")
	b.Complaints(t) // the browser tells that it was refused
	b.Open(t, url)
	var at string
	if b.Run(t, `return location.href`, &at); at != base {
		t.Errorf("the browser shows %q as its address, want %q", at, base)
	}
	shows("#self", "east (1)", "east-n1")
	shows("#health", "healthy")
	shows("#rows", "west", "ready")
	var aria string
	b.Run(t, `return document.querySelector("#picture g[role=button]").getAttribute("aria-label")`, &aria)
	if !strings.HasPrefix(aria, "west (2), ") {
		t.Errorf("the picture shows %q", aria)
	}
	// With keys alone: a cluster's name shows more of it, and keeps the focus when the table is filled anew.
	b.Run(t, `window.held = document.querySelector("#rows button[data-cluster=west]"); held.focus(); held.click()`, new(any))
	shows("#detail", "west", "last answer", "revision")
	testutil.Eventually(t, 60*time.Second, func() error {
		var gone bool
		if b.Run(t, `return !held.isConnected`, &gone); !gone {
			return fmt.Errorf("the table is not filled anew")
		}
		return nil
	})
	var focus, expanded string
	b.Run(t, `return document.activeElement.dataset.cluster ?? ""`, &focus)
	b.Run(t, `return document.activeElement.getAttribute("aria-expanded") ?? ""`, &expanded)
	if focus != "west" || expanded != "true" {
		t.Errorf("the focus is at %q, expanded %q, want west, true", focus, expanded)
	}
	b.Type(t, "#address", "10.2.1.10")
	b.Click(t, "#search button")
	shows("#answer", "10.2.1.10/32", "cilium/state/ip/v1/default/10.2.1.10", "in force", "✓ identity ")
	b.Type(t, "#address", "x")
	b.Click(t, "#search button")
	shows("#answer", "is not an IP address")

	west.Stop(t)
	shows("#rows", "! stale")
	for _, complaint := range b.Complaints(t) {
		if !strings.Contains(complaint, "400 (Bad Request)") { // the question that was none
			t.Errorf("the browser complains: %s", complaint)
		}
	}
}
