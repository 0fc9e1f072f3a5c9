// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"slices"
	"sync/atomic"
	"time"
)

// All combines several limits, such as a tenant's and the total: a call is admitted if all
// gates admit it. If one gate refuses, tokens of the other gates are refunded. A nil gate is
// no limit. All without gates admits everything.
//
// The gates are asked in their order. Put the narrowest first: if it refuses, nothing was
// taken from the shared gates. Gates of [Observe] are asked last, since they refuse nothing.
//
// Keep the handle that All returns, one for each combination: its waiters are admitted in
// the order in which they came, and before any later Allow. A waiter holds no tokens of one
// gate while it waits for another, so handles that share gates cannot block each other,
// whatever their order is. A waiter is certain to be admitted at some time if at most one
// of its gates is shared with others.
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
	turn    chan struct{} // has one element while the first waiter asks the gates
}

const nobody = -1

// take asks all gates except the one with index but. It returns the index of the gate that
// refused, or nobody. If one refuses, nothing is taken.
func (a *all) take(n, but int) (refused int) {
	for i, g := range a.gates {
		if i != but && !g.AllowN(n) {
			a.refund(n, i, but)
			return i
		}
	}
	return nobody
}

// refund refunds tokens to the gates before the index before, except the one with index but.
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
	select { // a channel serves waiting senders in order
	case a.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-a.turn }()
	// Wait for the gate that refused, then ask the others again. If another gate refuses now,
	// refund the tokens of the first, and wait for that gate.
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

// Admit returns a millisecond while others wait, since it does not know how many tokens they
// wait for.
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

// Level is that of the gate with the fewest tokens left, with the longest Next of all gates.
// Gates of [Observe] are left out, and gates without a Limit count for Next only.
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
