// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import "errors"

var (
	// ErrTooManyScopes means [Scopes.Leaf] was asked for one more scope than
	// ScopesConfig.Limit, or a [Fleet] for one more than FleetConfig.Scopes. Nothing was
	// created; with a Fleet, the breaker goes by itself.
	ErrTooManyScopes = errors.New("breaker: too many scopes")

	// ErrPath means a scope path was empty, too long (255 bytes in a [Fleet]), or had an
	// empty element.
	ErrPath = errors.New("breaker: scope path")
)

// What gobreaker is told about a request.
var (
	errFailed   = errors.New("breaker: failed")
	errExcluded = errors.New("breaker: excluded")
)
