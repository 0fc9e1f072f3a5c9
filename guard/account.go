// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// Account is where all messages of a source are at one instant. Each is in
// exactly one of the states:
//
//	Received = Waiting + Processing + Settling + Held + RetryWait + Acked + DeadLettered + Returned
type Account struct {
	Received uint64 // handed over by the adapter

	Waiting    int // in front of the handler; one on Ready, until it is taken
	Processing int // their handler runs
	Settling   int // being acked, or their dead letter written
	Held       int // in front of a source that is not admitting, or draining; those in the spill, too
	RetryWait  int // failed; waiting for a delay, a credit or a witness

	Acked        uint64
	DeadLettered uint64
	Returned     uint64 // given back to the broker unsettled, acked in vain, or taken back by the adapter
}

// Check reports an account in which a message is missing or counted twice.
func (a Account) Check() error {
	sum := a.Acked + a.DeadLettered + a.Returned
	for _, n := range []int{a.Waiting, a.Processing, a.Settling, a.Held, a.RetryWait} {
		if n < 0 {
			return fmt.Errorf("guard: account: a state holds %d messages: %+v", n, a)
		}
		sum += uint64(n)
	}
	if sum != a.Received {
		return fmt.Errorf("guard: account: %d received, %d accounted for: %+v", a.Received, sum, a)
	}
	return nil
}

// Unsettled is how many messages this process has.
func (a Account) Unsettled() int {
	return a.Waiting + a.Processing + a.Settling + a.Held + a.RetryWait
}

// A Hold is one reason why a source is not simply running.
type Hold struct {
	Reason Reason
	// Detail is for people: the breaker's cause, the storm's readings.
	Detail string
	// Until is how long it lasts at least; 0 means until somebody clears it.
	Until time.Duration
	// ClearedBy says who or what may clear it.
	ClearedBy string
}

// State is a source seen from outside, at one instant.
type State struct {
	Source string
	// Now is the guard's clock at that instant: Breaker.Since, Breaker.Until and
	// Storm.Since are of it.
	Now     time.Duration
	Ended   bool
	Holds   []Hold // empty while it simply runs; the first names the strongest
	Account Account
	Tally   Tally
	Storm   dlq.Storm
	Breaker breaker.Snapshot
	// Wider are the wider scopes of the breaker that are open, and hold the source, the
	// nearest first: its topic or queue, and its consumer group. They only have a Name, a
	// State, a Cause and a Since.
	Wider []breaker.Snapshot
	// Fleet is what the fleet makes of the breaker's scope, or of the wider one
	// that holds it, and FleetStorm of the storm. Zero without [WithFleet].
	Fleet      breaker.FleetScope
	FleetStorm dlq.FleetStorm
	// Budget is the DLQ credits left for messages whose attempts are used up.
	Budget float64
	// OldestAge is the age of the oldest unsettled message in this process, to a
	// hundredth of a second. What a feed holds in front of the closed path has none.
	OldestAge time.Duration
	// Window is how many messages the source may have besides its feed (which has
	// up to half of [Policy.Window] where there is one), and Room how many more it takes now.
	// A protected function has neither: 0.
	Window, Room int
	used         float64 // see usedLocked
	// Spilled is how many unsettled messages are in the spill, see [Policy.Spill]: the
	// broker has their acks. Some of them are in the window, too.
	Spilled int
	// Settings is the policy in force, defaults filled in.
	Settings Policy
}

// A Left is a message that a source could not finish when it ended.
type Left struct {
	State string        // "processing" or "settling"
	Age   time.Duration // in this process
	Why   string
}

// A Report says how a source ended.
type Report struct {
	Source   string
	Reason   Reason
	Account  Account
	Returned int    // given back by End
	Spilled  int    // left in the spill, for the next source of that name
	Left     []Left // still with a handler or a dead-letter writer, or not acked
	Err      error  // what the port answered to the last Return and Flush, or that a call of it hangs
}

// Clean tells whether nothing is left behind.
func (r Report) Clean() bool { return len(r.Left) == 0 && r.Err == nil }
