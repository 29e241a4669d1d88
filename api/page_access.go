// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"net/http"
)

// KindPage is the kind of [Page].
const KindPage = "Page"

// Page is where a browser of this machine finds the page.
type Page struct {
	Meta
	URL string `json:"url"` // with the token: who knows it may read the page until the agent ends
}

// Page asks where the page is. It is an error if it is on the socket alone.
func (c *Client) Page(ctx context.Context) (Page, error) {
	return ask[Page](ctx, c, "/v1/page")
}

// where tells who may open the socket, and nobody else, where the page is.
func (s *Server) where(w http.ResponseWriter, _ *http.Request) error {
	if s.agent.Page == nil {
		return refuse(http.StatusConflict, "the page is on the agent's socket alone: forward a port to it, as ssh -L 9880:%s does, "+
			"or start the agent with --page-address 127.0.0.1:9880", s.path)
	}
	url, ok := s.agent.Page()
	if !ok {
		return refuse(http.StatusServiceUnavailable, "the page is not ready yet: ask again")
	}
	return write(w, Page{Meta: MetaOf(KindPage), URL: url})
}

// pageKey is what a browser has to know to read the page over TCP, where the system keeps nobody out. It is made when the
// agent starts, never written anywhere, and told on the socket.
type pageKey struct {
	token string
	// cookie is the name under which the browser keeps the token. A browser has one jar for all ports of a host, so each
	// agent's name is its own.
	cookie string
}

func newPageKey() pageKey {
	token := rand.Text() // 128 bits or more
	return pageKey{token, fmt.Sprintf("weft-page-%x", sha256.Sum256([]byte(token)))[:len("weft-page-")+16]}
}

func (k pageKey) is(token string) bool {
	return subtle.ConstantTimeCompare([]byte(token), []byte(k.token)) == 1
}

// demand answers those alone who know the token. One that stands in the address of the page goes into a cookie, and the
// browser is sent to the address without it, so that it is in no history and on no screen.
func (k pageKey) demand(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" && r.Method == http.MethodGet && k.is(r.URL.Query().Get("token")) {
			// Lax, not Strict: a browser that is sent here by a link in a mail has to show the cookie after the redirect.
			http.SetCookie(w, &http.Cookie{Name: k.cookie, Value: k.token, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode})
			w.Header().Set("Cache-Control", "no-store")
			w.Header().Set("Referrer-Policy", "no-referrer")
			http.Redirect(w, r, "/", http.StatusSeeOther)
			return
		}
		if cookie, err := r.Cookie(k.cookie); err != nil || !k.is(cookie.Value) {
			writeError(w, refuse(http.StatusUnauthorized, "open the page at the address that `weft page` prints: it holds for as long as the agent runs"))
			return
		}
		next.ServeHTTP(w, r)
	})
}
