// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package register

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/stormguard-mq/stormguard/internal/diskfile"
	"github.com/stormguard-mq/stormguard/internal/registers"
)

const (
	// fileEvery is how often a watch looks at the file.
	fileEvery = 100 * time.Millisecond
	// lockEvery is how often a writer tries a lock that another writer has.
	lockEvery = 2 * time.Millisecond
)

// File is a [Register] for the processes of one host: a file, and a second file for the lock. A
// write goes to a third file, is synced, and then replaces the first. So a reader sees the old
// document or the new one, also after a crash. The file must be on a local disk: file systems of a
// network may lock and rename differently.
//
// Watch reads the file ten times a second. A writer that is stopped while it holds the lock stops
// other writers, but no reader.
type File struct{ path string }

var _ Register = (*File)(nil)

// NewFile returns the register at a path. It reads and writes nothing yet. The folder must exist at
// the first use.
func NewFile(path string) (*File, error) {
	if path == "" {
		return nil, errors.New("register: file: the path is empty")
	}
	return &File{path: filepath.Clean(path)}, nil
}

// Read reads the file.
func (f *File) Read(ctx context.Context) (number uint64, document []byte, err error) {
	if err := ctx.Err(); err != nil {
		return 0, nil, err
	}
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		// A missing folder is not an empty register.
		_, err = os.Stat(filepath.Dir(f.path))
		b = nil
	}
	if err != nil {
		return 0, nil, fmt.Errorf("register: file: %w", err)
	}
	if b == nil {
		return 0, nil, nil
	}
	number, _, document, err = registers.Decode(b)
	if err == nil {
		err = Check(number, document)
	}
	if err != nil {
		return 0, nil, fmt.Errorf("%w: %s: %w", ErrMalformed, f.path, err)
	}
	return number, document, nil
}

// CompareAndSet waits for the lock, then writes. The outcome is unknown only if the disk fails
// after the new file has replaced the old one.
func (f *File) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := Check(number, document); err != nil {
		return err
	}
	unlock, err := f.lock(ctx)
	if err != nil {
		return fmt.Errorf("register: file: lock: %w", err)
	}
	defer unlock()
	newest, _, err := f.Read(ctx)
	if err != nil {
		return err
	}
	if newest != number-1 {
		return &ConflictError{Newest: newest}
	}
	return f.write(registers.Encode(number, "", document))
}

// write is called with the lock held. It no longer looks at ctx: it takes as long as the disk.
func (f *File) write(b []byte) error {
	placed, err := diskfile.Replace(f.path, b)
	switch {
	case placed && err != nil:
		return fmt.Errorf("%w: file: %w", ErrUnknown, err)
	case err != nil:
		return fmt.Errorf("register: file: %w", err)
	}
	return nil
}

// lock waits for the lock. The kernel drops it when this process dies. The lock's file is never
// removed, or two writers could lock two files of one name.
func (f *File) lock(ctx context.Context) (unlock func(), err error) {
	file, err := os.OpenFile(f.path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = ctx.Err(); err != nil {
			break
		}
		if err = diskfile.TryLock(file); err == nil {
			return func() { _ = file.Close() }, nil // closing unlocks
		}
		if !errors.Is(err, diskfile.ErrLocked) {
			break
		}
		registers.Sleep(ctx, lockEvery)
	}
	return nil, errors.Join(err, file.Close())
}

// Watch reads the file ten times a second. It does not compare the file's time: two writes within
// one tick of the clock have the same time.
func (f *File) Watch(ctx context.Context, on func(Event)) error {
	return watch(ctx, on, func(ctx context.Context, emit func(uint64, []byte) error) error {
		for {
			number, document, err := f.Read(ctx)
			if err != nil {
				return err
			}
			if err := emit(number, document); err != nil {
				return err
			}
			if !registers.Sleep(ctx, fileEvery) {
				return ctx.Err()
			}
		}
	})
}
