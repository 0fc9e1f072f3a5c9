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
// (fleet.Process's Key). It is safe for concurrent use. Keep it: to look a key up costs
// more than Allow.
//
// Most calls of Allow subtract from a pool of tokens that were taken ahead, and read no
// clock. The pool has at most 64 tokens and a quarter of what this process may keep. When
// the pool is empty one call takes a lock and fills it again.
type Limiter escrow.Handle

var _ Gate = (*Limiter)(nil)

// Local is one limit of one process: no network, nothing to close. It is exact: never more
// than Burst + Rate·T. What the pool of a full bucket gave is counted when the pool is
// filled again, so a burst may be smaller by what the pool holds.
func Local(limit Limit) (*Limiter, error) {
	h, err := escrow.Local(escrow.Limit(limit))
	return (*Limiter)(h), err
}

func (l *Limiter) handle() *escrow.Handle { return (*escrow.Handle)(l) }

// Allow admits one, or denies it at once. A denial counts as demand: in a fleet this
// process asks the others for what it was short of.
func (l *Limiter) Allow() bool { return l.handle().Allow() }

// AllowN admits n, all or none; n may be up to the burst, and anything more is denied.
// n <= 0 is admitted. In a fleet a denied process gathers tokens from the others for
// 200 ms, so it is worth asking again.
func (l *Limiter) AllowN(n int) bool { return l.handle().AllowN(n) }

// Wait waits until one is admitted, or ctx ends, or the fleet's process is closed
// ([ErrClosed]). Waiters of one Limiter are served in the order in which they came, and
// before any Allow that comes after them.
func (l *Limiter) Wait(ctx context.Context) error { return l.handle().Wait(ctx) }

// WaitN is Wait for n at once; more than the burst is [ErrBurst]. More than this process's
// share of the burst has to come from others: WaitN waits for as long as they use what
// they have, or are not there. Processes that wait for that at the same time get it one
// after the other, each after some refills of the burst.
func (l *Limiter) WaitN(ctx context.Context, n int) error { return l.handle().WaitN(ctx, n) }

// Admit takes one admission and returns 0, or takes none and returns how long to wait
// before it is worth asking again: it makes a Limiter what a guard's source takes for one.
// now is ignored. Whoever was told to wait is expected to ask again, so asking twice is
// not twice the demand.
func (l *Limiter) Admit(now time.Duration) time.Duration { return l.handle().Admit(now) }

// Refund puts admitted tokens back into this process's own level, as far as its part of
// the burst has room, and never more than it has spent of its own. So it makes no tokens,
// but what was spent of loans is lost if nothing own was.
func (l *Limiter) Refund(n int) { l.handle().Refund(n) }

// Level is what this process has of the key, and when it could admit one at the soonest;
// in a fleet others may lend within 20 ms. It takes a lock.
func (l *Limiter) Level() Level {
	limit, left, next := l.handle().Level()
	return Level{Limit: Limit(limit), Left: left, Next: next}
}
