// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
)

// KindVerification is the kind of a [Verification].
const KindVerification = "Verification"

// Verification is what a comparison of the kernel with the tables, and of those with the clusters, found.
type Verification struct {
	Meta
	// Compared is how many objects were looked at.
	Compared    int          `json:"compared"`
	Differences []Difference `json:"differences"`
	// More is how many differences there are besides.
	More int `json:"more"`
}

// Difference is one thing that is not as it should be.
type Difference struct {
	Kind     string `json:"kind"`
	Object   string `json:"object"`
	Want     string `json:"want"`
	Have     string `json:"have"`
	Repaired bool   `json:"repaired"`
}

// Clean reports whether nothing differs any more.
func (v *Verification) Clean() bool {
	for _, d := range v.Differences {
		if !d.Repaired {
			return false
		}
	}
	return v.More == 0
}

// Verify asks the agent to compare; with repair, to make right what differs. It can take seconds, and ends with ctx.
func (c *Client) Verify(ctx context.Context, repair bool) (answer Verification, err error) {
	method := http.MethodGet
	if repair {
		method = http.MethodPost
	}
	query := url.Values{"repair": {strconv.FormatBool(repair)}}
	response, err := c.do(ctx, method, "/v1/verify?"+query.Encode())
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return answer, fmt.Errorf("answer of the agent at %s: %w", c.path, err)
	}
	return answer, nil
}

// verify answers GET, which only looks, and POST, which may repair.
func (s *Server) verify(w http.ResponseWriter, r *http.Request) {
	repair, err := strconv.ParseBool(orElse(r.URL.Query().Get("repair"), "false"))
	switch {
	case checkParameters(r, []string{"repair"}) != nil:
		writeError(w, checkParameters(r, []string{"repair"}))
		return
	case err != nil:
		writeError(w, refuse(http.StatusBadRequest, "repair: want true or false"))
		return
	case r.Method != http.MethodPost && (repair || checkMethod(w, r) != nil):
		w.Header().Set("Allow", "GET, HEAD, POST")
		writeError(w, refuse(http.StatusMethodNotAllowed, "method %s: to repair takes POST", r.Method))
		return
	}
	result, err := s.agent.Verify(r.Context(), repair)
	if err == nil {
		err = write(w, result)
	}
	if err != nil {
		writeError(w, err)
	}
}
