// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"strings"
	"testing"
	"time"
)

// Time is virtual without a test's T; panics and deadlocks are errors, and the next run
// is none the worse for them.
func TestVirtual(t *testing.T) {
	began := time.Now()
	for range 3 {
		var took time.Duration
		if err := virtual(func() {
			start := time.Now()
			done := make(chan struct{})
			go func() {
				defer close(done)
				time.Sleep(24 * time.Hour)
			}()
			<-done
			took = time.Since(start)
		}); err != nil || took != 24*time.Hour {
			t.Errorf("a day took %v, error %v", took, err)
		}
		if err := virtual(func() { panic("told") }); err == nil || !strings.Contains(err.Error(), "told") {
			t.Errorf("a panic came back as %v", err)
		}
		if err := virtual(stuck); err == nil || !strings.Contains(err.Error(), "deadlock") {
			t.Errorf("a deadlock came back as %v", err)
		}
	}
	if real := time.Since(began); real > time.Minute {
		t.Errorf("three days took %v", real)
	}
}

// stuck waits for nothing; its goroutine stays behind.
func stuck() { <-make(chan int) }
