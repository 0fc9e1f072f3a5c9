// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package diskfile helps with files that must survive a crash: the lock of one process, the sync of
// a folder, and a file that is replaced as a whole.
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

// LockDir locks a folder itself, so it also works in a folder that is not writable. The lock ends
// with the returned file, and with this process. The error is [ErrLocked] if another has it.
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

// MakeDir makes a folder, for this user alone, in an existing one. A folder that exists is left as
// it is. In both cases MakeDir syncs the parent: the process that made the folder may have ended
// before it did. If the folder exists and the parent cannot be read or synced, that is not an
// error: it is up to the owner of the parent.
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

// Replace writes a file under another name, syncs it, and moves it to path. A reader sees the old
// file or the new one, also after a crash. placed with an error means that the new file is in
// place, but a crash could still undo that.
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
