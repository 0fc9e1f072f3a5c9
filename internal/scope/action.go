// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Kind is what an [Action] asks for.
type Kind uint8

const (
	// Hold keeps the scope open until another action. For is how long that is
	// expected to be at least.
	Hold Kind = iota + 1
	// HalfOpen gives the scope back to itself: its own probes decide from now.
	HalfOpen
	// Probe lets one probe through a scope that stays held.
	Probe
	// Close closes a scope that is held.
	Close
)

var kindNames = [...]string{Hold: "hold", HalfOpen: "half-open", Probe: "probe", Close: "close"}

func (k Kind) String() string {
	if k > 0 && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Causes that actions bring of their own.
const (
	// CauseUnknown is a scope that was taken over and that nobody has told of.
	CauseUnknown breaker.Cause = "unknown"
	// CauseFleet is why a scope closed that the fleet had opened.
	CauseFleet breaker.Cause = "fleet"
)

// Action is what a driver does to the breaker of a scope.
type Action struct {
	Scope        string
	Kind         Kind
	For          time.Duration // Hold
	BackoffLevel int           // the least the backoff stands at
	Cause        breaker.Cause
	At           Position // of the fleet
}

// Apply does to b what a asks for. No action undoes a force, such as an
// operator's.
func (a Action) Apply(now time.Duration, b *circuit.Breaker) {
	switch a.Kind {
	case Hold:
		b.Hold(now, a.BackoffLevel, a.Cause)
	case HalfOpen:
		b.Hold(now, a.BackoffLevel, a.Cause)
		b.Unhold(now)
	case Probe:
		b.Permit(now)
	case Close:
		b.CloseHeld(now, a.Cause)
	}
}
