// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// nats-server keeps one goroutine for the process.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"))
}

// A mistake ends the process with 1, so it fails the test too.
func Example() {
	main()
	// Output:
	// 60 letters worked off, never more than 50/s and a burst of 5: true
	// 30 messages given up on: 20 in the DLQ, 10 parked
	// after a grant of 10: 30 in the DLQ, 0 parked
}
