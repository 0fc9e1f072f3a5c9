// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"net/http"
	"time"
)

// A Carrier carries orders between the consoles of a fleet's processes. All methods are safe for
// concurrent use, and none waits.
type Carrier interface {
	// Place returns this process's name and zone.
	Place() (name, zone string)

	// Members returns the processes of the fleet, this one included.
	Members() []Member

	// Give adds an order in all processes until its time. what, who and why are for the journal.
	Give(o Carried, what, who, why string) error

	// Answer adds this process's answer to an order. Answers returns all answers so far, by
	// process.
	Answer(id, text string) error
	Answers(id string) map[string]string

	// InForce returns the orders whose time is not over, in one sequence for all processes.
	InForce() []Carried

	// Watch calls f after each change until stop is called. f must not wait, and must not call the
	// Carrier.
	Watch(f func()) (stop func())

	// Routes answers requests about the fleet, below /fleet/. It does not check who asks: [Access]
	// does that first.
	Routes() http.Handler
}

// A Carried order has an ID of its own, and ends at Until.
type Carried struct {
	ID, Order string
	Until     time.Time
}

// A Member is one process of a fleet. Heard is false if it is silent or gone.
type Member struct {
	Name, Zone string
	Heard      bool
}
