// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A Decider is what a [Member] stands on: who decides about scopes. [Verdicts]
// does by gossip, and breaker/etcd by transactions. What a scope is, and what is
// done to its breakers, is the Member's and the same for both.
//
// Verdicts says what each method is to do. None does I/O or blocks, and all are
// safe for concurrent use.
type Decider interface { //nolint:interfacebloat // what Verdicts offers a driver; half of it would drive nothing
	Adopt(now time.Duration, name string) (Action, error)
	Leave(now time.Duration, name string)
	Observe(now time.Duration, name string, s breaker.Snapshot)
	Want(now time.Duration, name string, wants bool)
	Tick(now time.Duration)
	Actions(dst []Action) []Action
	OnActions(wake func())
	Stirs() bool
	Alone() bool
	Describe(now time.Duration, name string) breaker.FleetScope
	Config() Config
}

var _ Decider = (*Verdicts)(nil)
