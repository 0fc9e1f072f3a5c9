// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// tally is a gate that knows what is out.
type tally struct {
	Gate

	out atomic.Int64
}

func (c *tally) AllowN(n int) bool {
	if !c.Gate.AllowN(n) {
		return false
	}
	c.out.Add(int64(n))
	return true
}

func (c *tally) WaitN(ctx context.Context, n int) error {
	err := c.Gate.WaitN(ctx, n)
	if err == nil {
		c.out.Add(int64(n))
	}
	return err
}

func (c *tally) Admit(now time.Duration) time.Duration {
	wait := c.Gate.Admit(now)
	if wait == 0 {
		c.out.Add(1)
	}
	return wait
}

func (c *tally) Refund(n int) {
	c.out.Add(-int64(n))
	c.Gate.Refund(n)
}

// Whatever is asked, every gate has given what was admitted and nothing else, and
// a denial is one that some gate alone would have made.
func TestAllOrNone(tb *testing.T) {
	rapid.Check(tb, func(t *rapid.T) {
		var at atomic.Int64 // a clock that stands until it is moved
		clock := func() time.Duration { return time.Duration(at.Load()) }
		var gates []Gate
		var parts []*tally
		var keys []*Limiter
		for i := range rapid.IntRange(1, 4).Draw(t, "gates") {
			l, closeIt := closable(tb, Limit{
				Rate:  rapid.SampledFrom([]float64{1, 10, 1000}).Draw(t, "rate"),
				Burst: rapid.SampledFrom([]int{1, 2, 5, 100}).Draw(t, "burst"),
			}, escrow.WithClock(clock))
			defer closeIt()
			keys = append(keys, l)
			parts = append(parts, &tally{Gate: keys[i]})
			gates = append(gates, parts[i])
		}
		a := All(gates...)
		admitted := int64(0)
		for range 40 {
			at.Add(int64(rapid.IntRange(0, 300).Draw(t, "ms")) * int64(ms))
			n := rapid.SampledFrom([]int{1, 1, 2, 6}).Draw(t, "n")
			possible := true
			for _, k := range keys {
				v := k.Level()
				possible = possible && v.Left >= n
			}
			var ok bool
			if n == 1 && rapid.Bool().Draw(t, "admit") {
				ok = a.Admit(0) == 0
			} else {
				ok = a.AllowN(n)
			}
			if ok != possible {
				t.Fatal("not what the gates would say one by one")
			}
			if ok {
				admitted += int64(n)
				if rapid.IntRange(0, 4).Draw(t, "back") == 0 {
					a.Refund(n)
					admitted -= int64(n)
				}
			}
			for _, p := range parts {
				if p.out.Load() != admitted {
					t.Fatal("a gate has given what was not admitted, or the other way round")
				}
			}
		}
	})
}

// Two handles over the same two gates in opposite order: everybody is served, and
// in total as fast as the gates allow.
func TestAllDoesNotDeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := local(t, Limit{Rate: 100, Burst: 1}), local(t, Limit{Rate: 100, Burst: 1})
		a, b := All(x, y), All(y, x)
		start := time.Now()
		var all sync.WaitGroup
		for range 50 {
			for _, g := range []Gate{a, b} {
				all.Go(func() {
					if err := g.Wait(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		if d := time.Since(start); d < 990*ms || d > 4*time.Second {
			t.Errorf("100 of 100/s took %v", d)
		}
	})
}

// Waiters come in their order, however much each wants, and no Allow passes them.
func TestAllIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		global, tenant := local(t, Limit{Rate: 100, Burst: 10}), local(t, Limit{Rate: 50, Burst: 5})
		a := All(tenant, global)
		if !a.AllowN(5) {
			t.Fatal("the first burst")
		}
		var mu sync.Mutex
		var order []int
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				if err := a.WaitN(t.Context(), 1+i%4); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait()
		}
		all.Go(func() { // somebody else's share of the global limit
			for range 200 {
				global.Allow()
				time.Sleep(7 * ms)
			}
		})
		time.Sleep(50 * ms)
		if a.Allow() || a.Admit(0) == 0 {
			t.Error("passed those who wait")
		}
		all.Wait()
		for i, got := range order {
			if got != i {
				t.Fatalf("order %v", order)
			}
		}
	})
}

// lax is a gate that has its waiters passed.
type lax struct {
	Gate

	open  atomic.Bool
	serve chan struct{}
}

func (l *lax) AllowN(int) bool                   { return l.open.Load() }
func (l *lax) Admit(time.Duration) time.Duration { return 0 }
func (l *lax) WaitN(context.Context, int) error  { <-l.serve; return nil }
func (l *lax) Refund(int)                        {}

// Nobody passes who waits, even where a gate would let them.
func TestAllHasOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &lax{serve: make(chan struct{})}
		a := All(g)
		done := make(chan error)
		go func() { done <- a.Wait(t.Context()) }()
		synctest.Wait()
		g.open.Store(true)
		if a.Allow() || a.Admit(0) == 0 {
			t.Error("passed a waiter")
		}
		close(g.serve)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if !a.Allow() || a.Admit(0) != 0 {
			t.Error("denied after the last waiter")
		}
	})
}

// A wait that ends with its context leaves nothing taken, and lets the next go on.
func TestAllGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, quick := &tally{Gate: local(t, Limit{Rate: 1, Burst: 1})}, &tally{Gate: local(t, Limit{Rate: 1000, Burst: 10})}
		a := All(quick, slow)
		if !a.Allow() {
			t.Fatal("the first")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*ms)
		defer cancel()
		var all sync.WaitGroup
		for range 2 { // one at the gates, one in line
			all.Go(func() {
				if err := a.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if slow.out.Load() != 1 || quick.out.Load() != 1 {
			t.Errorf("out: %d, %d", slow.out.Load(), quick.out.Load())
		}
		if err := a.WaitN(t.Context(), 2); !errors.Is(err, ErrBurst) {
			t.Errorf("2 of a burst of 1: %v", err)
		}
		if err := a.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Under the race detector, with real goroutines: the sum is right.
func TestAllTogether(t *testing.T) {
	const callers, each = 8, 200
	shared, closeShared := closable(t, Limit{Rate: .001, Burst: 500})
	defer closeShared()
	global := &tally{Gate: shared}
	var admitted, waited atomic.Int64
	var all sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 200*ms)
	defer cancel()
	for i := range callers {
		tenant, closeTenant := closable(t, Limit{Rate: .001, Burst: 30 * (i + 1)})
		defer closeTenant()
		a := All(tenant, nil, global, Observe(global.Gate, nil))
		all.Go(func() {
			for j := range each {
				switch {
				case j%3 == 0 && a.Admit(0) == 0, j%3 == 1 && a.Allow():
					admitted.Add(1)
				case j == each-1:
					if a.Wait(ctx) == nil {
						waited.Add(1)
					}
				}
			}
		})
	}
	all.Wait()
	if got := admitted.Load() + waited.Load(); got != global.out.Load() {
		t.Errorf("admitted %d, out %d", got, global.out.Load())
	}
	if left := int64(shared.Level().Left); left > 500-global.out.Load() {
		t.Errorf("%d left, %d out of 500", left, global.out.Load())
	}
}

func TestObserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: .001, Burst: 10})
		denied := 0
		o := Observe(l, func(n int) { denied += n })
		for range 13 {
			if !o.Allow() {
				t.Fatal("denied")
			}
		}
		if !o.AllowN(4) || o.Admit(0) != 0 || o.Wait(t.Context()) != nil || o.WaitN(t.Context(), 1000) != nil {
			t.Fatal("denied")
		}
		if want := 3 + 4 + 1 + 1 + 1000; denied != want {
			t.Errorf("tally %d, want %d", denied, want)
		}
		o.Refund(5)
		if l.Allow() {
			t.Error("gave back what was never taken")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := o.Wait(ctx); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		// Together with a real one it sees only what that admits.
		denied = 0
		a := All(o, local(t, Limit{Rate: .001, Burst: 2}))
		for range 10 {
			a.Allow()
		}
		if denied != 2 {
			t.Errorf("saw %d, want the 2 that the real one admitted", denied)
		}
	})
}

func TestLevel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		narrow, wide := local(t, Limit{Rate: .5, Burst: 3}), local(t, Limit{Rate: 100, Burst: 50})
		a := All(wide, narrow, Observe(local(t, Limit{Rate: 1, Burst: 1}), nil))
		if l := a.Level(); l != (Level{Limit: Limit{.5, 3}, Left: 3}) {
			t.Errorf("full: %+v", l)
		}
		narrow.AllowN(3)
		if l := a.Level(); l != (Level{Limit: Limit{.5, 3}, Next: 2 * time.Second}) {
			t.Errorf("empty: %+v", l)
		}
		time.Sleep(1500 * ms)
		if l := a.Level(); l.Next != 500*ms {
			t.Errorf("later: %+v", l)
		}
		// Who waits already is before.
		done := make(chan error)
		go func() { done <- narrow.WaitN(t.Context(), 2) }()
		synctest.Wait()
		if l := a.Level(); l.Left != 0 || l.Next != 4500*ms {
			t.Errorf("with a waiter: %+v", l)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		// The longest time, whichever has least.
		wide.AllowN(50)
		if l := a.Level(); l.Limit != (Limit{100, 50}) || l.Next != 2*time.Second {
			t.Errorf("both empty: %+v", l)
		}
		if l := All().Level(); l != (Level{}) {
			t.Errorf("of nothing: %+v", l)
		}
	})
}

func TestEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, closeIt := closable(t, Limit{Rate: 1, Burst: 1})
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			return ctx
		}
		enter := func(ctx context.Context, most time.Duration) (took, after time.Duration, cause error) {
			start := time.Now()
			err := Enter(ctx, l, most)
			var denied *DeniedError
			if err != nil && !errors.As(err, &denied) {
				t.Fatalf("an error that is no denial: %v", err)
			}
			if denied == nil {
				return time.Since(start), 0, nil
			}
			if denied.Err != nil && !errors.Is(err, denied.Err) || denied.Error() == "" {
				t.Errorf("%v does not say why", err)
			}
			return time.Since(start), denied.After, denied.Err
		}
		if took, after, _ := enter(t.Context(), 0); took != 0 || after != 0 {
			t.Error("the first:", took, after)
		}
		if took, after, cause := enter(t.Context(), 0); took != 0 || after != time.Second || cause != nil {
			t.Error("no wait:", took, after, cause)
		}
		if took, after, cause := enter(t.Context(), 999*ms); took != 0 || after != time.Second || !errors.Is(cause, context.DeadlineExceeded) {
			t.Error("cannot be in time:", took, after, cause)
		}
		if took, _, cause := enter(within(999*ms), time.Hour); took != 0 || !errors.Is(cause, context.DeadlineExceeded) {
			t.Error("cannot be before the deadline:", took, cause)
		}
		if took, after, _ := enter(within(time.Minute), time.Hour); took != time.Second || after != 0 {
			t.Error("in time:", took, after)
		}
		// Two for one token: one of them finds out by waiting.
		results := make(chan time.Duration, 2)
		for range 2 {
			go func() {
				_, after, _ := enter(t.Context(), 1100*ms)
				results <- after
			}()
		}
		if x, y := <-results, <-results; x != 0 && y != 0 || x == y {
			t.Error("two for one:", x, y)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, _, cause := enter(ended, time.Hour); !errors.Is(cause, context.Canceled) {
			t.Error("ended:", cause)
		}
		closeIt()
		if err := Enter(ended, l, time.Hour); !errors.As(err, new(*DeniedError)) {
			t.Error("ended:", err)
		}
		open, closeOpen := closable(t, Limit{Rate: 1, Burst: 1})
		defer closeOpen()
		for _, g := range []Gate{l, All(open, l)} {
			for _, most := range []time.Duration{0, 999 * ms, time.Hour} {
				if err := Enter(t.Context(), g, most); !errors.Is(err, ErrClosed) || errors.As(err, new(*DeniedError)) {
					t.Errorf("closed, %v: %v", most, err)
				}
			}
		}
	})
}
