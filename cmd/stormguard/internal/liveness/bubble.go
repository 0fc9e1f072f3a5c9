// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"runtime/debug"
	"testing"
	"testing/synctest"
)

// virtual runs f on virtual time, and returns when all goroutines that f started have
// ended. Virtual time advances when all of them wait, so an hour takes as long as its
// events. virtual returns a panic of f, or a deadlock of its goroutines, as the error.
//
// Go has virtual time for tests only: [synctest.Test] wants a [testing.T]. It reads only
// the parent's name and output from the T, so the zero value is enough. The program keeps
// its flags, its output and its exit code. TestVirtual fails if a version of Go changes
// this.
func virtual(f func()) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("liveness: %v", v)
		}
	}()
	var failed error
	synctest.Test(new(testing.T), func(*testing.T) {
		defer func() { // the zero T cannot report a panic
			if v := recover(); v != nil {
				failed = fmt.Errorf("liveness: %v\n%s", v, debug.Stack())
			}
		}()
		f()
	})
	return failed
}
