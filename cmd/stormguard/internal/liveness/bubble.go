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
// ended. Time goes on when all of them wait, so an hour takes as long as its events. A
// panic of f, and a deadlock of what it started, are the error.
//
// Go makes virtual time for tests only: [synctest.Test] wants a [testing.T]. It takes
// its parent's name and output from it and nothing else, so the zero value will do, and
// the program keeps its flags, its output and its exit code. TestVirtual fails if a
// version of Go sees this differently.
func virtual(f func()) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("liveness: %v", v)
		}
	}()
	var failed error
	synctest.Test(new(testing.T), func(*testing.T) {
		defer func() { // the zero T cannot report it
			if v := recover(); v != nil {
				failed = fmt.Errorf("liveness: %v\n%s", v, debug.Stack())
			}
		}()
		f()
	})
	return failed
}
