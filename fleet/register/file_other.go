// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix || solaris || illumos || aix

package register

import (
	"context"
	"fmt"
	"runtime"
)

// lock fails: without the kernel's lock of a file two writers could both win.
func (f *File) lock(context.Context) (unlock func(), err error) {
	return nil, fmt.Errorf("not on %s: use another register", runtime.GOOS)
}

func syncFolder(string) error { return nil }
