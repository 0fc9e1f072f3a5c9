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

// A disk is a small file system in memory, of the run's own, for the consumers' files.
type disk struct{ at string }

// diskSize is many times the size of the consumers' files for messages in flight.
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

// fill fills the disk with one file, and returns the size of this file in KiB.
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

// free removes the file of fill.
func (d *disk) free() error { return os.Remove(d.filler()) }

// close unmounts the disk. A child that another goroutine starts has every open file until its
// exec, so the disk may be busy for a moment. close detaches a disk that stays busy: this leaves
// no mount.
func (d *disk) close() (err error) {
	for range 1000 {
		if err = syscall.Unmount(d.at, 0); !errors.Is(err, syscall.EBUSY) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return errors.Join(fmt.Errorf("chaos: unmount %s: %w", d.at, err), syscall.Unmount(d.at, syscall.MNT_DETACH))
}
