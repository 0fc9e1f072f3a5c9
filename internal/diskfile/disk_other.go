// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix || solaris || illumos || aix

package diskfile

import (
	"fmt"
	"os"
	"runtime"
)

// TryLock fails: without the kernel's lock two processes could write the same file.
func TryLock(*os.File) error {
	return fmt.Errorf("not on %s: a file cannot be locked", runtime.GOOS)
}

// SyncDir does nothing: a folder cannot be synced here.
func SyncDir(string) error { return nil }
