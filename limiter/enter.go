// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// A DeniedError means that a gate did not admit. It wraps what ended a wait: an error of
// the context, or [context.DeadlineExceeded] when the wait would have been, or was,
// too long.
type DeniedError struct {
	After time.Duration // the least time until it is worth asking again
	Err   error         // nil if there was no wait
}

func (e *DeniedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("limiter: denied: %v; again in %v", e.Err, e.After)
	}
	return fmt.Sprintf("limiter: denied: again in %v", e.After)
}

// Unwrap returns Err.
func (e *DeniedError) Unwrap() error { return e.Err }

// minAsk is the least that anybody is told to wait.
const minAsk = 100 * time.Microsecond

// Enter admits one for somebody with a deadline. It waits for most at the longest,
// not at all if that is 0, and never beyond ctx's deadline; and it does not begin to
// wait for what cannot be in time as far as the gate knows. A denial is a
// [*DeniedError]; any other error is one that no wait would mend, [ErrClosed] above all.
func Enter(ctx context.Context, g Gate, most time.Duration) error {
	if err := ctx.Err(); err != nil {
		return &DeniedError{Err: err}
	}
	if g.Allow() {
		return nil
	}
	next := max(g.Level().Next, minAsk)
	denied := &DeniedError{After: next}
	if most > 0 {
		denied.Err = context.DeadlineExceeded
		if deadline, ok := ctx.Deadline(); ok {
			most = min(most, time.Until(deadline))
		}
	}
	if next > most {
		if closed(g) {
			return ErrClosed
		}
		return denied
	}
	within, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	err := g.Wait(within)
	if err != nil && (within.Err() != nil || errors.Is(err, context.DeadlineExceeded)) {
		return &DeniedError{After: max(g.Level().Next, minAsk), Err: err}
	}
	return err
}

// over has ended: nobody is admitted with it.
var over = ended()

func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// closed reports whether a gate is closed; see [Gate]'s Wait.
func closed(g Gate) bool { return errors.Is(g.Wait(over), ErrClosed) }
