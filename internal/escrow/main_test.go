// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"flag"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// full says that the long forms are asked for.
var full = os.Getenv("STORMGUARD_FULL") != ""

// hand is a clock that stands until a test moves it. A set's own goroutine reads
// it too.
type hand struct{ at atomic.Int64 }

func (h *hand) read() time.Duration  { return time.Duration(h.at.Load()) }
func (h *hand) move(d time.Duration) { h.at.Add(int64(d)) }

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
