// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A handler that fails at once is not asked again and again while Run's context
// ends: with workers, what ended last saw that. Many rounds, since it is a race.
func TestNoCallAfterTheContext(t *testing.T) {
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, Policy{Order: OrderKey, Workers: 4}, Limits{}, func(_ *rig, ctx context.Context, _ int) error {
				<-ctx.Done()
				return errDown
			})
			r.send(0, 4)
			synctest.Wait()
			before := len(r.calls)
			r.cancel()
			if a := r.check(); len(r.calls) > before {
				t.Fatalf("%d calls with a context that is over, %+v", len(r.calls)-before, a)
			}
			r.close()
		})
		if t.Failed() {
			return
		}
	}
}

// A handler that fails in any way costs its message an attempt and nothing
// else; after its attempts the message is dead-lettered with its history.
func TestFailuresOfEveryKind(t *testing.T) {
	kinds := map[string]struct {
		fail func(ctx context.Context) error
		text string
	}{
		"error":  {func(context.Context) error { return errors.New("no such account") }, "no such account"},
		"panic":  {func(context.Context) error { panic("nil map") }, "nil map"},
		"goexit": {func(context.Context) error { runtime.Goexit(); return nil }, "Goexit"},
		"hang": {func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}, "timeout"},
	}
	policies := map[string]Policy{
		"source": {Timeout: time.Second},
		"key":    {Timeout: time.Second, Order: OrderKey, Workers: 3},
		"none":   {Timeout: time.Second, Order: OrderNone, Workers: 3},
	}
	for kind, k := range kinds {
		for order, p := range policies {
			bubble(t, kind+"/"+order, func(t *testing.T) {
				r := newRig(t, p, Limits{}, func(_ *rig, ctx context.Context, m int) error {
					if m == 5 {
						return k.fail(ctx)
					}
					return nil
				})
				for m := range 200 { // traffic goes on: a lonely failure waits for a witness
					r.send(m, m+1)
					time.Sleep(100 * time.Millisecond)
				}
				time.Sleep(time.Minute)
				if a := r.check(); a.Acked != 199 || a.DeadLettered != 1 {
					t.Errorf("%+v\n%+v", a, r.s.State())
				}
				if got := r.letters.bodies(); !slices.Equal(got, []string{"5"}) {
					t.Fatalf("dead letters %v", got)
				}
				rec := r.letters.recs[0]
				if rec.Attempts < 5 || rec.Attempts > 8 || len(rec.History) != rec.Attempts || !strings.Contains(rec.Error.Message, k.text) {
					t.Errorf("%+v", rec)
				}
				if (kind == "panic" || kind == "goexit") && !strings.Contains(rec.Error.Stack, "shape_test.go") {
					t.Errorf("stack %q", rec.Error.Stack)
				}
				r.close()
			})
		}
	}
}

// A call's context ends with the call, also when a Goexit ends that.
func TestGoexitEndsTheContext(t *testing.T) {
	for _, workers := range []int{1, 2} {
		bubble(t, strconv.Itoa(workers), func(t *testing.T) {
			var first <-chan struct{} // of the first call's context
			r := newRig(t, Policy{Order: OrderKey, Workers: workers}, Limits{}, func(_ *rig, ctx context.Context, _ int) error {
				if first == nil {
					first = ctx.Done()
					runtime.Goexit()
				}
				return nil
			})
			r.send(0, 1)
			time.Sleep(time.Minute)
			if a := r.check(); a.Acked != 1 {
				t.Errorf("%+v", a)
			}
			select {
			case <-first:
			default:
				t.Error("the context of the first call has not ended")
			}
			r.close()
		})
	}
}

func TestPermanentAndIgnore(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			switch m {
			case 3:
				return Permanent(errors.New("bad schema"))
			case 4:
				return Ignore(errors.New("a test message"))
			}
			return nil
		})
		r.send(0, 10)
		if a := r.check(); a.Acked != 9 || a.DeadLettered != 1 || r.s.State().Tally.Ignored != 1 {
			t.Errorf("%+v", a)
		}
		if rec := r.letters.recs[0]; !rec.Permanent || rec.Attempts != 1 {
			t.Errorf("%+v", rec)
		}
		r.close()
	})
}

// Workers keep the order of each key through an outage.
func TestWorkersKeepKeyOrder(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var down atomic.Bool
		r := newRig(t, Policy{Order: OrderKey, Workers: 4}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			time.Sleep(time.Duration(m%7) * 100 * time.Microsecond)
			if down.Load() {
				return errDown
			}
			return nil
		})
		r.send(0, 300)
		down.Store(true)
		r.send(300, 600)
		time.Sleep(5 * time.Second)
		r.check()
		down.Store(false)
		r.send(600, 900)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 900 {
			t.Errorf("%+v", a)
		}
		inOrder(t, r.done(), func(m int) int { return m % 8 })
		r.close()
	})
}

// While the window is full nothing is read; once half is free it is.
func TestWindowStopsIntake(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{Window: 10}, Limits{}, ok)
		if err := r.s.ForceOpen(0); err != nil {
			t.Fatal(err)
		}
		r.send(0, 10)
		synctest.Wait()
		select {
		case r.in <- 10:
			t.Error("read past the window")
		default:
		}
		if a := r.check(); a.Held != 10 {
			t.Errorf("%+v", a)
		}
		if err := r.s.ForceClosed(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if a := r.check(); a.Acked != 10 {
			t.Errorf("%+v", a)
		}
		if d := r.port.demands; !slices.Contains(d, 0) || d[len(d)-1] < 5 {
			t.Errorf("demands %v", d)
		}
		r.close()
	})
}

// A forced-open source calls nobody and settles nothing, however long.
func TestForcedOpen(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{AckWait: 30 * time.Second}, ok)
		r.send(0, 5)
		synctest.Wait()
		_ = r.s.ForceOpen(time.Minute)
		r.send(5, 55)
		time.Sleep(59 * time.Second)
		if a := r.check(); a.Acked != 5 || a.Held != 50 {
			t.Errorf("%+v", a)
		}
		r.port.mu.Lock()
		if n := r.port.extended; n > 50*6 || n < 50*5 {
			t.Errorf("%d extensions of 50 messages in a minute", n)
		}
		r.port.mu.Unlock()
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 55 {
			t.Errorf("%+v", a)
		}
		inOrder(t, r.done(), one)
		r.close()
	})
}

func TestPause(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, ok)
		r.send(0, 5)
		synctest.Wait()
		r.s.Pause(0)
		r.send(5, 10)
		time.Sleep(time.Hour)
		if a := r.check(); a.Acked != 5 || a.Held != 5 {
			t.Errorf("%+v", a)
		}
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonOperator {
			t.Errorf("%+v", h)
		}
		r.s.Resume()
		time.Sleep(time.Second)
		if a := r.check(); a.Acked != 10 {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// While somebody asked for time, the state says why, in their words.
func TestBackoffSaysWhy(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		busy := &lookingError{text: "429 too many requests"}
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error {
			return Backoff(busy, time.Now().Add(time.Minute))
		})
		r.send(0, 1)
		time.Sleep(time.Second)
		r.check()
		busy.at = []*sync.Mutex{&r.s.mu}
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonBackpressure || h[0].Detail != "asked for time: 429 too many requests" {
			t.Errorf("%+v", h)
		}
		if where := busy.locked.Load(); where != nil {
			t.Errorf("the error's method is called under the source's lock:\n%s", *where)
		}
		r.close()
	})
}

// Nor is it looked into under a lock to be remembered over a restart.
func TestBackoffIsSavedUnlocked(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		busy := &lookingError{text: "429 too many requests"}
		g, err := New(Config{StateDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, func(context.Context, int) error {
			return Backoff(busy, time.Now().Add(time.Hour))
		})
		if err != nil {
			t.Fatal(err)
		}
		busy.at = []*sync.Mutex{&s.mu, &g.mu}
		in := make(chan int, 1)
		go func() { _ = s.Run(t.Context(), in) }()
		in <- 1
		time.Sleep(5 * time.Second)
		s.End(t.Context(), ReasonRebalance)
		time.Sleep(5 * time.Second)
		closeAll(t, g)
		if where := busy.locked.Load(); where != nil {
			t.Errorf("the error's method is called under a lock:\n%s", *where)
		}
	})
}

// What a handler, a port and a dead-letter writer return is never looked into under a
// lock: what its methods do is its author's affair.
func TestErrorsAreReadUnlocked(t *testing.T) {
	for name, p := range map[string]Policy{"one": {}, "workers": {Order: OrderKey, Workers: 2}} {
		bubble(t, name, func(t *testing.T) {
			odd := &lookingError{text: "odd"}
			r := newRig(t, p, Limits{}, func(_ *rig, _ context.Context, m int) error {
				switch m % 4 {
				case 1:
					return errors.Join(odd, Ignore(odd))
				case 2:
					return fmt.Errorf("of the message: %w", Permanent(odd))
				case 3:
					return fmt.Errorf("of the message: %w", odd)
				}
				return nil
			})
			odd.at = []*sync.Mutex{&r.s.mu, &r.s.writer.mu}
			r.letters.err, r.port.ackErr = odd, odd
			r.send(0, 8)
			time.Sleep(time.Minute)
			r.check()
			if n := r.s.State().Tally; n.Failures < 4 || n.AckFailures == 0 {
				t.Errorf("%+v", n)
			}
			if where := odd.locked.Load(); where != nil {
				t.Errorf("a method of the error is called under a lock:\n%s", *where)
			}
			r.port.mu.Lock()
			r.port.ackErr = nil
			r.port.mu.Unlock()
			r.letters.mu.Lock()
			r.letters.err = nil
			r.letters.mu.Unlock()
			time.Sleep(time.Hour)
			r.close()
		})
	}
}

// lookingError notes where a lock is held when one of its methods is called.
type lookingError struct {
	text   string
	at     []*sync.Mutex
	locked atomic.Pointer[[]byte]
}

// look allows another goroutine the lock for a moment: a caller that has it never lets go.
func (e *lookingError) look() {
	for _, mu := range e.at {
		free := false
		for range 1_000_000 { // whoever holds it may be off its processor
			if free = mu.TryLock(); free {
				mu.Unlock()
				break
			}
			runtime.Gosched()
		}
		if !free {
			stack := debug.Stack()
			e.locked.Store(&stack)
		}
	}
}

func (e *lookingError) Error() string { e.look(); return e.text }
func (e *lookingError) Is(error) bool { e.look(); return false }
func (e *lookingError) As(any) bool   { e.look(); return false }
func (e *lookingError) Unwrap() error { e.look(); return nil }

// Close ends in every state: nothing leaks, everything is accounted for, and no
// port call follows.
func TestCloseInEveryState(t *testing.T) {
	states := map[string]struct {
		policy  Policy
		handler func(r *rig, ctx context.Context, m int) error
		before  func(r *rig)
		grace   time.Duration
		left    int
	}{
		"idle":      {handler: ok},
		"handling":  {handler: func(*rig, context.Context, int) error { time.Sleep(time.Second); return nil }, grace: time.Minute},
		"held":      {handler: ok, before: func(r *rig) { _ = r.s.ForceOpen(0) }},
		"paused":    {handler: ok, before: func(r *rig) { r.s.Pause(0) }},
		"retrying":  {handler: func(*rig, context.Context, int) error { return errDown }},
		"permanent": {handler: func(*rig, context.Context, int) error { return Permanent(errDown) }},
		"writer down": {
			handler: func(*rig, context.Context, int) error { return Permanent(errDown) },
			before:  func(r *rig) { r.letters.err = errDown }, grace: time.Second, left: -1,
		},
		"cancelled": {handler: func(_ *rig, ctx context.Context, _ int) error {
			<-ctx.Done()
			return ctx.Err()
		}, grace: time.Second},
		"hung": {handler: func(*rig, context.Context, int) error {
			time.Sleep(time.Hour)
			return nil
		}, grace: time.Second, left: 1},
		"workers hung": {policy: Policy{Order: OrderNone, Workers: 3}, handler: func(*rig, context.Context, int) error {
			time.Sleep(time.Hour)
			return nil
		}, grace: time.Second, left: 3},
	}
	for name, st := range states {
		for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
			if st.policy.Workers > 1 && order == OrderSource {
				continue
			}
			bubble(t, name+"/"+order.String(), func(t *testing.T) {
				st.policy.Order = order
				r := newRig(t, st.policy, Limits{}, st.handler)
				if st.before != nil {
					st.before(r)
				}
				for m := range 6 { // as many as it takes
					select {
					case r.in <- m:
					case <-time.After(10 * time.Millisecond):
					}
				}
				time.Sleep(200 * time.Millisecond)
				ctx, cancel := context.WithTimeout(t.Context(), max(st.grace, time.Second))
				defer cancel()
				start := time.Now()
				reports, err := r.g.Close(ctx)
				if took := time.Since(start); took > max(st.grace, time.Second)+2*lastCall {
					t.Errorf("Close took %v", took)
				}
				rep := reports[0]
				if st.left >= 0 && len(rep.Left) != st.left {
					t.Errorf("left %+v", rep.Left)
				}
				if (err != nil) != (len(rep.Left) > 0) {
					t.Errorf("error %v with %d left", err, len(rep.Left))
				}
				if err := rep.Account.Check(); err != nil {
					t.Error(err)
				}
				r.port.mu.Lock()
				acked := len(r.port.acked)
				if got := uint64(acked); got != rep.Account.Acked+rep.Account.DeadLettered {
					t.Errorf("%d acks, account %+v", got, rep.Account)
				}
				r.port.mu.Unlock()
				time.Sleep(2 * time.Hour) // the hung ones come back
				synctest.Wait()
				if len(r.port.acked) != acked {
					t.Error("acked after Close")
				}
				if a := r.s.Account(); a.Check() != nil || a.Processing != 0 {
					t.Errorf("%+v", a)
				}
				select {
				case err := <-r.ended:
					if !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
				default:
					t.Error("Run has not returned")
				}
			})
		}
	}
}

// A revoked source waits a second for its handlers, and then cancels them, which is nobody's
// failure. It does not wait if their acks are lost.
func TestRevoke(t *testing.T) {
	for name, l := range map[string]Limits{"in time": {}, "in time, of a batch": {AckWait: time.Minute}} {
		bubble(t, name, func(t *testing.T) {
			g := Must(New(Config{}))
			s, err := Open(g, SourceConfig{Name: "s"}, l, &testPort{}, func(ctx context.Context, _ int) error {
				time.Sleep(revokedFor - time.Millisecond)
				return ctx.Err()
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 3)
			for m := range 3 {
				in <- m
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = s.Run(t.Context(), in)
			}()
			synctest.Wait()
			if rep := s.End(t.Context(), ReasonRebalance); rep.Account.Acked != 1 || !rep.Clean() {
				t.Errorf("%+v", rep)
			}
			<-ended
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	for name, c := range map[string]struct {
		why               Reason
		within, cancelled time.Duration
	}{
		"too long":    {ReasonRebalance, time.Minute, revokedFor},
		"little time": {ReasonRebalance, time.Second, time.Second / 2},
		"lost":        {ReasonLost, time.Minute, 0},
	} {
		bubble(t, name, func(t *testing.T) {
			var revoked time.Time
			r := newRig(t, Policy{}, Limits{}, func(_ *rig, ctx context.Context, m int) error {
				if m < 3 {
					return nil
				}
				<-ctx.Done()
				if d := time.Since(revoked); d != c.cancelled {
					t.Errorf("cancelled %v after the revoke", d)
				}
				if !errors.Is(context.Cause(ctx), errRevoked) {
					t.Errorf("cause %v", context.Cause(ctx))
				}
				return ctx.Err()
			})
			r.send(0, 4)
			synctest.Wait()
			revoked = time.Now()
			within, cancel := context.WithTimeout(t.Context(), c.within)
			defer cancel()
			rep := r.s.End(within, c.why)
			if rep.Account.Acked != 3 || rep.Account.Returned != 1 || !rep.Clean() {
				t.Errorf("%+v", rep)
			}
			if f := r.s.State().Tally.Failures; f != 0 {
				t.Errorf("%d failures", f)
			}
			r.close()
		})
	}
}

// Batches from a feed take the same way, and the account is exact in between.
func TestFeed(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		var down atomic.Bool
		var handled []int
		port := &testPort{}
		var s *Source[int]
		s, err = Open(g, SourceConfig{Name: "s"}, Limits{AckWait: time.Second}, port, func(_ context.Context, m int) error {
			if err := s.Account().Check(); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Millisecond)
			if down.Load() {
				return errDown
			}
			handled = append(handled, m)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() { ended <- s.RunFeed(t.Context()) }()
		feed := s.Feed()
		go func() {
			for i := range 3000 {
				if _, err := feed.Put(t.Context(), i); err != nil {
					t.Error(err)
				}
			}
			feed.Close()
		}()
		time.Sleep(time.Second)
		down.Store(true)
		time.Sleep(3 * time.Second)
		if err := s.Account().Check(); err != nil {
			t.Error(err)
		}
		down.Store(false)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if a := s.Account(); a.Acked != 3000 || a.Check() != nil {
			t.Errorf("%+v", a)
		}
		inOrder(t, handled, one)
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestOpenReportsEverything(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		p := &Policy{Workers: 4, Timeout: time.Hour, Window: 5000}
		_, err = Open(g, SourceConfig{Policy: p}, Limits{MaxUnacked: 1000, HoldMax: time.Minute, AckWait: time.Millisecond}, &testPort{}, func(context.Context, int) error { return nil })
		for _, want := range []string{"SourceConfig.Name", "Policy.Workers", "Policy.Window: 5000", "Policy.Timeout: 1h0m0s", "Limits.AckWait: 1ms"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q is missing in: %v", want, err)
			}
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What a handler has in hand is extended, wherever it came from.
func TestInHandIsExtended(t *testing.T) {
	for _, p := range []Policy{{}, {Order: OrderNone, Workers: 2}} {
		bubble(t, p.Order.String(), func(t *testing.T) {
			r := newRig(t, p, Limits{AckWait: time.Second}, func(*rig, context.Context, int) error {
				time.Sleep(5 * time.Second)
				return nil
			})
			r.send(0, 1)
			time.Sleep(4 * time.Second)
			r.port.mu.Lock()
			if n := r.port.extended; n < 10 {
				t.Errorf("extended %d times in 4s with an AckWait of 1s", n)
			}
			r.port.mu.Unlock()
			time.Sleep(2 * time.Second)
			r.close()
		})
	}
}

// An ack that the broker refuses is not a success of ours: it will come again.
func TestAckRefused(t *testing.T) {
	for _, p := range []Policy{{}, {Order: OrderNone, Workers: 2}} {
		bubble(t, p.Order.String(), func(t *testing.T) {
			r := newRig(t, p, Limits{}, ok)
			r.port.ackErr = errors.New("connection closed")
			r.send(0, 5)
			if a := r.check(); a.Acked != 0 || a.Returned != 5 || r.s.State().Tally.AckFailures != 5 {
				t.Errorf("%+v", a)
			}
			r.close()
		})
	}
}

// A failure at the last delivery that the broker grants counts as if the
// attempts were used up.
func TestLastDelivery(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{Order: OrderNone, Workers: 2}, Limits{MaxDeliver: 3}, func(_ *rig, _ context.Context, m int) error {
			if m == 5 {
				return errDown
			}
			return nil
		})
		r.port.delivery = 3
		for m := range 100 {
			r.send(m, m+1)
			time.Sleep(10 * time.Millisecond)
		}
		if a := r.check(); a.DeadLettered != 1 {
			t.Fatalf("%+v", a)
		}
		rec := r.letters.recs[0]
		if rec.Attempts < 2 || rec.Attempts != len(rec.History) || rec.Reason != "last-delivery" || rec.Deliveries != 3 {
			t.Errorf("%+v", rec)
		}
		// It dies at its second failure after another has succeeded: one does every 10ms.
		if first, last := rec.History[0].At, rec.History[len(rec.History)-1].At; rec.Attempts > 5 || last.Sub(first) < 10*time.Millisecond {
			t.Errorf("%d attempts: %+v", rec.Attempts, rec.History)
		}
		r.close()
	})
}
