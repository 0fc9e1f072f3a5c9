// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package brokers

import (
	"context"
	"errors"
	"os"
)

// TB has the methods of testing.TB that ForTest and StartForTest need. Programs link this
// package too, and should not link testing.
type TB interface {
	Helper()
	Context() context.Context
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
}

// ForTest is Find for a test. It returns the address, or ends the test. If this machine
// cannot run the broker, the test is skipped with a message; with CI=true it fails, except
// for RabbitMQ 4, which needs root. If the broker should run and does not, the test always
// fails.
func ForTest(tb TB, k Kind) string {
	tb.Helper()
	addr, err := Find(tb.Context(), k)
	if err != nil {
		giveUp(tb, k, err)
	}
	return addr
}

// StartForTest is Start for a test. It stops the instance at the end of the test. Without a
// broker it behaves as ForTest.
func StartForTest(tb TB, k Kind, o Options) *Broker {
	tb.Helper()
	b, err := Start(tb.Context(), k, o)
	if err != nil {
		giveUp(tb, k, err)
		return nil
	}
	tb.Cleanup(func() {
		// The test's own context has already ended.
		if err := b.Stop(context.WithoutCancel(tb.Context())); err != nil {
			tb.Errorf("%v", err)
		}
	})
	return b
}

func giveUp(tb TB, k Kind, err error) {
	tb.Helper()
	if !errors.Is(err, ErrLeftOut) {
		tb.Fatalf("no %s to test with: %v", k, err)
		return
	}
	if os.Getenv("CI") == "true" && k != RabbitMQ4 {
		tb.Fatalf("no %s to test with, and CI=true asks for it: %v", k, err)
		return
	}
	tb.Skipf("LEFT OUT: no %s to test with; turn on by setting %s to the address of one, or by what this says: %v", k, k.Env(), err)
}
