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
	// Hold keeps the scope open until another action. For is the least time that this is expected
	// to last.
	Hold Kind = iota + 1
	// HalfOpen gives the scope back to its breaker, whose own probes decide from now on.
	HalfOpen
	// Probe lets one probe through a scope that stays held.
	Probe
	// Close closes a held scope.
	Close
)

var kindNames = [...]string{Hold: "hold", HalfOpen: "half-open", Probe: "probe", Close: "close"}

func (k Kind) String() string {
	if k > 0 && int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Causes that the fleet's actions set themselves.
const (
	// CauseUnknown is the cause of a scope that was taken over and about which nothing was told.
	CauseUnknown breaker.Cause = "unknown"
	// CauseFleet is the cause with which a scope closes that the fleet had opened.
	CauseFleet breaker.Cause = "fleet"
)

// Action is what a driver does to the breaker of a scope.
type Action struct {
	Scope        string
	Kind         Kind
	For          time.Duration // of a Hold: the least time expected
	BackoffLevel int           // the breaker's backoff level is at least this
	Cause        breaker.Cause
	At           Position // the fleet's position
}

// Apply applies a to the breaker b. No action undoes a force, such as an operator's.
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
