// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package diskfile has what the files need that must survive a crash: the lock of one
// process, the sync of a folder, and a file that is replaced as a whole.
package diskfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ErrLocked means that another process, or another open file of this one, has the lock.
var ErrLocked = errors.New("locked by another")

// LockDir takes the lock of a folder itself, so that one that cannot be written to can be
// locked as well. It ends with the file that it returns, and with this process. The error
// is [ErrLocked] if another has it.
func LockDir(path string) (*os.File, error) {
	dir, err := os.Open(path) //nolint:gosec // the caller's path
	if err != nil {
		return nil, err
	}
	if err := TryLock(dir); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// MakeDir makes a folder, for this user alone, in one that is there. One that exists is
// left as it is. Its name is on the disk afterwards: whoever made it may have ended before
// that. Where the folder above cannot be read, that is for who made it to see to.
func MakeDir(path string) error {
	err := os.Mkdir(path, 0o700)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	exists := err != nil
	err = SyncDir(filepath.Dir(path))
	if exists && (errors.Is(err, fs.ErrPermission) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EINVAL)) {
		return nil
	}
	return err
}

// Replace writes a file under another name, syncs it, and puts it in the place of path. A
// reader, and whoever comes after a crash, sees the old one or the new one. placed says
// that it is there although err is not nil: only a crash could still undo it.
func Replace(path string, b []byte) (placed bool, err error) {
	next := path + ".next"
	if err := writeSynced(next, b); err != nil {
		return false, err
	}
	if err := os.Rename(next, path); err != nil {
		return false, err
	}
	return true, SyncDir(filepath.Dir(path))
}

func writeSynced(path string, b []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600) //nolint:gosec // the caller's path
	if err != nil {
		return err
	}
	_, err = file.Write(b)
	return errors.Join(err, file.Sync(), file.Close())
}
