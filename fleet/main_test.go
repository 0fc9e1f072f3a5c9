// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// withGossip passes options on to the process's gossip.
func withGossip(opts ...gossip.Option) Option {
	return func(o *options) { o.gossip = append(o.gossip, opts...) }
}

// fleetEnv names the fleet of this run, and of the processes that it starts: another
// run on the same host may get a port that one of this one had.
const fleetEnv = "STORMGUARD_TEST_FLEET"

func TestMain(m *testing.M) {
	if os.Getenv(fleetEnv) == "" {
		if err := os.Setenv(fleetEnv, fmt.Sprint("test-", os.Getpid())); err != nil {
			panic(err)
		}
	}
	if status, is := asProcess(); is {
		os.Exit(status)
	}
	// A probe that is under way when a node closes sends nothing, and ends within 2 s.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}
