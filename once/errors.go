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
	// ErrInDoubt means that the effect of a key began and nobody knows whether it
	// happened: the process died meanwhile, or its mark is damaged. It waits for
	// [Runner.Settle]. An effect returns it, wrapped, if it does not know itself.
	ErrInDoubt = errors.New("once: effect in doubt")

	// ErrUnderway means that another delivery of the same key is running its effect.
	ErrUnderway = errors.New("once: effect under way elsewhere")

	// ErrImpossible means that the machine has no such step. No retry can mend it.
	ErrImpossible = errors.New("once: impossible step")

	// ErrLost means that another process may have taken the key over, because the store
	// has not heard of this one for too long.
	ErrLost = errors.New("once: claim lost")

	// ErrUnmarked means that the effect has happened and the store did not take its mark.
	// The runner writes it before it begins another effect. If the store refuses this mark
	// and takes others, only effects of the same key or entity wait for it.
	ErrUnmarked = errors.New("once: effect without its mark")

	// ErrKey means that a key, or the name of an entity or state, is not allowed.
	ErrKey = errors.New("once: key not allowed")

	// ErrResult means that an effect returned more than [MaxResult] bytes. It has
	// happened and is marked, and its result is not kept.
	ErrResult = errors.New("once: result too large")
)

// UnderwayError is an [ErrUnderway]: the context ended before the other delivery did. Its
// Timeout is true, so guard.Classify takes it for the dependency's fault, and the message
// is tried again and never dead-lettered for it.
type UnderwayError struct {
	Key  string
	Wait time.Duration // how long this delivery has waited
	Err  error         // why it waits no more
}

func (e *UnderwayError) Error() string {
	return fmt.Sprintf("once: %.80q: under way elsewhere, waited %s: %v", e.Key, e.Wait, e.Err)
}

// Unwrap makes errors.Is(err, ErrUnderway) hold, and finds the context's error.
func (e *UnderwayError) Unwrap() []error { return []error{ErrUnderway, e.Err} }

// Timeout is true.
func (*UnderwayError) Timeout() bool { return true }

// StepError is an [ErrImpossible]. A handler whose steps cannot come out of order returns
// guard.Permanent(err) for it. Otherwise it returns err: the step may become possible when
// the step before it has come.
type StepError struct {
	Machine, Entity string
	From, To        string // the entity's state, and the one that was asked for
}

func (e *StepError) Error() string {
	return fmt.Sprintf("once: %s %.80q: no step from %q to %q", e.Machine, e.Entity, e.From, e.To)
}

// Unwrap makes errors.Is(err, ErrImpossible) hold.
func (*StepError) Unwrap() error { return ErrImpossible }
