// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
)

var (
	// ErrConfig means a configuration or a roster was refused. The text names
	// every field that is wrong, its value and the allowed range.
	ErrConfig = errors.New("fleet: config")

	// ErrScope means that the key of a storm or a total was empty or longer than 255
	// bytes.
	ErrScope = errors.New("fleet: scope")

	// ErrTooManyScopes means one more key of a storm or a total than there may be.
	// Nothing was created.
	ErrTooManyScopes = errors.New("fleet: too many scopes")

	// ErrMalformed means that what a peer sent cannot be read. Nothing of it was
	// taken in.
	ErrMalformed = errors.New("fleet: malformed")

	// ErrRoster means that a peer has another roster under the same number, so
	// that the two would count differently. Nothing of it was taken in.
	ErrRoster = errors.New("fleet: roster differs")

	// ErrSelf means that a packet came from this very incarnation of this process.
	ErrSelf = errors.New("fleet: own packet")

	// ErrFleet means that a peer is of another fleet, or has another policy or
	// lease. Nothing of it was taken in.
	ErrFleet = errors.New("fleet: another fleet")

	// ErrDiffers means that two configurations of one number are known to differ: two
	// were loaded in a static fleet, or the register was set back. [errors.As] to a
	// [*DiffersError] tells whose. Nothing of it was taken in.
	ErrDiffers = errors.New("fleet: configuration differs")

	// ErrMember means that a name is in the roster and should not be, or is not
	// and should.
	ErrMember = errors.New("fleet: member")

	// ErrBusy means that too much is under way: too many requests of this process,
	// too many configurations that some member has not applied, or a full quarantine.
	ErrBusy = errors.New("fleet: busy")

	// ErrConflict means that the configuration moved on: the number that was to be
	// changed is not the newest. Nothing was changed. [errors.As] to a [*ConflictError]
	// tells the newest.
	ErrConflict = errors.New("fleet: conflict")

	// ErrEnded means that a request was given up before it was made: it will not be.
	ErrEnded = errors.New("fleet: ended")

	// ErrUnknown means that nobody can say any more whether a request was made.
	ErrUnknown = errors.New("fleet: outcome unknown")
)

// ConflictError is an [ErrConflict]: Number was to be changed, and Newest is the newest.
type ConflictError struct{ Number, Newest uint64 }

// Error names both numbers.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("%v: number %d was to be changed, the newest is %d", ErrConflict, e.Number, e.Newest)
}

// Is reports whether target is [ErrConflict].
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }
