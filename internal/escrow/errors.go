// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "errors"

var (
	// ErrConfig means a configuration was refused. The text names every field
	// that is wrong, its value and the allowed range.
	ErrConfig = errors.New("limiter: config")

	// ErrBurst means that more tokens were asked for at once than Limit.Burst: no
	// wait would end.
	ErrBurst = errors.New("limiter: more than the burst")

	// ErrClosed means that the [Set] is closed.
	ErrClosed = errors.New("limiter: closed")

	// errMalformed means that a packet is not what a peer of this version sends.
	errMalformed = errors.New("limiter: malformed packet")

	// errMismatch means that a peer has another Config: other limits or another
	// roster. Nothing is lent to it and nothing taken from it, for two
	// configurations have no common bound.
	errMismatch = errors.New("limiter: a peer with another configuration")

	// errStale means that a packet is from an earlier incarnation, was meant for one, or
	// was overtaken by what has been forgotten since.
	errStale = errors.New("limiter: stale packet")

	// ErrTooManyKeys means that Config.MaxKeys leaves no room for a key.
	ErrTooManyKeys = errors.New("limiter: too many keys")
)
