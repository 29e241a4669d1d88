// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// stateFile is a file that is replaced as a whole: whatever happens, it holds what it held before or after, never a part.
type stateFile struct{ path string }

// corruptSuffix marks, with a number after it, what a state file held when it could not be understood.
const corruptSuffix = ".corrupt"

// maxAside bounds how many of those there are: a disk that spoils every file is not to be filled with them.
const maxAside = 10

// read returns what the file holds, nil if there is none.
func (f stateFile) read() ([]byte, error) {
	file, err := os.OpenFile(f.path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(file)
	if content == nil {
		content = []byte{}
	}
	return content, err
}

// write replaces what the file holds. When it returns nil, that survives a loss of power.
func (f stateFile) write(content []byte) (err error) {
	dir := filepath.Dir(f.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	aside := f.path + ".new"
	defer func() {
		if err != nil {
			os.Remove(aside)
		}
	}()
	if err := writeSynced(aside, content); err != nil {
		return err
	}
	if err := os.Rename(aside, f.path); err != nil {
		return err
	}
	return syncDirectory(dir)
}

func writeSynced(path string, content []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// syncDirectory makes a rename in a directory last.
func syncDirectory(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// setAside renames the file to the first name that is free.
func (f stateFile) setAside() error {
	for n := 1; n <= maxAside; n++ {
		aside := f.path + corruptSuffix + strconv.Itoa(n)
		if _, err := os.Lstat(aside); err == nil {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Rename(f.path, aside); err != nil {
			return err
		}
		return syncDirectory(filepath.Dir(f.path))
	}
	return fmt.Errorf("%s is corrupt, and %d files before it were: look at them and delete them", f.path, maxAside)
}

// aside lists what was set aside, now and before.
func (f stateFile) aside() []string {
	dir, prefix := filepath.Dir(f.path), filepath.Base(f.path)+corruptSuffix
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // reading the file itself says what is wrong with its directory
	}
	var files []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	return files
}
