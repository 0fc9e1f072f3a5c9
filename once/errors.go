// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once

import (
	"errors"
	"fmt"
	"time"
)

// Errors to branch on.
var (
	// ErrInDoubt means that the effect of a key began and nobody knows whether it happened:
	// the process died during it, or the mark is damaged. The key waits for
	// [Runner.Settle]. An effect that does not know its own outcome returns ErrInDoubt,
	// wrapped.
	ErrInDoubt = errors.New("once: effect in doubt")

	// ErrUnderway means that another delivery of the same key is running its effect.
	ErrUnderway = errors.New("once: effect under way elsewhere")

	// ErrImpossible means that the machine has no step from the entity's state to the
	// requested one. A retry fails again until another step moves the entity. If no path
	// of steps leads to the requested state, no retry can succeed. See [StepError].
	ErrImpossible = errors.New("once: impossible step")

	// ErrLost means that another process may have taken over the key, because the store has
	// not heard from this process for too long.
	ErrLost = errors.New("once: claim lost")

	// ErrUnmarked means that the effect has happened, but the store did not accept its
	// mark. The runner writes the mark before it begins another effect. If the store
	// refuses this mark and accepts others, only effects of the same key or entity wait for
	// it.
	ErrUnmarked = errors.New("once: effect without its mark")

	// ErrKey means that a key, or the name of an entity or state, is not allowed.
	ErrKey = errors.New("once: key not allowed")

	// ErrResult means that an effect returned more than [MaxResult] bytes. The effect has
	// happened and is marked, but its result is not kept.
	ErrResult = errors.New("once: result too large")
)

// UnderwayError is an [ErrUnderway]: the context ended before the other delivery did. Its
// Timeout is true, so guard.Classify blames the dependency: the message is tried again, and
// never dead-lettered because of this error.
type UnderwayError struct {
	Key  string
	Wait time.Duration // how long this delivery has waited
	Err  error         // why this delivery stopped waiting
}

func (e *UnderwayError) Error() string {
	return fmt.Sprintf("once: %.80q: under way elsewhere, waited %s: %v", e.Key, e.Wait, e.Err)
}

// Unwrap returns ErrUnderway and Err.
func (e *UnderwayError) Unwrap() []error { return []error{ErrUnderway, e.Err} }

// Timeout returns true.
func (*UnderwayError) Timeout() bool { return true }

// StepError is an [ErrImpossible]. If steps cannot come out of order, the handler returns
// guard.Permanent(err). Otherwise it returns err: the step may become possible after an
// earlier step of the entity has been taken.
type StepError struct {
	Machine, Entity string
	From, To        string // the entity's state, and the requested one
}

func (e *StepError) Error() string {
	return fmt.Sprintf("once: %s %.80q: no step from %q to %q", e.Machine, e.Entity, e.From, e.To)
}

// Unwrap returns ErrImpossible.
func (*StepError) Unwrap() error { return ErrImpossible }
