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
	// well: 200 200 404
	// down: 202 202 202 202 503
	// payments: 1 2 3
	// stock: tea=1 tea=2 tea=3
}
