// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"syscall"
	"testing"
	"time"
)

// Browser is a headless Chromium, driven as W3C WebDriver (https://www.w3.org/TR/webdriver2/) says, of Debian's packages
// chromium and chromium-driver. It ends with the test.
type Browser struct {
	session string // its URL
	client  http.Client
}

// chromiumFlags: without sandbox, as it is root; and silent, as nothing beyond this machine may be asked.
var chromiumFlags = []string{
	"--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
	"--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000",
}

var driverStarted = regexp.MustCompile(`was started successfully on port (\d+)`)

// StartBrowser starts a browser with an empty profile.
func StartBrowser(t testing.TB) *Browser {
	t.Helper()
	home := t.TempDir()
	cmd := exec.Command("/usr/bin/chromedriver", "--port=0")
	cmd.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+home)
	// Its own process group, so that browsers that outlive a driver which was killed end, too.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start chromedriver: %v: make deps installs it", err)
	}
	drained := make(chan struct{})
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-drained
		_ = cmd.Wait() // killed
	})
	port := make(chan string, 1)
	go func() {
		defer close(drained)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if m := driverStarted.FindStringSubmatch(lines.Text()); m != nil {
				port <- m[1]
			}
		}
	}()
	b := &Browser{client: http.Client{Timeout: time.Minute}}
	select {
	case p := <-port:
		b.session = "http://127.0.0.1:" + p + "/session"
	case <-drained:
		t.Fatal("chromedriver ended")
	case <-time.After(time.Minute):
		t.Fatal("chromedriver names no port")
	}
	var started struct{ SessionID string }
	b.ask(t, http.MethodPost, "", map[string]any{"capabilities": map[string]any{"alwaysMatch": map[string]any{
		"goog:chromeOptions": map[string]any{
			"binary": "/usr/bin/chromium", "args": append([]string{"--user-data-dir=" + home + "/profile"}, chromiumFlags...),
		},
		"goog:loggingPrefs": map[string]any{"browser": "ALL"},
	}}}, &started)
	b.session += "/" + started.SessionID
	t.Cleanup(func() {
		request, err := http.NewRequest(http.MethodDelete, b.session, nil)
		if err == nil {
			if response, err := b.client.Do(request); err == nil {
				response.Body.Close()
			}
		}
		b.client.CloseIdleConnections()
	})
	return b
}

// ask sends a command of WebDriver and decodes its value.
func (b *Browser) ask(t testing.TB, method, path string, body, value any) {
	t.Helper()
	var content io.Reader
	if method == http.MethodPost {
		encoded, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		content = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, b.session+path, content)
	if err != nil {
		t.Fatal(err)
	}
	response, err := b.client.Do(request)
	if err != nil {
		t.Fatalf("browser: %v", err)
	}
	defer response.Body.Close()
	var answer struct{ Value json.RawMessage }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		t.Fatalf("browser: %v", err)
	}
	if response.StatusCode != http.StatusOK {
		t.Fatalf("browser: %s %s: %s", method, path, answer.Value)
	}
	if value == nil {
		return
	}
	if err := json.Unmarshal(answer.Value, value); err != nil {
		t.Fatalf("browser: %s: %v", answer.Value, err)
	}
}

// Open goes to a page and returns when it has loaded.
func (b *Browser) Open(t testing.TB, url string) {
	t.Helper()
	b.ask(t, http.MethodPost, "/url", map[string]string{"url": url}, nil)
}

// Run runs the body of a JavaScript function in the page and decodes what it returns. A promise is waited for.
func (b *Browser) Run(t testing.TB, script string, result any, arguments ...any) {
	t.Helper()
	if arguments == nil {
		arguments = []any{}
	}
	b.ask(t, http.MethodPost, "/execute/sync", map[string]any{"script": script, "args": arguments}, result)
}

// Text is what a person reads in the first element that a CSS selector finds; empty if there is none.
func (b *Browser) Text(t testing.TB, selector string) string {
	t.Helper()
	var text string
	b.Run(t, `return document.querySelector(arguments[0])?.innerText ?? ""`, &text, selector)
	return text
}

// element finds the first element of a CSS selector.
func (b *Browser) element(t testing.TB, selector string) string {
	t.Helper()
	var found map[string]string
	b.ask(t, http.MethodPost, "/element", map[string]string{"using": "css selector", "value": selector}, &found)
	for _, id := range found {
		return "/element/" + id
	}
	t.Fatalf("browser: no element %s", selector)
	return ""
}

// Click clicks on an element as a person does.
func (b *Browser) Click(t testing.TB, selector string) {
	t.Helper()
	b.ask(t, http.MethodPost, b.element(t, selector)+"/click", struct{}{}, nil)
}

// Type types into an element.
func (b *Browser) Type(t testing.TB, selector, text string) {
	t.Helper()
	b.ask(t, http.MethodPost, b.element(t, selector)+"/value", map[string]string{"text": text}, nil)
}

// Complaints are the errors and warnings that the page has caused since the last call.
func (b *Browser) Complaints(t testing.TB) []string {
	t.Helper()
	var entries []struct{ Level, Message string }
	b.ask(t, http.MethodPost, "/se/log", map[string]string{"type": "browser"}, &entries)
	var complaints []string
	for _, e := range entries {
		if e.Level == "SEVERE" || e.Level == "WARNING" {
			complaints = append(complaints, fmt.Sprintf("%s: %s", e.Level, e.Message))
		}
	}
	return complaints
}

// Screenshot writes what is seen into a PNG file.
func (b *Browser) Screenshot(t testing.TB, file string) {
	t.Helper()
	var encoded string
	b.ask(t, http.MethodGet, "/screenshot", nil, &encoded)
	png, err := base64.StdEncoding.DecodeString(encoded)
	if err == nil {
		err = os.WriteFile(file, png, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
