// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix && !solaris && !illumos && !aix

package diskfile

import (
	"errors"
	"os"
	"syscall"
)

// TryLock locks an open file or folder. The kernel drops the lock when the file is closed or this
// process dies. TryLock does not wait: the error is [ErrLocked] if another has the lock.
func TryLock(file *os.File) error {
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EWOULDBLOCK):
			return ErrLocked
		default:
			return err
		}
	}
}

// SyncDir syncs a folder, so that files made, renamed or removed in it survive a crash.
func SyncDir(path string) error {
	dir, err := os.Open(path) //nolint:gosec // the caller's path
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
