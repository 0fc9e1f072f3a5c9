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
	// 100 orders charged, 0 of them twice, 0 left at the server
	// an outage of a second cost 20 calls at most: true
}
