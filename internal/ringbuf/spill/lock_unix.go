// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix && !solaris && !illumos && !aix

package spill

import (
	"errors"
	"os"
	"syscall"
)

// lockDir takes the lock of the directory itself, so that one that cannot be written to
// can be locked as well. The kernel drops it when this process dies.
func lockDir(path string) (*os.File, error) {
	dir, err := os.Open(path) //nolint:gosec // the operator's path
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = ErrLocked
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}
