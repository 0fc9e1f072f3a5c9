// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix && !solaris && !illumos && !aix

package register

import (
	"context"
	"errors"
	"os"
	"syscall"

	"github.com/stormguard-mq/stormguard/internal/registers"
)

// lock takes the lock that the kernel drops when this process dies. The file of the
// lock stays, or two could lock two files of one name.
func (f *File) lock(ctx context.Context) (unlock func(), err error) {
	file, err := os.OpenFile(f.path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = ctx.Err(); err != nil {
			break
		}
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil // which unlocks
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			break
		}
		registers.Sleep(ctx, lockEvery)
	}
	return nil, errors.Join(err, file.Close())
}

// syncFolder makes a rename safe.
func syncFolder(path string) error {
	folder, err := os.Open(path) //nolint:gosec // the caller's path
	if err != nil {
		return err
	}
	return errors.Join(folder.Sync(), folder.Close())
}
