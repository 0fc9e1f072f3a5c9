// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/crdt"
)

// A token that is given back is there again, one that does not fit is lost, and
// what was never taken is not given.
func TestRefund(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: .001, Burst: 5})
		l.Refund(3)
		if l.AllowN(6) || !l.AllowN(5) || l.Allow() {
			t.Fatal("not a burst of 5")
		}
		l.Refund(2)
		if !l.AllowN(2) || l.Allow() {
			t.Fatal("what was given back is not there")
		}
		l.Refund(100)
		l.Refund(-1)
		if !l.AllowN(5) || l.Allow() {
			t.Fatal("given back: want what fits")
		}
	})
}

// What is lent fills the cap, and a node that has spent nothing of its own has nothing
// to give back, however empty it is.
func TestRefundOfANode(t *testing.T) {
	n, err := NewNode(crdt.Replica{Name: "a"}, Config{
		Limit: Limit{Rate: 10, Burst: 40}, Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}}},
	}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if n.Take(0, "k", 1) || n.Refund(0, "k", 5) != 0 || n.Refund(0, "other", 5) != 0 {
		t.Fatal("a new life has something")
	}
	now := 10 * time.Second
	if !n.Take(now, "k", 15) {
		t.Fatal("not its share")
	}
	r := n.rows["k"]
	lend := func(amount int64) {
		r.level -= amount
		r.lent += amount
		r.sum.Lent += amount
	}
	lend(3 * micro)
	if back := n.Refund(now, "k", 5); back != 5*micro {
		t.Fatalf("%d given back of 5", back)
	}
	now += 5 * time.Second // it is full again, but for what has been lent
	if back := n.Refund(now, "k", 10); back != 0 || r.level+r.lent != r.cap {
		t.Fatalf("%d given back to a full one, level %d, lent %d", back, r.level, r.lent)
	}
	if r.sum.Minted+r.sum.Back != r.level+r.sum.Own+r.sum.Lent {
		t.Error("own tokens do not tie up")
	}
}

// Who waits gets what is given back.
func TestRefundServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: .001, Burst: 2})
		defer l.set.Close()
		l.AllowN(2)
		start := time.Now()
		done := make(chan error)
		go func() { done <- l.WaitN(t.Context(), 2) }()
		synctest.Wait()
		l.Refund(1)
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatal("served by half of what it wants", err)
		default:
		}
		l.Refund(1)
		if err := <-done; err != nil || time.Since(start) > 0 {
			t.Fatal(err, time.Since(start))
		}
	})
}

// However tokens are taken and given back, and whatever time passes between, what
// is used is within burst and rate and what was on its way back when the interval
// began; without such, within burst and rate.
func TestRefundMakesNoTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := Limit{
			Rate:  rapid.SampledFrom([]float64{1, 100, 12345}).Draw(t, "rate"),
			Burst: rapid.SampledFrom([]int{1, 2, 5, 300}).Draw(t, "burst"),
		}
		var now hand
		s, err := New(crdt.Replica{Name: "a"}, Config{Limit: limit}, WithClock(now.read))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l := s.Key("k")
		// all is a bucket in nano-tokens with every token that exists: those that
		// are out included, which therefore keep nobody from filling it.
		level, most, out := int64(limit.Burst)*1e9, int64(limit.Burst)*1e9, 0
		for range 80 {
			if rapid.IntRange(0, 3).Draw(t, "passes") == 0 {
				d := time.Duration(rapid.IntRange(0, 100_000).Draw(t, "µs")) * time.Microsecond
				now.move(d)
				level = max(level, min(most+int64(out)*1e9, level+int64(d)*int64(limit.Rate)))
			}
			n := rapid.SampledFrom([]int{1, 1, 2, limit.Burst}).Draw(t, "n")
			switch rapid.SampledFrom([]string{"use", "take", "give", "at once"}).Draw(t, "what") {
			case "use":
				if l.AllowN(n) {
					level -= int64(n) * 1e9
				}
			case "take":
				if l.AllowN(n) {
					out += n
				}
			case "give":
				n = min(n, out)
				out -= n
				l.Refund(n)
				level = min(level, most+int64(out)*1e9)
			case "at once":
				before := l.Level().Left
				if l.AllowN(n) {
					l.Refund(n)
				}
				if l.Level().Left != before {
					t.Fatal("taken and given back: the level has changed")
				}
			}
			if level < 0 {
				t.Fatal("more is used than there is")
			}
			v, _ := s.View("k")
			if v.Level > v.Cap || v.Level+v.Sums.Own != v.Sums.Minted || v.Sums.Own < 0 {
				t.Fatal("the books do not tie up")
			}
		}
	})
}

// In a fleet too, where what is spent may have been lent.
func TestRefundInAFleet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 4).Draw(t, "nodes")
		limit := rapid.SampledFrom([]Limit{{1000, 50}, {1000, 400}, {20, 5}, {100, 3}}).Draw(t, "limit")
		f := newFleet(silent{}, n, limit, rapid.Uint64().Draw(t, "seed"))
		f.loss = rapid.SampledFrom([]float64{0, .35}).Draw(t, "loss")
		var err error
		f.probe = func() {
			if err == nil {
				err = f.check()
			}
		}
		for range rapid.IntRange(3, 20).Draw(t, "steps") {
			s := f.nodes[rapid.IntRange(0, n-1).Draw(t, "node")]
			tokens := rapid.IntRange(1, limit.Burst).Draw(t, "tokens")
			now := s.clock(f.now)
			if s.Take(now, "k", tokens) {
				kept := s.Refund(now, "k", tokens)
				f.spent -= int64(tokens)*micro - kept // what found no room is gone
			}
			hot := rapid.IntRange(0, n-1).Draw(t, "hot")
			f.run(f.now+time.Duration(rapid.IntRange(1, 1500).Draw(t, "ms"))*ms, 1.5*limit.Rate, func(time.Duration) int { return hot })
			if err == nil {
				err = f.check()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

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
func TestAllOrNone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var now hand
		var gates []Gate
		var parts []*tally
		var keys []*Limiter
		for i := range rapid.IntRange(1, 4).Draw(t, "gates") {
			s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{
				Rate:  rapid.SampledFrom([]float64{1, 10, 1000}).Draw(t, "rate"),
				Burst: rapid.SampledFrom([]int{1, 2, 5, 100}).Draw(t, "burst"),
			}}, WithClock(now.read))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			keys = append(keys, s.Key(fmt.Sprint(i)))
			parts = append(parts, &tally{Gate: keys[i]})
			gates = append(gates, parts[i])
		}
		a := All(gates...)
		admitted := int64(0)
		for range 40 {
			now.move(time.Duration(rapid.IntRange(0, 300).Draw(t, "ms")) * ms)
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
	shared := local(t, Limit{Rate: .001, Burst: 500})
	defer shared.set.Close()
	global := &tally{Gate: shared}
	var admitted, waited atomic.Int64
	var all sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 200*ms)
	defer cancel()
	for i := range callers {
		tenant := local(t, Limit{Rate: .001, Burst: 30 * (i + 1)})
		defer tenant.set.Close()
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
		a := All(wide, narrow, Observe(local(t, Limit{Rate: 1, Burst: 1}), nil)).(Meter)
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
		if l := All().(Meter).Level(); l != (Level{}) {
			t.Errorf("of nothing: %+v", l)
		}
	})
}

func TestEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: 1, Burst: 1})
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			return ctx
		}
		enter := func(ctx context.Context, most time.Duration) (took, after time.Duration, cause error) {
			start := time.Now()
			err := Enter(ctx, l, most)
			var denied *DeniedError
			if err != nil && (!errors.As(err, &denied) || !errors.Is(err, ErrDenied)) {
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
		l.set.Close()
		if err := Enter(t.Context(), l, time.Hour); !errors.Is(err, ErrClosed) || errors.Is(err, ErrDenied) {
			t.Error("closed:", err)
		}
	})
}
