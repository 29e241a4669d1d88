// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/pprof"
)

// Kinds of the objects that are about the agent's own workings.
const (
	KindConfig   = "Config"
	KindLogLevel = "LogLevel"
)

// Config is every option of the agent.
type Config struct {
	Meta
	File  string         `json:"file,omitempty"` // that was read
	Items []ConfigOption `json:"items"`
}

// ConfigOption is an option with the value that is in force.
type ConfigOption struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Origin is flag, a variable of the environment, a file with its line, or default.
	Origin  string `json:"origin"`
	Default string `json:"default,omitempty"`
}

// LogLevel is the least level of what the agent logs.
type LogLevel struct {
	Meta
	Level slog.Level `json:"level"`
}

// LogLevelSetter is the agent's level of logging, for reading and for writing.
type LogLevelSetter interface {
	Level() slog.Level
	Set(slog.Level)
}

var _ LogLevelSetter = (*slog.LevelVar)(nil)

// Config asks for the options of the agent.
func (c *Client) Config(ctx context.Context) (Config, error) {
	return ask[Config](ctx, c, "/v1/config")
}

// LogLevel asks for the least level of what the agent logs.
func (c *Client) LogLevel(ctx context.Context) (LogLevel, error) {
	return ask[LogLevel](ctx, c, "/v1/log-level")
}

// SetLogLevel changes the least level of what the agent logs, until it ends.
func (c *Client) SetLogLevel(ctx context.Context, level slog.Level) (answer LogLevel, err error) {
	body, err := json.Marshal(LogLevel{Level: level})
	if err != nil {
		return answer, err
	}
	response, err := c.send(ctx, http.MethodPut, "/v1/log-level", body)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return answer, fmt.Errorf("answer of the agent at %s: %w", c.path, err)
	}
	return answer, nil
}

// Profile returns a profile of the agent's process by its name in [net/http/pprof], such as goroutine or heap, as text where
// debug is above 0. The caller closes it.
func (c *Client) Profile(ctx context.Context, name string, debug int) (io.ReadCloser, error) {
	response, err := c.do(ctx, http.MethodGet, fmt.Sprintf("/debug/pprof/%s?debug=%d", name, debug))
	if err != nil {
		return nil, err
	}
	return response.Body, nil
}

// admin adds what is about the agent's own workings. Profiles are here and nowhere else: the socket asks who its clients are,
// a TCP port does not.
func (s *Server) admin(mux *http.ServeMux, get getter) {
	get("/v1/config", nil, func(w http.ResponseWriter, _ *http.Request) error { return write(w, s.agent.Config()) })
	mux.HandleFunc("/v1/log-level", func(w http.ResponseWriter, r *http.Request) {
		if err := s.logLevel(w, r); err != nil {
			writeError(w, err)
		}
	})
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
}

// maxLogLevel bounds the body that sets a level.
const maxLogLevel = 1 << 10

func (s *Server) logLevel(w http.ResponseWriter, r *http.Request) error {
	if err := checkParameters(r, nil); err != nil {
		return err
	}
	if r.Method == http.MethodPut {
		var wanted struct {
			Level *slog.Level `json:"level"`
		}
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxLogLevel)).Decode(&wanted); err != nil || wanted.Level == nil {
			return refuse(http.StatusBadRequest, `log level: want {"level": "debug"}, info, warn or error`)
		}
		if before := s.agent.LogLevel.Level(); before != *wanted.Level {
			s.agent.LogLevel.Set(*wanted.Level)
			s.log.Log(r.Context(), max(before, *wanted.Level, slog.LevelInfo), "log level changed", "from", before, "to", *wanted.Level)
		}
	} else if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD, PUT")
		return refuse(http.StatusMethodNotAllowed, "method %s: the log level is read and put", r.Method)
	}
	return write(w, LogLevel{Meta: MetaOf(KindLogLevel), Level: s.agent.LogLevel.Level()})
}
