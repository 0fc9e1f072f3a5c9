// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix && !solaris && !illumos && !aix

package diskfile

import (
	"errors"
	"os"
	"syscall"
)

// TryLock takes the lock of an open file or folder, which the kernel drops when the file is
// closed or this process dies. It does not wait: the error is [ErrLocked] if another has it.
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

// SyncDir makes what was made, renamed or removed in a folder survive a crash.
func SyncDir(path string) error {
	dir, err := os.Open(path) //nolint:gosec // the caller's path
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
