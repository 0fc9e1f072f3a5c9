// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// Run is documented to be callable once; a second call is not refused: it gives handlers contexts that are over,

// or (after the end of the first one's context) takes a window of messages and handles none.
func TestRunTwice(t *testing.T) {
	bubble(t, "after the input's end", func(t *testing.T) {
		g, _ := New(Config{})
		var bad error
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, func(ctx context.Context, _ int) error {
			if err := ctx.Err(); err != nil {
				bad = err
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			in := make(chan int, 1)
			in <- 1
			close(in)
			err = s.Run(t.Context(), in)
		}
		if err == nil {
			t.Errorf("the second Run was not refused; a handler's context began as %v", bad)
		}
		_, _ = g.Close(t.Context())
	})
}

type nilErr struct{ err error }

func (e *nilErr) Error() string { return e.err.Error() }

func (e *nilErr) Unwrap() error { return e.err }

// The classic: a typed nil as error. It is non-nil, and its Unwrap panics in classify, under Source.mu.
func TestTypedNilError(t *testing.T) {
	if os.Getenv("ADVERSE_CHILD") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestTypedNilError$")
		cmd.Env = append(os.Environ(), "ADVERSE_CHILD=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			s := string(out)
			if i := strings.Index(s, "panic:"); i >= 0 {
				s = s[i:min(len(s), i+900)]
			}
			t.Errorf("the process died: %v\n%s", err, s)
		}
		return
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			var e *nilErr
			if m == 3 {
				return e
			}
			return nil
		})
		r.send(0, 10)
		time.Sleep(time.Minute)
		if a := r.check(); a.Acked != 9 || a.DeadLettered != 1 {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// ErrTimeout "is the cause of a handler context that passed Policy.Timeout": context.Cause does not say so.

// A panic is a failure, whatever its value: panic(Ignore(err)) acks the message.
func TestPanicWithIgnore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error { panic(Ignore(errDown)) })
		r.send(0, 1)
		time.Sleep(time.Second)
		if a := r.check(); a.Acked != 0 {
			t.Errorf("a message whose handler panicked was acked: %+v", a)
		}
		r.close()
	})
}

// An outage of 10 minutes with a small window, everything healthy: nothing is
// dead-lettered. A window of one message has no witness and costs one.
func TestOutageSmallWindow(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, window := range []int{1, 2, 3, 5, 8, 9, 10, 16} {
			t.Run(fmt.Sprint(order, window), func(t *testing.T) {
				s := newSim(t, Policy{Order: order, Window: window})
				to := s.now + 10*time.Minute
				s.runKeyed(to, 7, func(int) (time.Duration, error) { return time.Millisecond, errDown }, counter(5000, 2*time.Millisecond))
				if len(s.dead) > 1 || len(s.dead) == 1 && window > 1 {
					t.Errorf("%d healthy messages dead-lettered: %v", len(s.dead), s.dead)
				}
			})
		}
	}
}

// A slow source in an outage of 20 minutes, everything healthy: where a message comes
// within the patience of 10 s, no guess is made; where less comes, a handful.
func TestOutageIdleSource(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, every := range []time.Duration{3 * time.Second, 8 * time.Second, 15 * time.Second, time.Minute, 3 * time.Minute} {
			t.Run(fmt.Sprint(order, every), func(t *testing.T) {
				s := newSim(t, Policy{Order: order})
				s.runKeyed(s.now+20*time.Minute, 7, func(int) (time.Duration, error) { return time.Millisecond, errDown }, counter(5000, every))
				if len(s.dead) > 1 || len(s.dead) > 0 && every < 10*time.Second {
					t.Errorf("%d healthy messages dead-lettered: %v", len(s.dead), s.dead)
				}
			})
		}
	}
}

// pace is a limiter of one admission per period, no burst.
type pace struct{ every, next time.Duration }

func (p *pace) Admit(now time.Duration) time.Duration {
	if now < p.next {
		return p.next - now
	}
	p.next = now + p.every
	return 0
}

// A limiter that paces admissions refuses every witness: the round is rewound, the head takes the next admission, for ever.
func TestLimiterStarvesWitness(t *testing.T) {
	s := newSim(t, Policy{})
	s.limiter = &pace{every: 20 * time.Millisecond}
	calls := 0
	s.run(s.now+10*time.Minute, func(m int) (time.Duration, error) {
		if m == 10 {
			calls++
			return time.Millisecond, errors.New("bad")
		}
		return time.Millisecond, nil
	}, counter(200, time.Millisecond))
	if len(s.handled) != 199 || len(s.dead) != 1 {
		t.Errorf("after 10 minutes: handled %d, dead %v, %d calls of the poison, %+v", len(s.handled), s.dead, calls, s.account())
	}
}

// A round of witnesses that a pause cuts short loses the head's probe token: the breaker waits out its lease and counts a failure.
func TestPauseLosesProbeToken(t *testing.T) {
	s := newSim(t, Policy{})
	to := s.now + 3*time.Second
	for m := range 20 {
		s.put(s.now, m, 0, 1)
	}
	var witness bool
	for !witness && s.now < to+time.Minute {
		st := s.next(s.now)
		if st.kind != stepHandle {
			s.now += 5 * time.Millisecond
			continue
		}
		s.finish(st.it, errDown)
		for _, l := range s.lanes {
			witness = witness || s.round.on && l.turn > 0
		}
	}
	if !witness {
		t.Fatal("no witness round")
	}
	s.paused = true
	s.next(s.now)
	s.paused = false
	start := s.now
	for s.now < start+5*time.Minute {
		st := s.next(s.now)
		s.post()
		if st.kind == stepHandle {
			break
		}
		s.now += 5 * time.Millisecond
		s.scopes.Tick(s.now)
	}
	sn := s.gate.Breaker.Snapshot(s.now)
	if d := s.now - start; d > 32*time.Second || sn.Cause == "probe lost" {
		t.Errorf("the next probe came after %v; breaker %+v", d, sn)
	}
}

// Permanent after the attempts were used up: "no handler call is spent on looking" for a credit, but each new message spends one.
func TestPermanentIsNotCalledAgain(t *testing.T) {
	p := Policy{NoBreaker: true}
	p.Retry.Attempts = 1
	s := newSim(t, p)
	for s.budget.Spend(s.now, credit.Permanent) {
	}
	for s.budget.Spend(s.now, credit.Exhausted) {
	}
	calls, perm := 0, 0
	s.run(s.now+10*time.Second, func(m int) (time.Duration, error) {
		if m != 0 {
			return time.Millisecond, nil
		}
		calls++
		if calls == 1 {
			return time.Millisecond, errDown
		}
		perm++
		return time.Millisecond, Permanent(errDown)
	}, counter(100, 50*time.Millisecond))
	if perm > 1 {
		t.Errorf("called %d times after it was permanent", perm-1)
	}
}

// Backoff with a time that has passed (a server's Date behind ours) is a hot loop on the dependency.
func TestBackoffInThePast(t *testing.T) {
	s := newSim(t, Policy{})
	s.run(s.now+10*time.Second, func(int) (time.Duration, error) {
		return time.Millisecond, Backoff(errors.New("429"), s.origin)
	}, counter(10, time.Millisecond))
	if s.calls > 1000 {
		t.Errorf("%d calls in 10s", s.calls)
	}
}

// A partial outage, every call failing with probability p, independent of the message: nothing is poison.

// A witness on offer that nobody took is put back by a pause as a failure, with nothing ever called.
func TestPassiveUntakenWitnessIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := New(Config{})
		s, err := Open[int](g, SourceConfig{Name: "s", DeadLetters: &testWriter{}, Policy: &Policy{Order: OrderKey, Workers: 1, Retry: Retry{Attempts: 1}}}, Limits{}, &testPort{keys: 1}, nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Offer(0)
		_ = s.Offer(1)
		it := <-s.Ready()
		s.Done(it.Token, errDown)
		synctest.Wait() // message 1 is on offer as the witness
		s.Pause(0)
		synctest.Wait()
		if f := s.State().Tally.Failures; f != 1 {
			t.Errorf("%d failures of 1 attempt", f)
		}
		_, _ = g.Close(t.Context())
	})
}

// A message that waits on Ready for a reader is reported to the breaker as a slow call.
func TestPassiveUntakenIsNotSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := New(Config{})
		s, err := Open[int](g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Offer(0)
		time.Sleep(12 * time.Second)
		if b := s.State().Breaker; b.Failures != 0 {
			t.Errorf("the breaker counted %d failures, and no attempt was made", b.Failures)
		}
		it := <-s.Ready()
		s.Done(it.Token, nil)
		_, _ = g.Close(t.Context())
	})
}

// Two writers of one feed: one of them is never woken.
func twoSources(t *testing.T, p Policy, handler func(name string, m int) error) (g *Guard, src [2]*Source[int], in [2]chan int) {
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"a", "b"} {
		s, err := Open(g, SourceConfig{Name: name, Destination: "orders"}, Limits{}, &testPort{}, func(_ context.Context, m int) error { return handler(name, m) })
		if err != nil {
			t.Fatal(err)
		}
		src[i], in[i] = s, make(chan int)
		go func() { _ = s.Run(context.Background(), in[i]) }()
	}
	return g, src, in
}

// Two sources share a breaker (one destination, no partition). ForceClosed through one never wakes the other.
func TestForceClosedWakesSiblings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, src, in := twoSources(t, Policy{Window: 10}, func(string, int) error { return nil })
		_ = src[0].ForceOpen(0)
		for m := range 10 {
			in[1] <- m
		}
		time.Sleep(time.Second)
		_ = src[0].ForceClosed()
		time.Sleep(24 * time.Hour)
		if a := src[1].Account(); a.Acked != 10 {
			t.Errorf("a day after the breaker was closed: %+v, holds %+v", a, src[1].State().Holds)
		}
		_, _ = g.Close(t.Context())
	})
}

// The same with the breaker's own close: the sibling sleeps until the lease of a probe that has long returned.
func TestCloseWakesSiblings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		var closedAt, bDone atomic.Int64
		start := time.Now()
		g, src, in := twoSources(t, Policy{Window: 20, Ramp: Ramp{Off: true}}, func(name string, m int) error {
			time.Sleep(20 * time.Millisecond)
			if down.Load() {
				return errDown
			}
			if name == "b" && m == 19 {
				bDone.Store(int64(time.Since(start)))
			}
			return nil
		})
		down.Store(true)
		for m := range 20 {
			in[0] <- m
			in[1] <- m
		}
		time.Sleep(3 * time.Second)
		down.Store(false)
		for range 200_000 {
			time.Sleep(time.Millisecond)
			if closedAt.Load() == 0 && src[0].c.gate.Closed() {
				closedAt.Store(int64(time.Since(start)))
			}
			if bDone.Load() != 0 {
				break
			}
		}
		idle := time.Duration(bDone.Load() - closedAt.Load())
		if idle > 2*time.Second || idle < 0 {
			t.Errorf("b was done %v after the breaker closed (a %+v, b %+v)", idle, src[0].Account(), src[1].Account())
		}
		_, _ = g.Close(t.Context())
	})
}

// A source ends while its handler hangs in a probe: the sibling probes at once, and not when the probe's lease is over.
func TestEndOfAProbeWakesSiblings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down, hang atomic.Bool
		var handled atomic.Int64
		release := make(chan struct{})
		g, src, in := twoSources(t, Policy{Window: 20}, func(name string, _ int) error {
			switch {
			case name == "a" && hang.Load():
				<-release
			case down.Load():
				return errDown
			case name == "b":
				handled.Add(1)
			}
			return nil
		})
		down.Store(true)
		for m := range 10 {
			in[0] <- m
			in[1] <- m
		}
		time.Sleep(2 * time.Second)
		src[1].Pause(0)
		hang.Store(true)
		for src[0].Account().Processing == 0 {
			time.Sleep(time.Millisecond)
		}
		down.Store(false)
		src[1].Resume()
		time.Sleep(time.Second)
		if n := handled.Load(); n > 0 {
			t.Fatalf("%d handled beside a probe", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if rep := src[0].End(ctx, ReasonShutdown); len(rep.Left) != 1 {
			t.Errorf("%+v", rep)
		}
		time.Sleep(time.Second)
		if handled.Load() == 0 {
			t.Errorf("nothing handled 1s later: %+v", src[1].State().Holds)
		}
		close(release)
		_, _ = g.Close(t.Context())
	})
}

// slowAckPort acks after a while, as a DoubleAck over a network does.
type slowAckPort struct {
	testPort
	took time.Duration
}

func (p *slowAckPort) Ack(m int) error { time.Sleep(p.took); return p.testPort.Ack(m) }

// An Ack (or Flush) of more than 40 ms parks the sweeper; the next message does not kick it, and its timeout never comes.
func TestTimeoutAfterSlowAck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{Policy: Policy{Timeout: time.Second}})
		if err != nil {
			t.Fatal(err)
		}
		port := &slowAckPort{took: 100 * time.Millisecond}
		timedOut := false
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, port, func(ctx context.Context, m int) error {
			if m == 1 {
				select {
				case <-ctx.Done():
					timedOut = true
				case <-time.After(10 * time.Minute):
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int, 2)
		in <- 0
		in <- 1
		close(in)
		if err := s.Run(t.Context(), in); err != nil {
			t.Error(err)
		}
		if !timedOut {
			t.Error("a handler with a timeout of 1s was left alone for 10 minutes")
		}
		_, _ = g.Close(t.Context())
	})
}

// Healthy handlers that take 12 s (Timeout is 30 s, Breaker.Slow 10 s), several workers: the breaker opens and stays open.
func TestHealthySlowHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		r := newRig(t, Policy{Order: OrderNone, Workers: 8}, Limits{}, func(*rig, context.Context, int) error {
			time.Sleep(12 * time.Second)
			n.Add(1)
			return nil
		})
		go func() {
			for m := range 500 {
				select {
				case r.in <- m:
				case <-t.Context().Done():
					return
				}
			}
		}()
		time.Sleep(10 * time.Minute)
		if n.Load() < 200 {
			t.Errorf("%d messages of 400 possible handled in 10 minutes, none failed: %+v", n.Load(), r.s.State().Breaker)
		}
		r.close()
	})
}

// Healthy jobs that take longer than a probe's lease close their breaker all the same.
func TestLongJobsCloseTheirBreaker(t *testing.T) {
	if RaceEnabled {
		t.Skip("hours of virtual time: run without -race")
	}
	synctest.Test(t, func(t *testing.T) {
		p := Policy{Order: OrderNone, Workers: 8, Timeout: 5 * time.Minute, Breaker: breaker.Config{Window: 30 * time.Minute}}
		r := newRig(t, p, Limits{}, func(*rig, context.Context, int) error {
			time.Sleep(90 * time.Second)
			return nil
		})
		call, err := Protect(r.g, SourceConfig{Name: "f"}, func(context.Context, int) error {
			time.Sleep(90 * time.Second)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(r.s.ForceOpen(time.Second), call.ForceOpen(time.Second)); err != nil {
			t.Fatal(err)
		}
		r.send(0, 200)
		for range 20 {
			time.Sleep(time.Second)
			_ = call.Do(t.Context(), 1)
		}
		time.Sleep(time.Hour)
		if b, f := r.s.State().Breaker, call.State().Breaker; b.State != breaker.Closed || f.State != breaker.Closed {
			t.Errorf("%+v, %+v", b, f)
		}
		r.close()
	})
}

// ringErr is a chain of errors without an end, until it is cut.
type ringErr struct {
	walked atomic.Int64
	cut    atomic.Bool
}

func (*ringErr) Error() string { return "ring" }

func (e *ringErr) Unwrap() error {
	e.walked.Add(1)
	if e.cut.Load() {
		return nil
	}
	return e
}

// A chain of errors that has no end hangs whoever looks through it, but under no
// lock: it is a handler that does not return, and Close says so.
func TestEndlessErrorChain(t *testing.T) {
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	e := &ringErr{}
	s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, func(context.Context, int) error { return e })
	if err != nil {
		t.Fatal(err)
	}
	in, ended := make(chan int, 1), make(chan error, 1)
	in <- 1
	go func() { ended <- s.Run(t.Context(), in) }()
	for e.walked.Load() < 1000 {
		time.Sleep(time.Millisecond)
	}
	if a := s.Account(); a.Processing != 1 || a.Check() != nil {
		t.Errorf("%+v", a)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if reports, err := g.Close(ctx); err == nil || len(reports) != 1 || len(reports[0].Left) != 1 {
		t.Errorf("%v: %+v", err, reports)
	}
	e.cut.Store(true)
	if err := <-ended; !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// Sizes that are negative or near the end of int.
type oddPort struct {
	testPort
	size int
}

func (p *oddPort) Size(int) int { return p.size }

func TestOddSizes(t *testing.T) {
	for _, size := range []int{-1 << 62, -1, 0, 1<<63 - 1} {
		synctest.Test(t, func(t *testing.T) {
			g, _ := New(Config{Policy: Policy{Ramp: Ramp{Off: true}}})
			port := &oddPort{size: size}
			s, _ := Open(g, SourceConfig{Name: "s"}, Limits{}, port, func(context.Context, int) error { return nil })
			_ = s.ForceOpen(time.Second)
			in := make(chan int)
			ended := make(chan error, 1)
			go func() { ended <- s.Run(context.Background(), in) }()
			go func() {
				for m := range 20 {
					in <- m
				}
				close(in)
			}()
			time.Sleep(time.Minute)
			if a := s.Account(); a.Acked != 20 {
				t.Errorf("size %d: %+v, bytes %d", size, a, s.c.bytes)
			}
			_, _ = g.Close(t.Context())
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// What a Protect-ed function's Ignore says to the breaker: nothing, as in a source.
func TestFuncIgnoreIsNoSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := New(Config{})
		f, _ := Protect(g, SourceConfig{Name: "f"}, func(context.Context, int) error { return Ignore(errDown) })
		for range 10 {
			_ = f.Do(t.Context(), 1)
		}
		if b := f.State().Breaker; b.Successes != 0 {
			t.Errorf("%d successes", b.Successes)
		}
		_, _ = g.Close(t.Context())
	})
}

// everyOther refuses every other letter for a moment.
type everyOther struct{ refuse bool }

func (e *everyOther) Admit(time.Duration) time.Duration {
	if e.refuse = !e.refuse; e.refuse {
		return 100 * time.Millisecond
	}
	return 0
}

// A guess whose letter waits for the limit of dead letters is a guess: the next one waits
// longer.
func TestGuessesThatWaitForTheLimit(t *testing.T) {
	for _, limited := range []bool{false, true} {
		s := newSim(t, Policy{Order: OrderNone})
		if limited {
			s.letterPace = &everyOther{}
		}
		for m := range 12 {
			s.put(s.now, m, 0, 1)
		}
		s.run(s.now+20*time.Minute, func(int) (time.Duration, error) { return time.Millisecond, errDown }, nil)
		if n := len(s.dead); n < 1 || n > 6 {
			t.Errorf("limited %v: %d of 12 healthy messages are dead after 20 min of an outage, %d guesses", limited, n, s.guesses)
		}
	}
}
