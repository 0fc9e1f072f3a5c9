// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix || solaris || illumos || aix

package spill

import (
	"fmt"
	"os"
	"runtime"
)

// lockDir fails: without the kernel's lock two processes could write the same file.
func lockDir(string) (*os.File, error) {
	return nil, fmt.Errorf("not on %s: a directory cannot be locked", runtime.GOOS)
}
