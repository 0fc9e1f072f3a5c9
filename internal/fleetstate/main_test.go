// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"flag"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The race detector finds nothing in one goroutine, and makes it slow. A flag
	// on the command line still wins.
	if raceEnabled {
		if err := flag.Set("rapid.checks", "4"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const (
	ms  = time.Millisecond
	sec = time.Second
)
