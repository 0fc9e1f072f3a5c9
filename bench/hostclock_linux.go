// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"syscall"
	"time"
	"unsafe"
)

// hostClock is the same in all processes of the host, and no step moves it.
func hostClock() time.Duration {
	const monotonic = 1
	var ts syscall.Timespec
	_, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, monotonic, uintptr(unsafe.Pointer(&ts)), 0) //nolint:gosec // as package syscall does it
	if errno != 0 {
		panic(errno) // there is such a clock
	}
	return time.Duration(ts.Nano())
}
