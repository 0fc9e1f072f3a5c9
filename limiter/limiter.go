// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// A Limit is a token bucket: at most Burst + Rate·T admissions in any time T.
type Limit struct {
	// Rate is in tokens per second, in [0.001, 1e9].
	Rate float64 `json:"rate"`
	// Burst is in tokens, in [1, 1000000000].
	Burst int `json:"burst"`
}

// MaxKey is the longest key of a limit, in bytes.
const MaxKey = escrow.MaxKey

// A Limiter is one limit of this process ([Local]), or one key of a fleet's limits
// (fleet.Process's Key). It is safe for concurrent use. Keep it: looking up a key costs
// more than Allow.
//
// Most calls of Allow read no clock: they subtract from a pool of tokens that were taken
// ahead. A pool has at most 64 tokens, and at most a quarter of this process's part of the
// burst. When it is empty, one call takes a lock and fills it again.
type Limiter escrow.Handle

var _ Gate = (*Limiter)(nil)

// Local makes one limit of one process, without network. Nothing needs to be closed. It
// never admits more than Burst + Rate·T. Tokens spent from the pool of a full bucket are
// counted only when the pool is filled again. So a burst may be smaller by the size of the
// pool.
func Local(limit Limit) (*Limiter, error) {
	h, err := escrow.Local(escrow.Limit(limit))
	return (*Limiter)(h), err
}

func (l *Limiter) handle() *escrow.Handle { return (*escrow.Handle)(l) }

// Allow admits one token, or denies it at once. A denial counts as demand: in a fleet this
// process asks the others for the missing tokens.
func (l *Limiter) Allow() bool { return l.handle().Allow() }

// AllowN admits n tokens, all or none. n above the burst is denied, n <= 0 is admitted. In a
// fleet a process gathers tokens from the others for 200 ms after a denial of n > 1, so it
// is worth asking again.
func (l *Limiter) AllowN(n int) bool { return l.handle().AllowN(n) }

// Wait waits until one token is admitted, or ctx ends, or the fleet's process is closed
// ([ErrClosed]). Waiters of one Limiter are served in the order in which they came, and
// before any later Allow.
func (l *Limiter) Wait(ctx context.Context) error { return l.handle().Wait(ctx) }

// WaitN is Wait for n tokens at once; n above the burst is [ErrBurst].
//
// If n is more than this process's share of the burst, tokens must come from other
// processes. WaitN waits as long as they use their tokens themselves, or cannot be reached.
// Processes that gather at the same time get theirs one after the other, each after some
// refills of the burst.
func (l *Limiter) WaitN(ctx context.Context, n int) error { return l.handle().WaitN(ctx, n) }

// Admit admits one token and returns 0, or admits none and returns how long to wait before
// asking again. With it a Limiter is a guard's Limiter. now is ignored. A caller that is
// told to wait is expected to ask again, so asking twice does not count as twice the demand.
func (l *Limiter) Admit(now time.Duration) time.Duration { return l.handle().Admit(now) }

// Refund puts admitted tokens back into this process's own level, as far as its part of the
// burst has room. It never puts back more than the process has spent of its own tokens, so
// it creates no tokens. If only borrowed tokens were spent, they are lost.
func (l *Limiter) Refund(n int) { l.handle().Refund(n) }

// Level returns how many tokens this process has of the key, and the shortest time until it
// could admit one. In a fleet others may lend within 20 ms. It takes a lock.
func (l *Limiter) Level() Level {
	limit, left, next := l.handle().Level()
	return Level{Limit: Limit(limit), Left: left, Next: next}
}
