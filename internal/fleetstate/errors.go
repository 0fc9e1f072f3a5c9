// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
)

var (
	// ErrConfig means that a configuration or a roster was refused. The text names each wrong
	// field, its value and the allowed range.
	ErrConfig = errors.New("fleet: config")

	// ErrScope means that the key of a storm or a total was empty or longer than 255
	// bytes.
	ErrScope = errors.New("fleet: scope")

	// ErrTooManyScopes means that the key of a storm or a total is above the allowed number of
	// keys. Nothing was created.
	ErrTooManyScopes = errors.New("fleet: too many scopes")

	// ErrMalformed means that data of a peer cannot be read. Nothing of it was taken in.
	ErrMalformed = errors.New("fleet: malformed")

	// ErrRoster means that a peer has another roster under the same number, so the two would count
	// differently. Nothing of the packet was taken in.
	ErrRoster = errors.New("fleet: roster differs")

	// ErrSelf means that a packet came from this same incarnation of this process.
	ErrSelf = errors.New("fleet: own packet")

	// ErrFleet means that a peer is of another fleet, or has another policy or lease. Nothing of
	// the packet was taken in.
	ErrFleet = errors.New("fleet: another fleet")

	// ErrDiffers means that two different configurations of one number are known: two were loaded
	// in a static fleet, or the register was set back. Nothing was taken in. [errors.As] to a
	// [*DiffersError] gives the peer.
	ErrDiffers = errors.New("fleet: configuration differs")

	// ErrMember means that a name is in the roster and should not be, or is not in it and should
	// be.
	ErrMember = errors.New("fleet: member")

	// ErrBusy means that too much is under way: too many requests of this process, too many
	// configurations that a member has not applied, or a full quarantine.
	ErrBusy = errors.New("fleet: busy")

	// ErrConflict means that the configuration to change is no longer the newest. Nothing was
	// changed. [errors.As] to a [*ConflictError] gives the newest number.
	ErrConflict = errors.New("fleet: conflict")

	// ErrEnded means that a request was cancelled before it was made, and will not be made.
	ErrEnded = errors.New("fleet: ended")

	// ErrUnknown means that the outcome of a request can no longer be known.
	ErrUnknown = errors.New("fleet: outcome unknown")
)

// ConflictError is an [ErrConflict]. Number is the configuration to change, Newest the newest one.
type ConflictError struct{ Number, Newest uint64 }

// Error has both numbers.
func (e *ConflictError) Error() string {
	return fmt.Sprintf("%v: number %d was to be changed, the newest is %d", ErrConflict, e.Number, e.Newest)
}

// Is reports whether target is [ErrConflict].
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }
