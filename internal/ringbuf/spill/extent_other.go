// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package spill

import (
	"io"
	"os"
)

func allocated(f *os.File) (int64, error) { return f.Seek(0, io.SeekEnd) }
