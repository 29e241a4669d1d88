// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
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

// KindVerificationProgress is the kind of a [VerificationProgress].
const KindVerificationProgress = "VerificationProgress"

// VerificationProgress says how far a comparison is that is under way.
type VerificationProgress struct {
	Meta
	Done  int `json:"done"`  // entries of the kernel's map and of the table that are compared
	Total int `json:"total"` // how many there are, at about
}

// lines is the type of an answer of JSON objects, one in a line.
const lines = "application/x-ndjson"

// progressInterval is how often a comparison that is under way says how far it is.
const progressInterval = 100 * time.Millisecond

// Verify asks the agent to compare; with repair, to make right what differs. It can take seconds, ends with ctx, and calls tell
// with how far it is. The answer is lines of [VerificationProgress], and at last a [Verification] or an [Error].
func (c *Client) Verify(ctx context.Context, repair bool, tell func(VerificationProgress)) (answer Verification, err error) {
	method := http.MethodGet
	if repair {
		method = http.MethodPost
	}
	query := url.Values{"repair": {strconv.FormatBool(repair)}}
	response, err := c.exchange(ctx, c.http, method, "/v1/verify?"+query.Encode(), nil, lines)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	for decoder := json.NewDecoder(response.Body); ; {
		var line struct {
			Verification
			Done, Total, Code int
			Message           string
		}
		if err := decoder.Decode(&line); err != nil {
			return answer, fmt.Errorf("answer of the agent at %s: %w", c.path, err)
		}
		switch line.Kind {
		case KindVerificationProgress:
			tell(VerificationProgress{Meta: line.Meta, Done: line.Done, Total: line.Total})
		case KindError:
			return answer, fmt.Errorf("agent at %s: %s", c.path, line.Message)
		default:
			return line.Verification, nil
		}
	}
}

// verify answers GET, which only looks, and POST, which may repair. Who accepts lines is told meanwhile how far it is.
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
	case r.Header.Get("Accept") == lines:
		s.verifyTelling(w, r, repair)
		return
	}
	result, err := s.agent.Verify(r.Context(), repair, func(int, int) {})
	if err == nil {
		err = write(w, result)
	}
	if err != nil {
		writeError(w, err)
	}
}

// verifyTelling writes a line again and again while it compares.
func (s *Server) verifyTelling(w http.ResponseWriter, r *http.Request, repair bool) {
	w.Header().Set("Content-Type", lines)
	encoder := json.NewEncoder(w)
	var done, total atomic.Int64
	ended, told := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(told)
		tick := time.NewTicker(progressInterval)
		defer tick.Stop()
		for {
			progress := VerificationProgress{Meta: MetaOf(KindVerificationProgress), Done: int(done.Load()), Total: int(total.Load())}
			if encoder.Encode(progress) == nil { // else the reader is gone, and so ends the request's context
				_ = http.NewResponseController(w).Flush()
			}
			select {
			case <-ended:
				return
			case <-tick.C:
			}
		}
	}()
	result, err := func() (Verification, error) {
		defer func() {
			close(ended)
			<-told
		}()
		return s.agent.Verify(r.Context(), repair, func(d, t int) {
			total.Store(int64(t))
			done.Store(int64(d))
		})
	}()
	if err != nil {
		_ = encoder.Encode(Error{Meta: MetaOf(KindError), Code: http.StatusInternalServerError, Message: err.Error()})
		return
	}
	_ = encoder.Encode(result)
}
