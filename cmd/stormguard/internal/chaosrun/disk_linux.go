// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// A disk is a small file system of the run's own, in memory, for what the consumers keep.
type disk struct{ at string }

// diskSize is room for what the consumers keep of the messages in flight, many times over.
const diskSize = "size=64m"

func newDisk(at string) (*disk, error) {
	if err := os.Mkdir(at, 0o700); err != nil {
		return nil, err
	}
	if err := syscall.Mount("tmpfs", at, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, diskSize); err != nil {
		return nil, fmt.Errorf("chaos: a disk to fill needs root, with the right to mount: %w", err)
	}
	return &disk{at}, nil
}

func (d *disk) filler() string { return filepath.Join(d.at, "filler") }

// fill takes all room, and returns how many KiB there were.
func (d *disk) fill() (kib int, err error) {
	f, err := os.OpenFile(d.filler(), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, err
	}
	total := 0
	for _, size := range []int{1 << 20, 4 << 10} {
		for block := make([]byte, size); err == nil; {
			var n int
			n, err = f.Write(block)
			total += n
		}
		if !errors.Is(err, syscall.ENOSPC) {
			break
		}
		err = nil
	}
	return total >> 10, errors.Join(err, f.Close())
}

// free gives the room back.
func (d *disk) free() error { return os.Remove(d.filler()) }

// close unmounts it. A child that another goroutine starts has every open file until its
// exec, so it may be busy for a moment. One that stays busy is detached, which leaves no mount.
func (d *disk) close() (err error) {
	for range 1000 {
		if err = syscall.Unmount(d.at, 0); !errors.Is(err, syscall.EBUSY) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.Join(fmt.Errorf("chaos: unmount %s: %w", d.at, err), syscall.Unmount(d.at, syscall.MNT_DETACH))
}
