// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// maxConfigFile bounds what is read of a file; client configs have a few hundred bytes.
const maxConfigFile = 1 << 20

// file is the config of one cluster, as it stands in the directory.
type file struct {
	path    string
	content []byte
	hash    [sha256.Size]byte // of content: files with the same one are the same config
}

// scan is what the directory holds at one moment. Every name in it can be that of a cluster, unless in invalid.
type scan struct {
	missing bool
	err     error // the directory cannot be read, and so says nothing

	configs map[string]file
	// others are regular files that are no configs, and may be configs that are just being written; by content.
	others map[string][sha256.Size]byte
	// unreadable says nothing about whether there is a config.
	unreadable map[string]error
	// invalid are configs under names that no cluster can have.
	invalid map[string]error
}

// scanDir reads the directory. It calls follow with the path of each symbolic link in it before it reads what that leads
// to.
func scanDir(dir, own string, follow func(path string)) scan {
	s := scan{
		configs: make(map[string]file), others: make(map[string][sha256.Size]byte),
		unreadable: make(map[string]error), invalid: make(map[string]error),
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		s.missing = true
		return s
	}
	if err != nil {
		s.err = fmt.Errorf("read directory of cluster configs: %w", err)
		return s
	}
	for _, entry := range entries {
		if entry.Name() == own {
			continue
		}
		path := filepath.Join(dir, entry.Name())
		if entry.Type()&fs.ModeSymlink != 0 {
			follow(path)
		}
		s.classify(entry.Name(), path)
	}
	return s
}

func (s *scan) classify(name, path string) {
	invalid := identity.ValidateClusterName(name)
	content, err := readRegular(path)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, errNotRegular):
	case err != nil && invalid == nil:
		s.unreadable[name] = err
	case err != nil:
	case !kvstore.IsConfig(content):
		if invalid == nil {
			s.others[name] = sha256.Sum256(content)
		}
	case invalid != nil:
		s.invalid[name] = fmt.Errorf("%q: %w; rename the file to the cluster's name", path, invalid)
	default:
		s.configs[name] = file{path: path, content: content, hash: sha256.Sum256(content)}
	}
}

// errNotRegular indicates a directory, a socket or the like.
var errNotRegular = errors.New("not a regular file")

// readRegular reads a regular file, or what a symbolic link to one leads to.
func readRegular(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errNotRegular
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if err != nil {
		return nil, err
	}
	if len(content) > maxConfigFile {
		return nil, fmt.Errorf("%s: larger than %d bytes, which no client config is", path, maxConfigFile)
	}
	return content, nil
}

// configs is what the directory wants to be connected, after any number of scans. It has no clock and does no I/O.
type configs struct {
	// seen: the directory has been read at least once.
	seen  bool
	files map[string]file
	// doubts are clusters of which it is open whether, or with what content, there is a config. Those in files stay there.
	doubts  map[string]error
	invalid map[string]error

	settle time.Duration // how long a doubt lasts that time alone can settle
	since  map[string]doubt
}

// doubt is a file in a state in which it may only be for a moment.
type doubt struct {
	since time.Time
	hash  [sha256.Size]byte
}

func newConfigs(settle time.Duration) *configs {
	return &configs{files: make(map[string]file), since: make(map[string]doubt), settle: settle}
}

var (
	errDirMissing = errors.New("the directory of cluster configs is missing")
	errNotConfig  = errors.New(`the file holds no "endpoints:", so it is no client config`)
)

// update takes a scan into account, and reports whether time alone may change what it said, so that another scan is due
// after settle.
//
// A config that is there is wanted; a file that is gone from the directory is not. In between, nothing is dropped at once:
// a file that is being rewritten may hold anything, and a directory may be gone while it is being replaced, so these must
// last for settle. A file or directory that cannot be read says nothing, however long that lasts.
func (c *configs) update(s scan, now time.Time) (again bool) {
	c.doubts, c.invalid = make(map[string]error), s.invalid
	if s.err != nil {
		for name := range c.files {
			c.doubts[name] = s.err
		}
		return false
	}
	c.seen = c.seen || !s.missing

	open := make(map[string]doubt)
	suspect := func(name string, hash [sha256.Size]byte, why error) {
		d, ok := c.since[name]
		if !ok || d.hash != hash {
			d = doubt{now, hash}
		}
		open[name] = d
		if now.Sub(d.since) >= c.settle {
			delete(c.files, name)
			return
		}
		c.doubts[name] = why
		again = true
	}
	for name := range c.files {
		if s.missing {
			suspect(name, [sha256.Size]byte{}, errDirMissing)
		} else if !s.has(name) {
			delete(c.files, name)
		}
	}
	for name, hash := range s.others {
		suspect(name, hash, errNotConfig)
	}
	for name, err := range s.unreadable {
		c.doubts[name] = err
	}
	for name, f := range s.configs {
		c.files[name] = f
	}
	c.since = open
	return again
}

func (s *scan) has(name string) bool {
	_, config := s.configs[name]
	_, other := s.others[name]
	return config || other || s.unreadable[name] != nil
}
