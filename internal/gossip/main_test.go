// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"flag"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// What rapid draws for is one goroutine, where the race detector finds nothing and
	// is slow. A flag on the command line still wins.
	if RaceEnabled {
		if err := flag.Set("rapid.checks", "4"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}
