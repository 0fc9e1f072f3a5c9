// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// Account counts all messages of a source by state, at one instant. Each message is in
// exactly one of these states:
//
//	Received = Waiting + Processing + Settling + Held + RetryWait + Acked + DeadLettered + Returned
type Account struct {
	Received uint64 // handed over by the adapter

	Waiting    int // in front of the handler, also on Ready until the program takes the message
	Processing int // the handler runs
	Settling   int // the ack, or the write of the dead letter, is under way
	Held       int // in front of a source that admits nothing or drains; or only in the spill
	RetryWait  int // failed; waiting for a delay, a credit or a witness

	Acked        uint64
	DeadLettered uint64
	Returned     uint64 // given back to the broker unsettled, acked in vain, or taken back by the adapter
}

// Check returns an error if a message is missing or counted twice.
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

// Unsettled is how many unsettled messages this process has.
func (a Account) Unsettled() int {
	return a.Waiting + a.Processing + a.Settling + a.Held + a.RetryWait
}

// A Hold is one reason why a source waits or is slowed down.
type Hold struct {
	Reason Reason
	// Detail is text for people, such as the breaker's cause or the storm's readings.
	Detail string
	// Until is how much longer the hold lasts at least; 0 means until somebody clears it.
	Until time.Duration
	// ClearedBy says who or what may clear the hold.
	ClearedBy string
}

// State describes a source at one instant.
type State struct {
	Source string
	// Now is the guard's clock at that instant. Breaker.Since, Breaker.Until and
	// Storm.Since are times of the same clock.
	Now     time.Duration
	Ended   bool
	Holds   []Hold // empty while nothing holds the source; the strongest hold comes first
	Account Account
	Tally   Tally
	Storm   dlq.Storm
	Breaker breaker.Snapshot
	// Wider are the wider scopes that are open and so hold the source: its topic or
	// queue, and its consumer group, in this order. Only Name, State, Cause and Since
	// are set.
	Wider []breaker.Snapshot
	// Fleet is the fleet's decision about the breaker's scope, or about the wider scope
	// that holds it; FleetStorm is its decision about the storm. Zero without [WithFleet].
	Fleet      breaker.FleetScope
	FleetStorm dlq.FleetStorm
	// Budget is the number of DLQ credits left for messages whose attempts are used up.
	Budget float64
	// OldestAge is the age of the oldest unsettled message in this process, to within
	// 10ms. Messages that wait in a feed in front of the closed path do not count.
	OldestAge time.Duration
	// Window is how many messages the source may have, without its feed: a feed has up to
	// half of [Policy.Window]. Room is how many more messages the source takes now. Both
	// are 0 for a protected function.
	Window, Room int
	used         float64 // see usedLocked
	// Spilled is how many unsettled messages are in the spill, see [Policy.Spill]: they
	// are acked at the broker. Some of them are in the window, too.
	Spilled int
	// Settings is the policy in force, with its defaults filled in.
	Settings Policy
}

// A Left is a message that a source could not finish when it ended.
type Left struct {
	State string        // "processing" or "settling"
	Age   time.Duration // time since this process got the message
	Why   string
}

// A Report says how a source ended.
type Report struct {
	Source   string
	Reason   Reason
	Account  Account
	Returned int    // messages that End gave back to the broker
	Spilled  int    // messages left in the spill, for the next source of that name
	Left     []Left // messages with a handler or a dead-letter writer, or not acked
	Err      error  // the port's error from the last Return and Flush, or that a port call hangs
}

// Clean tells whether nothing is left and no error happened.
func (r Report) Clean() bool { return len(r.Left) == 0 && r.Err == nil }
