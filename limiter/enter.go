// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// A DeniedError means that a gate did not admit.
type DeniedError struct {
	After time.Duration // shortest time before it is worth asking again; 0 if ctx had ended before

	// Err is why a wait ended or did not begin: the context's error, or
	// [context.DeadlineExceeded] if the wait was or would be too long. nil without a wait.
	Err error
}

func (e *DeniedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("limiter: denied: %v; again in %v", e.Err, e.After)
	}
	return fmt.Sprintf("limiter: denied: again in %v", e.After)
}

// Unwrap returns Err.
func (e *DeniedError) Unwrap() error { return e.Err }

// minAsk is the shortest DeniedError.After that is not 0.
const minAsk = 100 * time.Microsecond

// Enter admits one token for a call with a deadline. The parameter most is the longest wait; 0
// means no wait. Enter never waits beyond ctx's deadline. It does not begin a wait if the gate
// knows that the token would come too late.
//
// A denial is a [*DeniedError]. Any other error means that waiting would not help, for
// example [ErrClosed].
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

// over is a context that has ended: a Wait with it admits nothing.
var over = ended()

func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// closed reports whether a gate is closed; see [Gate]'s Wait.
func closed(g Gate) bool { return errors.Is(g.Wait(over), ErrClosed) }
