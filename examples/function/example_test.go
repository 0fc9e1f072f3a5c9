// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// A mistake ends the process with 1, so it fails the test too.
func Example() {
	main()
	// Output:
	// order 1: charged by call 2
	// order -2: no such order, after 1 call
	// orders 3 to 30: charged, 6 calls failed in the outage
	// some callers saw failures: true, others were held: true
}
