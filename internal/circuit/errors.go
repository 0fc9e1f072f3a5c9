// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import "errors"

var (
	// ErrTooManyScopes means that a call asked [Scopes.Leaf] for more scopes than
	// ScopesConfig.Limit, or a [Fleet] for more than FleetConfig.Scopes. Nothing was
	// created. With a Fleet, the breaker decides alone.
	ErrTooManyScopes = errors.New("breaker: too many scopes")

	// ErrPath means that a scope path is empty or too long (over 255 bytes in a [Fleet]),
	// or has an empty element.
	ErrPath = errors.New("breaker: scope path")
)

// errFailed and errExcluded tell gobreaker the outcome of a request.
var (
	errFailed   = errors.New("breaker: failed")
	errExcluded = errors.New("breaker: excluded")
)
