// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package brokers

import (
	"context"
	"errors"
	"os"
)

// TB is what ForTest and StartForTest need of a testing.TB. Programs link this
// package as well, and they do not link testing.
type TB interface {
	Helper()
	Context() context.Context
	Cleanup(func())
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
}

// ForTest is Find for a test: the address, or else it ends the test. A broker
// that this machine cannot run skips the test, loudly; with CI=true it fails
// the test, except for RabbitMQ 4, which needs root. A broker that could run
// and does not is always a failure.
func ForTest(tb TB, k Kind) string {
	tb.Helper()
	addr, err := Find(tb.Context(), k)
	if err != nil {
		giveUp(tb, k, err)
	}
	return addr
}

// StartForTest is Start for a test, which stops the instance when it ends. It
// gives up as ForTest does.
func StartForTest(tb TB, k Kind, o Options) *Broker {
	tb.Helper()
	b, err := Start(tb.Context(), k, o)
	if err != nil {
		giveUp(tb, k, err)
		return nil
	}
	tb.Cleanup(func() {
		// The test's own context is over by now.
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
