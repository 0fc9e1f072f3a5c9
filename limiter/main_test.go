// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"flag"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// A run of the model is seconds of a fleet's time. The nodes have no goroutines,
	// so the race detector finds nothing there and only makes it slow. A flag on the
	// command line still wins.
	checks := "100"
	switch {
	case raceEnabled:
		checks = "10"
	case full:
		checks = "2000"
	}
	if err := flag.Set("rapid.checks", checks); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}
