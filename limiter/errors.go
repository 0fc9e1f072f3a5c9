// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import "github.com/stormguard-mq/stormguard/internal/escrow"

var (
	// ErrBurst means that a call asked for more tokens at once than Limit.Burst: its wait
	// would never end.
	ErrBurst = escrow.ErrBurst

	// ErrClosed means that the limits were closed together with their process.
	ErrClosed = escrow.ErrClosed
)
