// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import "errors"

var (
	// ErrConfig means a configuration or a roster was refused. The text names
	// every field that is wrong, its value and the allowed range.
	ErrConfig = errors.New("fleet: config")

	// ErrScope means a scope's name was empty or longer than 255 bytes.
	ErrScope = errors.New("fleet: scope")

	// ErrTooManyScopes means one more scope than Config.Scopes, none of which may
	// be forgotten. Nothing was created; the breaker goes by itself.
	ErrTooManyScopes = errors.New("fleet: too many scopes")

	// ErrMalformed means that what a peer sent cannot be read. Nothing of it was
	// taken in.
	ErrMalformed = errors.New("fleet: malformed")

	// ErrRoster means that a peer has another roster under the same number, so
	// that the two would count differently. Nothing of it was taken in.
	ErrRoster = errors.New("fleet: roster differs")

	// ErrSelf means that a packet came from this very life of this process.
	ErrSelf = errors.New("fleet: own packet")
)
