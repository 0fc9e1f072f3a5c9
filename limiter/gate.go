// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"time"
)

// A Gate is a limit of any kind: a [Limiter] of one process or of a fleet, a handle of
// limiter/redis, several together ([All]), or one that only counts ([Observe]). It is safe
// for concurrent use.
type Gate interface {
	// Allow admits one token, or denies it. It waits only for the store, if there is one.
	Allow() bool
	// AllowN is Allow for n tokens, all or none. n <= 0 is admitted.
	AllowN(n int) bool
	// Wait waits until one token is admitted, or ctx ends, or waiting cannot help. With a ctx
	// that has ended it admits nothing. Its error is [ErrClosed] if the gate is closed, even
	// if ctx has ended.
	Wait(ctx context.Context) error
	// WaitN is Wait for n tokens at once. It returns [ErrBurst] if n can never be admitted.
	WaitN(ctx context.Context, n int) error
	// Admit is Allow for a guard's source. It admits one token and returns 0, or admits none
	// and returns how long to wait before asking again. It does no I/O and does not wait. now
	// may be ignored.
	Admit(now time.Duration) time.Duration
	// Refund gives back n admitted tokens that were not used. Call it once for each token,
	// and soon. Tokens for which the bucket has no room are lost. It does not block.
	//
	// Between its admission and its Refund a token counts nowhere: tokens that are neither
	// used nor refunded when an interval begins may be admitted beyond the limit in it.
	Refund(n int)
	// Level returns the gate's state. It takes no tokens, and asks no store or other process.
	// A gate of [All] knows as much as its parts.
	Level() Level
}

// A Level is the state of a gate at an instant, for people and headers. It may be outdated
// when it is read.
type Level struct {
	// Limit is zero if there is no limit, or if it is not known.
	Limit Limit
	// Left is how many tokens are left. For a fleet's limit it counts the tokens of this
	// process; others may lend more.
	Left int
	// Next is the shortest time until one more can be admitted; 0 means now.
	Next time.Duration
}
