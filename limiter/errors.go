// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import "github.com/stormguard-mq/stormguard/internal/escrow"

var (
	// ErrBurst means that more tokens were asked for at once than Limit.Burst: no
	// wait would end.
	ErrBurst = escrow.ErrBurst

	// ErrClosed means that the limits were closed, with their process.
	ErrClosed = escrow.ErrClosed
)
