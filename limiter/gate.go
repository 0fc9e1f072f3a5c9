// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"time"
)

// A Gate is a limit, whatever keeps it: a [Limiter] of one process or of a fleet,
// a handle of limiter/redis, several together ([All]), or one that only counts
// ([Observe]). It is safe for concurrent use.
type Gate interface {
	// Allow admits one, or denies it. It waits for nobody but the store, if there
	// is one.
	Allow() bool
	// AllowN is Allow for n, all or none. n <= 0 is admitted.
	AllowN(n int) bool
	// Wait waits until one is admitted, or ctx ends, or no wait would help. With a ctx
	// that has ended it admits nobody; its error is [ErrClosed] even so if the gate is
	// closed.
	Wait(ctx context.Context) error
	// WaitN is Wait for n, all at once; [ErrBurst] if that can never be.
	WaitN(ctx context.Context, n int) error
	// Admit is Allow for a guard's source: it takes one admission and returns 0, or
	// takes none and returns how long to wait before it is worth asking again. It
	// does no I/O and waits for nobody. now may be ignored.
	Admit(now time.Duration) time.Duration
	// Refund gives back n admissions that were not used, once for each, and soon.
	// What does not fit any more is lost. It does not block.
	//
	// An admission on its way back is out of the books: what is neither used nor
	// given back yet when an interval begins may come on top of the limit in it.
	Refund(n int)
	// Level looks, and takes nothing. It asks nobody. A gate of [All] knows as much as
	// its parts.
	Level() Level
}

// A Level is what a gate knows at an instant, for people and headers: by the time
// it is read it may be wrong.
type Level struct {
	// Limit is zero where there is none, or it is not known.
	Limit Limit
	// Left is how many tokens are there. Of a fleet's limit it is what this process
	// has, and others may lend.
	Left int
	// Next is the least time until one more can be admitted, 0 if one can be now.
	Next time.Duration
}
