// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A mistake ends the process with 1, so it fails the test too.
func Example() {
	main()
	// Output:
	// well: 200 200
	// failing: 502
	// down: 202 202 503
	// charged: 1 2 3
}
