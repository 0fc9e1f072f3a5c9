// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"errors"
	"fmt"
)

var (
	// ErrConfig means that a configuration was refused. The text names every wrong field, its
	// value and the allowed range.
	ErrConfig = errors.New("limiter: config")

	// ErrBurst means that a call asked for more tokens at once than Limit.Burst: its wait
	// would never end.
	ErrBurst = errors.New("limiter: more than the burst")

	// ErrClosed means that the [Set] is closed.
	ErrClosed = errors.New("limiter: closed")

	// errMalformed means that a peer of this version does not send such a packet.
	errMalformed = errors.New("limiter: malformed packet")

	// errMismatch means that a peer has another Config: other limits or another roster. The
	// nodes lend each other nothing, for two configurations have no common bound.
	errMismatch = errors.New("limiter: a peer with another configuration")

	// ErrSettings is the errMismatch of a peer that has other settings than a [Configuration]
	// may change. The nodes refuse each other until one of them starts with the other's.
	ErrSettings = fmt.Errorf("%w: other settings", errMismatch)

	// errStale means that a packet is from an earlier incarnation or was meant for one, or
	// that it is too old: it may name an entry that was dropped since.
	errStale = errors.New("limiter: stale packet")

	// ErrTooManyKeys means that Config.MaxKeys leaves no room for a key.
	ErrTooManyKeys = errors.New("limiter: too many keys")
)
