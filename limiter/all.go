// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"slices"
	"sync/atomic"
	"time"
)

// All is several limits together, such as a tenant's and everybody's: admitted is
// what all of them admit, and what some had admitted is given back when another
// refuses. A nil gate is no limit; All of nothing admits everything.
//
// The gates are asked in their order, so the narrowest comes first: what it
// refuses has then taken nothing from those that are shared. Gates of [Observe] are
// asked last, since they refuse nothing.
//
// Waiters of one handle are admitted in the order in which they came, and before any
// Allow that comes after them: keep the handle, one for each combination. A waiter
// holds nothing of one gate while it waits for another, so handles that share gates
// cannot block each other, whatever their order. Whoever waits is admitted for
// certain, in time, if at most one of its gates is shared with others.
func All(gates ...Gate) Gate {
	a := &all{turn: make(chan struct{}, 1)}
	for _, g := range gates {
		if g != nil {
			a.gates = append(a.gates, g)
		}
	}
	slices.SortStableFunc(a.gates, func(x, y Gate) int { return late(x) - late(y) })
	return a
}

func late(g Gate) int {
	if _, ok := g.(*observed); ok {
		return 1
	}
	return 0
}

type all struct {
	gates   []Gate
	waiting atomic.Int64
	turn    chan struct{} // has one element while the first waiter is at the gates
}

const nobody = -1

// take asks all gates but one, and returns who refused, or nobody. Nothing is
// taken when one refuses.
func (a *all) take(n, but int) (refused int) {
	for i, g := range a.gates {
		if i != but && !g.AllowN(n) {
			a.refund(n, i, but)
			return i
		}
	}
	return nobody
}

// refund gives back what the gates before one admitted.
func (a *all) refund(n, before, but int) {
	for i, g := range a.gates[:before] {
		if i != but {
			g.Refund(n)
		}
	}
}

func (a *all) Allow() bool { return a.AllowN(1) }

func (a *all) AllowN(n int) bool {
	return n <= 0 || a.waiting.Load() == 0 && a.take(n, nobody) == nobody
}

func (a *all) Wait(ctx context.Context) error { return a.WaitN(ctx, 1) }

func (a *all) WaitN(ctx context.Context, n int) error {
	if n <= 0 {
		return ctx.Err()
	}
	if err := ctx.Err(); err != nil {
		if slices.ContainsFunc(a.gates, closed) {
			return ErrClosed
		}
		return err
	}
	if a.AllowN(n) {
		return nil
	}
	a.waiting.Add(1)
	defer a.waiting.Add(-1)
	select { // those who wait to send are served in their order
	case a.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-a.turn }()
	// Wait for the one that refused, then ask the others again; give back what was
	// waited for if one of those refuses now, and wait for that one.
	for at := a.take(n, nobody); at != nobody; {
		if err := a.gates[at].WaitN(ctx, n); err != nil {
			return err
		}
		refused := a.take(n, at)
		if refused != nobody {
			a.gates[at].Refund(n)
		}
		at = refused
	}
	return nil
}

// Admit asks again in a millisecond when others wait: who is before it cannot be
// known in tokens.
func (a *all) Admit(now time.Duration) time.Duration {
	if a.waiting.Load() > 0 {
		return time.Millisecond
	}
	for i, g := range a.gates {
		if wait := g.Admit(now); wait > 0 {
			a.refund(1, i, nobody)
			return wait
		}
	}
	return 0
}

func (a *all) Refund(n int) { a.refund(n, len(a.gates), nobody) }

// Level is that of the gate that has least left, and the longest time of any.
func (a *all) Level() Level {
	var tight Level
	for _, g := range a.gates {
		if late(g) == 1 {
			continue
		}
		l := g.Level()
		next := max(tight.Next, l.Next)
		if tight.Limit == (Limit{}) || l.Limit != (Limit{}) && l.Left < tight.Left {
			tight = l
		}
		tight.Next = next
	}
	return tight
}
