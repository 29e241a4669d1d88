// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// ErrInUse indicates a socket on which another agent answers.
var ErrInUse = errors.New("another agent answers on this socket: stop it, or choose another path with --api-socket")

// socketMode lets root and the group of the socket talk to the agent.
const socketMode = 0o660

// maxSocketPath is what fits into the kernel's address of a unix socket, with its final zero.
const maxSocketPath = 107

// newSuffix marks a socket that is not open to clients yet.
const newSuffix = ".new"

// socket is a listener on a path of the file system.
type socket struct {
	*net.UnixListener
	path string
	info fs.FileInfo // of the file that this listener made
}

// listen opens path, making its directory where there is none. What a dead process left is replaced, a live one's is not:
// the error is then [ErrInUse]. The socket appears with its final mode: it is made aside and renamed.
func listen(path string) (*socket, error) {
	if len(path)+len(newSuffix) > maxSocketPath {
		return nil, fmt.Errorf("api socket %s: the path is longer than %d bytes", path, maxSocketPath-len(newSuffix))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("api socket: %w", err)
	}
	if err := checkFree(path); err != nil {
		return nil, fmt.Errorf("api socket %s: %w", path, err)
	}
	aside := path + newSuffix
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("api socket: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: aside, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("api socket: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	s := &socket{UnixListener: listener, path: path}
	if err := s.publish(aside); err != nil {
		listener.Close()
		os.Remove(aside)
		return nil, fmt.Errorf("api socket: %w", err)
	}
	return s, nil
}

func (s *socket) publish(aside string) (err error) {
	if err := os.Chmod(aside, socketMode); err != nil {
		return err
	}
	if s.info, err = os.Lstat(aside); err != nil {
		return err
	}
	return os.Rename(aside, s.path)
}

// checkFree reports why path may not be replaced.
func checkFree(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("the path exists and is not a socket: remove it, or choose another path with --api-socket")
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		conn.Close()
	}
	return ErrInUse
}

// remove unlinks the socket's file unless it has been replaced by another's.
func (s *socket) remove() {
	if info, err := os.Lstat(s.path); err == nil && os.SameFile(info, s.info) {
		os.Remove(s.path)
	}
}
