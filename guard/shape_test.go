// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// rig is a source with everything around it, inside a bubble.
type rig struct {
	t       *testing.T
	g       *Guard
	s       *Source[int]
	port    *testPort
	letters *testWriter
	in      chan int
	ended   chan error
	cancel  context.CancelFunc

	mu      sync.Mutex
	calls   []int // every handler call
	handled []int // in order of success
}

func newRig(t *testing.T, p Policy, l Limits, handler func(r *rig, ctx context.Context, m int) error) *rig {
	t.Helper()
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, g: g, port: &testPort{keys: 8}, letters: &testWriter{}, in: make(chan int), ended: make(chan error, 1)}
	r.s, err = Open(g, SourceConfig{Name: "s", Destination: "t", DeadLetters: r.letters}, l, r.port, func(ctx context.Context, m int) error {
		r.mu.Lock()
		r.calls = append(r.calls, m)
		r.mu.Unlock()
		err := handler(r, ctx, m)
		if err == nil {
			r.mu.Lock()
			r.handled = append(r.handled, m)
			r.mu.Unlock()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.ended <- r.s.Run(ctx, r.in) }()
	return r
}

func (r *rig) send(from, to int) {
	for m := from; m < to; m++ {
		r.in <- m
	}
}

func (r *rig) check() Account {
	r.t.Helper()
	synctest.Wait()
	a := r.s.Account()
	if err := a.Check(); err != nil {
		r.t.Error(err)
	}
	return a
}

// close ends everything and checks that it ends clean.
func (r *rig) close() {
	r.t.Helper()
	if _, err := r.g.Close(r.t.Context()); err != nil {
		r.t.Error(err)
	}
	r.cancel()
	if err := <-r.ended; err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, context.Canceled) {
		r.t.Error(err)
	}
	if err := r.s.Account().Check(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) done() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.handled)
}

func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func ok(*rig, context.Context, int) error { return nil }

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
				if rec.Attempts < 5 || rec.Attempts > 7 || len(rec.History) != rec.Attempts || !strings.Contains(rec.Error.Message, k.text) {
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
		r.s.Pause()
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

// A dead-letter writer that is down settles nothing and loses nothing.
func TestWriterDown(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			if m == 2 {
				return Permanent(errors.New("bad"))
			}
			return nil
		})
		r.letters.err = errors.New("stream offline")
		r.send(0, 10)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 9 || a.Settling != 1 {
			t.Errorf("%+v", a)
		}
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonDLQ {
			t.Errorf("%+v", h)
		}
		if r.g.Ready() == nil {
			t.Error("ready although the writer fails")
		}
		r.letters.mu.Lock()
		r.letters.err = nil
		r.letters.mu.Unlock()
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 1 || r.g.Ready() != nil {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// The letter of a source that has ended says nothing about the writer, which
// still fails for another source, and takes its error with it as the last one.
func TestLetterOfAnEndedSource(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		letters := &downWriter{took: time.Second}
		var sources [2]*Source[int]
		for i := range sources {
			s, err := Open(g, SourceConfig{Name: strconv.Itoa(i), DeadLetters: letters}, Limits{}, &testPort{},
				func(context.Context, int) error { return Permanent(errDown) })
			if err != nil {
				t.Fatal(err)
			}
			sources[i] = s
			in := make(chan int, 3)
			for m := range cap(in) {
				in <- m
			}
			go func() { _ = s.Run(t.Context(), in) }() // until Close
		}
		end := func(s *Source[int]) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if rep := s.End(ctx, ReasonShutdown); len(rep.Left) == 0 {
				t.Errorf("%+v", rep)
			}
		}
		time.Sleep(time.Minute)
		end(sources[0])
		for range 1200 {
			if time.Sleep(100 * time.Millisecond); g.Ready() == nil {
				t.Fatal("ready although the writer fails")
			}
		}
		end(sources[1])
		time.Sleep(time.Minute)
		if err := g.Ready(); err != nil {
			t.Errorf("nothing waits for the writer: %v", err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// downWriter fails slowly.
type downWriter struct{ took time.Duration }

func (w *downWriter) Write(context.Context, *dlq.Record) error {
	time.Sleep(w.took)
	return errDown
}

// Letters that the writer puts off are no failure of it: the Guard is ready, the
// source says why they wait, other letters are written without a pause, and these
// once they are taken. A failure before it, of the same letter, is over.
func TestLetterPutOff(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			if m >= 2 {
				return Permanent(errors.New("bad"))
			}
			return nil
		})
		full, offers, written := errors.New("no room"), 0, make(map[string]time.Time)
		taken := false
		r.letters.says = func(rec *dlq.Record) error {
			switch n, _ := strconv.Atoi(string(rec.Body)); {
			case n < 12 && !taken:
				if offers++; offers == 1 {
					return errDown
				}
				return fmt.Errorf("%w: %w", dlq.ErrPutOff, full)
			case n == 20:
				time.Sleep(10 * time.Second)
			}
			written[string(rec.Body)] = time.Now()
			return nil
		}
		r.send(0, 12)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 2 || a.Settling != 10 {
			t.Errorf("%+v", a)
		}
		if err := r.g.Ready(); err != nil {
			t.Errorf("a writer that puts letters off is not ready: %v", err)
		}
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonDLQ || !strings.Contains(h[0].Detail, "10 dead letters are put off: dlq: record put off: no room") {
			t.Errorf("%+v", h)
		}
		if offers < 300 || offers > 2400 {
			t.Errorf("%d offers of 10 letters in a minute", offers)
		}
		begun := time.Now()
		r.send(12, 20)
		time.Sleep(time.Minute)
		r.check()
		for m := 12; m < 20; m++ {
			if at, ok := written[strconv.Itoa(m)]; !ok || at.Sub(begun) > putOffMax {
				t.Errorf("letter %d was written after %s", m, at.Sub(begun))
			}
		}
		r.letters.mu.Lock()
		taken = true
		r.letters.mu.Unlock()
		time.Sleep(2 * putOffMax)
		if a := r.check(); a.DeadLettered != 18 {
			t.Errorf("%+v", a)
		}
		r.send(20, 21)
		time.Sleep(time.Second)
		if a := r.check(); a.Settling != 1 || len(r.s.State().Holds) > 0 {
			t.Errorf("%+v: %+v", a, r.s.State().Holds)
		}
		time.Sleep(10 * time.Second)
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
		busy.at = &r.s.mu // all others rest
		if h := r.s.State().Holds; len(h) != 1 || h[0].Reason != ReasonBackpressure || h[0].Detail != "asked for time: 429 too many requests" {
			t.Errorf("%+v", h)
		}
		if busy.locked {
			t.Error("the error's method is called under the source's lock")
		}
		r.close()
	})
}

// lookingError tells whether a lock is held when its method is called.
type lookingError struct {
	text   string
	at     *sync.Mutex
	locked bool
}

func (e *lookingError) Error() string {
	if e.at != nil {
		if e.at.TryLock() {
			e.at.Unlock()
		} else {
			e.locked = true
		}
	}
	return e.text
}

// A spent budget keeps what would be dead-lettered, until an operator's grant.
func TestBudgetSpentWaitsForGrant(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p := Policy{}
		p.Budget.PermanentBalance = 2
		p.Budget.FreeEvery = 1000 * time.Hour
		r := newRig(t, p, Limits{}, func(*rig, context.Context, int) error { return Permanent(errors.New("bad")) })
		r.send(0, 5)
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 2 || a.Unsettled() != 3 {
			t.Errorf("%+v", a)
		}
		if h := r.s.State().Holds; len(h) == 0 || h[0].Reason != ReasonDLQ {
			t.Errorf("%+v", h)
		}
		r.s.GrantCredits(3)
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 5 {
			t.Errorf("%+v", a)
		}
		if n := len(r.calls); n != 5 {
			t.Errorf("%d handler calls for 5 permanent failures", n)
		}
		r.close()
	})
}

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
		"paused":    {handler: ok, before: func(r *rig) { r.s.Pause() }},
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

// A revoked source cancels its handlers, which is nobody's failure.
func TestRevoke(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, ctx context.Context, m int) error {
			if m < 3 {
				return nil
			}
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), ErrRevoked) {
				t.Errorf("cause %v", context.Cause(ctx))
			}
			return ctx.Err()
		})
		r.send(0, 4)
		synctest.Wait()
		rep := r.s.End(t.Context(), ReasonRebalance)
		if rep.Account.Acked != 3 || rep.Account.Returned != 1 || !rep.Clean() {
			t.Errorf("%+v", rep)
		}
		if f := r.s.State().Tally.Failures; f != 0 {
			t.Errorf("%d failures", f)
		}
		r.close()
	})
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

// The passive shape: the user's loop settles, the guard decides.
func TestPassive(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		port, letters := &testPort{}, &testWriter{}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, port, nil)
		if err != nil {
			t.Fatal(err)
		}
		tries := map[int]int{}
		var user sync.WaitGroup
		user.Go(func() {
			for item := range s.Ready() {
				tries[item.Msg]++
				if item.Attempt != tries[item.Msg] {
					t.Errorf("message %d: attempt %d, tried %d times", item.Msg, item.Attempt, tries[item.Msg])
				}
				var err error
				if item.Msg == 3 {
					err = errors.New("bad")
				}
				s.Done(item.Token, err)
				s.Done(item.Token, nil) // late and twice
			}
		})
		for i := range 50 {
			if err := s.Offer(i); err != nil {
				t.Error(i, err)
			}
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		a := s.Account()
		if a.Acked != 49 || a.DeadLettered != 1 || a.Check() != nil {
			t.Errorf("%+v\n%+v", a, s.State())
		}
		if tries[3] < 5 || tries[3] > 7 {
			t.Errorf("%d tries", tries[3])
		}
		if stale := s.State().Tally.Stale; stale != uint64(49+tries[3]) {
			t.Errorf("%d stale Done calls", stale)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		user.Wait()
		if err := s.Offer(99); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

func TestUpdate(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, ok)
		if err := r.s.Update(Policy{Timeout: time.Second, Window: 7}); err != nil {
			t.Error(err)
		}
		if st := r.s.State(); st.Settings.Timeout != time.Second || st.Window != 7 {
			t.Errorf("%+v", st.Settings)
		}
		for _, p := range []Policy{{NoTimeout: true}, {Timeout: time.Minute}} {
			if err := r.s.Update(p); err != nil {
				t.Error(err)
			}
			again := r.s.State().Settings
			again.Window = 9
			if err := r.s.Update(again); err != nil {
				t.Error(err)
			}
			if is := r.s.State().Settings; is.Timeout != p.Timeout || is.NoTimeout != p.NoTimeout || is.Window != 9 {
				t.Errorf("%+v", is)
			}
		}
		err := r.s.Update(Policy{Order: OrderKey, Window: -1})
		if err == nil || !strings.Contains(err.Error(), "Policy.Order") || !strings.Contains(err.Error(), "Policy.Window: -1") {
			t.Error(err)
		}
		r.close()
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
		// It dies at its first failure after another has succeeded: one does every 10ms.
		for i, f := range rec.History[1:] {
			if alive := f.At.UnixMilli()/10 > rec.History[i].At.UnixMilli()/10; alive != (i+2 == rec.Attempts) {
				t.Errorf("attempt %d of %+v", i+2, rec.History)
			}
		}
		r.close()
	})
}

// A Done for an attempt that was already answered does nothing, though the
// message is out again.
func TestPassiveStaleAttempt(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Offer(1); err != nil {
			t.Fatal(err)
		}
		first := <-s.Ready()
		s.Done(first.Token, errDown)
		second := <-s.Ready()
		s.Done(first.Token, nil)
		if a := s.Account(); a.Acked != 0 || a.Processing != 1 {
			t.Errorf("%+v", a)
		}
		s.Done(second.Token, nil)
		if a := s.Account(); a.Acked != 1 || s.State().Tally.Stale != 1 {
			t.Errorf("%+v", a)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A probe that nobody takes off Ready has not failed, however long; who takes it at
// last has a live one. Two sources of a scope take turns at its slot.
func TestPassiveProbeThatNobodyTakes(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const lease = 10 * time.Second
		g, err := New(Config{Scope: ScopeGroup, Policy: Policy{Breaker: breaker.Config{Lease: lease, Base: time.Second, Probes: 1, Successes: 2}}})
		if err != nil {
			t.Fatal(err)
		}
		var sources []*Source[int]
		for _, name := range []string{"a", "b"} {
			s, err := Open(g, SourceConfig{Name: name}, Limits{}, &testPort{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			sources = append(sources, s)
		}
		if err := sources[0].ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		for _, s := range sources {
			if err := s.Offer(1); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * time.Second)
		before := sources[0].State().Breaker
		time.Sleep(10 * time.Minute) // nobody reads Ready
		b := sources[0].State().Breaker
		if b.State != breaker.HalfOpen || b.Generation != before.Generation || b.Rung != before.Rung || b.ProbesOut != 1 {
			t.Errorf("%+v, before %+v", b, before)
		}
		for _, s := range sources {
			if n := s.State().Tally.Probes; n < 60 || n > 300 {
				t.Errorf("%s took the slot %d times in 10m", s.Name(), n)
			}
		}
		for i, s := range sources {
			item := <-s.Ready()
			time.Sleep(lease * 7 / 10)
			s.Done(item.Token, nil)
			if b := s.State().Breaker; s.Account().Acked != 1 || i == 0 && b.ProbesPassed != 1 || i == 1 && b.State != breaker.Closed {
				t.Errorf("%s: %+v", s.Name(), b)
			}
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A probe on Ready is taken back when the breaker closes or the operator pauses.
func TestPassiveProbeIsOver(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		if err := s.Offer(1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		if a := s.Account(); a.Processing != 1 {
			t.Errorf("no probe: %+v", a)
		}
		s.Pause()
		time.Sleep(time.Second)
		if a := s.Account(); a.Processing != 0 || s.State().Breaker.ProbesOut != 0 {
			t.Errorf("paused: %+v", a)
		}
		s.Resume()
		time.Sleep(time.Second)
		if s.State().Breaker.ProbesOut != 1 {
			t.Errorf("no probe again: %+v", s.State())
		}
		if err := s.ForceClosed(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		item := <-s.Ready()
		s.Done(item.Token, errDown)
		if b := s.State().Breaker; b.Failures != 1 {
			t.Errorf("its token was a probe's of before: %+v", b)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// While a drain ramps up, what waits on Ready stays there: each nudge would cost a
// limiter's token and a step of the ramp.
func TestPassiveDrainKeepsItsTokens(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		lim := &strict{}
		lim.open.Store(true)
		s, err := Open(g, SourceConfig{Name: "s", Limiter: lim}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		s.Pause()
		if err := s.Offer(0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		s.Resume()
		for i := range 100 {
			time.Sleep(time.Millisecond)
			if err := s.Offer(i + 1); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if n := lim.asked.Load(); n != 1 || len(s.State().Holds) == 0 {
			t.Errorf("%d tokens for one item, %+v", n, s.State().Holds)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A feed that has become smaller keeps what it has and takes no more; one that has
// become larger takes more at once.
func TestUpdateOfTheFeed(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{Policy: Policy{Window: 16}})
		if err != nil {
			t.Fatal(err)
		}
		port := &testPort{}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, port, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		feed := s.Feed()
		put := func(ctx context.Context, ms ...int) {
			t.Helper()
			if n, err := feed.Put(ctx, ms...); n != len(ms) || err != nil {
				t.Error(n, err)
			}
		}
		put(t.Context(), 0, 1, 2, 3)
		if err := s.Update(Policy{Window: 8}); err != nil {
			t.Error(err)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if n, err := feed.Put(over, 4); n != 0 || !errors.Is(err, context.Canceled) || feed.Len() != 4 {
			t.Error(n, err, feed.Len())
		}
		late, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var reader sync.WaitGroup
		reader.Go(func() { put(late, 4, 5) })
		synctest.Wait()
		if err := s.Update(Policy{Window: 24}); err != nil {
			t.Error(err)
		}
		reader.Wait()
		if _, err := g.Close(t.Context()); err != nil || !slices.Equal(port.returned, []int{0, 1, 2, 3, 4, 5}) {
			t.Error(port.returned, err)
		}
	})
}

// The window may change while a source runs: all of its parts change with it, up
// and down, so that its bound holds and every worker has something to do.
func TestUpdateOfTheWindow(t *testing.T) {
	for _, fed := range []bool{true, false} {
		bubble(t, "fed="+strconv.FormatBool(fed), func(t *testing.T) {
			const workers = 8
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			policy := Policy{Order: OrderKey, Workers: workers, Window: 1024, Ramp: Ramp{Off: true}}
			var busy, most atomic.Int64
			s, err := Open(g, SourceConfig{Name: "s", Policy: &policy}, Limits{AckWait: time.Minute}, &testPort{keys: 1000}, func(context.Context, int) error {
				most.Store(max(most.Load(), busy.Add(1)))
				defer busy.Add(-1)
				time.Sleep(10 * time.Millisecond)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			in := make(chan int)
			var feed *Feed[int]
			if fed {
				feed = s.Feed()
				go func() { ended <- s.RunFeed(t.Context()) }()
			} else {
				go func() { ended <- s.Run(t.Context(), in) }()
			}
			stop, put := make(chan struct{}), 0
			var reader sync.WaitGroup
			reader.Go(func() {
				for ; ; put++ {
					if fed {
						select {
						case <-stop:
							feed.Close()
							return
						default:
						}
						if _, err := feed.Put(t.Context(), put); err != nil {
							t.Error(err)
							return
						}
						continue
					}
					select {
					case in <- put:
					case <-stop:
						close(in)
						return
					}
				}
			})
			for _, window := range []int{1024, 512, 64, 2048, 16, 1024} {
				s.Pause()
				time.Sleep(time.Second)
				before := s.Account()
				policy.Window = window
				if err := s.Update(policy); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Second)
				full := s.Account()
				// One buffer of the feed, or the batch, may be empty while it holds.
				if n := full.Unsettled(); n < window*2/3 || n > max(window, before.Unsettled()) {
					t.Errorf("window %d: %d messages fill it", window, n)
				}
				s.Resume()
				time.Sleep(5 * time.Second)
				most.Store(0)
				for range 200 {
					time.Sleep(time.Millisecond)
					a := s.Account()
					if err := a.Check(); err != nil || a.Unsettled() > window {
						t.Errorf("window %d: %d unsettled, %v", window, a.Unsettled(), err)
						break
					}
				}
				if n := most.Load(); n != workers {
					t.Errorf("window %d: %d workers were busy", window, n)
				}
			}
			close(stop)
			if err := <-ended; err != nil {
				t.Error(err)
			}
			reader.Wait()
			if a := s.Account(); a.Acked != uint64(put) || a.Check() != nil {
				t.Errorf("%d put, %+v", put, a)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
