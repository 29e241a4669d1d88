// SPDX-License-Identifier: Apache-2.0

package api

import (
	"io"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"testing"
)

// Over TCP, only who knows the token reads anything, by whatever path; a cookie carries it from the first request on, and the
// address that the browser shows is without it.
func TestPageWantsToken(t *testing.T) {
	at, p := servePage(t)
	_, other := servePage(t)
	url, ok := p.URL()
	if base := "http://" + at + "/?token="; !ok || !strings.HasPrefix(url, base) || len(url) < len(base)+26 {
		t.Fatalf("URL is %q, %t", url, ok)
	}
	otherURL, _ := other.URL()
	_, otherToken, _ := strings.Cut(otherURL, "=")
	if p.key.cookie == other.key.cookie || p.key.is(otherToken) {
		t.Error("two agents have one key")
	}
	key := func(name, value string) *http.Cookie { return &http.Cookie{Name: name, Value: value} }
	for _, tc := range []struct {
		method, path string
		cookie       *http.Cookie
		want         int
	}{
		{"GET", "/", nil, 401},
		{"GET", "/page.js", nil, 401},
		{"GET", "/v1/status", nil, 401},
		{"GET", "/v1/flows?follow=true", nil, 401},
		{"GET", "/v1/nothing", nil, 401}, // not even what there is
		{"POST", "/", nil, 401},
		{"GET", "/v1/page", key(p.key.cookie, p.key.token), 404},
		{"GET", "/v1/status", key(p.key.cookie, ""), 401},
		{"GET", "/v1/status", key(p.key.cookie, p.key.token[:25]), 401},
		{"GET", "/v1/status", key(p.key.cookie, p.key.token+"A"), 401},
		{"GET", "/v1/status", key(p.key.cookie, otherToken), 401},
		{"GET", "/v1/status", key(other.key.cookie, p.key.token), 401},
		{"GET", "/v1/status", key(p.key.cookie, p.key.token), 200},
		{"GET", "/?token=", nil, 401},
		{"GET", "/?token=" + otherToken, nil, 401},
		{"GET", "/v1/status?token=" + p.key.token, nil, 401},
		{"POST", "/?token=" + p.key.token, nil, 401},
		{"GET", "/?token=" + p.key.token, nil, 303},
	} {
		request, err := http.NewRequestWithContext(t.Context(), tc.method, "http://"+at+tc.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Close = true
		if tc.cookie != nil {
			request.AddCookie(tc.cookie)
		}
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != tc.want {
			t.Errorf("%s %s, cookie %v: %d, want %d: %s, %v", tc.method, tc.path, tc.cookie, response.StatusCode, tc.want, body, err)
		}
		if tc.want == 401 && (!strings.Contains(string(body), "weft page") || len(response.Cookies()) > 0) {
			t.Errorf("%s %s is refused with %s, cookies %v", tc.method, tc.path, body, response.Cookies())
		}
		if strings.Contains(response.Header.Get("Location")+string(body), p.key.token) {
			t.Errorf("%s %s: the token is in the answer: %v, %s", tc.method, tc.path, response.Header, body)
		}
		for _, c := range response.Cookies() {
			if !c.HttpOnly || c.SameSite != http.SameSiteLaxMode || c.MaxAge != 0 || c.Domain != "" {
				t.Errorf("cookie %v: want one of this host alone, that no script reads and that ends with the browser", c)
			}
		}
	}

	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	browser := http.Client{Jar: jar, Transport: &http.Transport{DisableKeepAlives: true}}
	for _, to := range []string{url, "http://" + at + "/v1/status"} {
		response, err := browser.Get(to)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK || strings.Contains(response.Request.URL.String(), "token") {
			t.Errorf("a browser that opened %s is at %s: %s", to, response.Request.URL, response.Status)
		}
	}
}

// Where the page is stands on the socket: who may open that may read everything.
func TestPageAddressIsTold(t *testing.T) {
	agent := fakeAgent()
	path := socketPath(t)
	serve(t, path, agent)
	if _, err := NewClient(path).Page(t.Context()); err == nil || !strings.Contains(err.Error(), "--page-address") || !strings.Contains(err.Error(), path) {
		t.Errorf("an agent without page on TCP: %v", err)
	}
	ready := false
	agent.Page = func() (string, bool) { return "http://127.0.0.1:9880/?token=A", ready }
	path = socketPath(t)
	serve(t, path, agent)
	if _, err := NewClient(path).Page(t.Context()); err == nil || !strings.Contains(err.Error(), "ask again") {
		t.Errorf("a page that is not ready: %v", err)
	}
	ready = true
	page, err := NewClient(path).Page(t.Context())
	if err != nil || page.URL != "http://127.0.0.1:9880/?token=A" || page.Meta != MetaOf(KindPage) {
		t.Errorf("Page: %+v, %v", page, err)
	}
}
