// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"net/http"
	"time"
)

// A Carrier carries orders between the consoles of a fleet's processes. All methods are
// safe for concurrent use, and none waits.
type Carrier interface {
	// Place is this process's name and zone.
	Place() (name, zone string)

	// Members are the processes of the fleet, this one included.
	Members() []Member

	// Give puts an order up in all processes until its time; what, who and why are for
	// the journal.
	Give(o Carried, what, who, why string) error

	// Answer says what became of an order in this process, and Answers what the
	// processes said so far, by name.
	Answer(id, text string) error
	Answers(id string) map[string]string

	// InForce are the orders whose time is not over, in one sequence for all processes.
	InForce() []Carried

	// Watch has f called after each change until stop is called. f must not wait, nor
	// call the Carrier.
	Watch(f func()) (stop func())

	// Routes answer what is asked of the fleet, below /fleet/. They do not look at who asks:
	// [Access] does, before.
	Routes() http.Handler
}

// A Carried order has a name of its own, and is void after Until.
type Carried struct {
	ID, Order string
	Until     time.Time
}

// A Member is one process of a fleet. Heard is false for one that is silent or gone.
type Member struct {
	Name, Zone string
	Heard      bool
}
