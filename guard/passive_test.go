// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

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
		synctest.Wait() // it is noted that the second is out
		if a := s.Account(); a.Acked != 0 || a.Processing != 1 {
			t.Errorf("%+v", a)
		}
		if n := s.State().Tally.Retries; n != 0 {
			t.Errorf("%d retries before the second is done", n)
		}
		s.Done(second.Token, nil)
		if n := s.State().Tally.Retries; n != 1 {
			t.Errorf("%d retries", n)
		}
		if a := s.Account(); a.Acked != 1 || s.State().Tally.Stale != 1 {
			t.Errorf("%+v", a)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A message waits until the program has taken it.
func TestPassiveOfferedIsWaiting(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		at := func(what string, waiting, processing int, acked uint64) {
			t.Helper()
			synctest.Wait()
			a := s.Account()
			if a.Waiting != waiting || a.Processing != processing || a.Acked != acked || a.Check() != nil {
				t.Errorf("%s: %+v", what, a)
			}
		}
		for i := range 2 {
			if err := s.Offer(i); err != nil {
				t.Fatal(err)
			}
			if a := s.Account(); a.Waiting != i+1 || a.Processing != 0 {
				t.Errorf("offered: %+v", a)
			}
		}
		at("nobody has taken", 2, 0, 0)
		first := <-s.Ready()
		at("one is out", 1, 1, 0)
		s.Done(first.Token, nil)
		at("one is done", 1, 0, 1)
		s.Pause(time.Minute)
		synctest.Wait()
		if a := s.Account(); a.Held != 1 || a.Processing != 0 {
			t.Errorf("paused: %+v", a)
		}
		s.Resume()
		second := <-s.Ready()
		at("the second is out", 0, 1, 1)
		s.Done(second.Token, nil)
		at("all are done", 0, 0, 2)
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
		if b.State != breaker.HalfOpen || b.Generation != before.Generation || b.BackoffLevel != before.BackoffLevel || b.ProbesOut != 1 {
			t.Errorf("%+v, before %+v", b, before)
		}
		for _, s := range sources {
			s.mu.Lock()
			offered := uint64(0)
			s.c.items(func(it *item[int]) { offered += it.serial })
			s.mu.Unlock()
			if offered < 60 || offered > 300 {
				t.Errorf("%s took the slot %d times in 10m", s.Name(), offered)
			}
			if n := s.State().Tally.Probes; n != 0 {
				t.Errorf("%s: %d probes that nobody took", s.Name(), n)
			}
		}
		for i, s := range sources {
			item := <-s.Ready()
			time.Sleep(lease * 7 / 10)
			s.Done(item.Token, nil)
			if n := s.State().Tally.Probes; n != 1 {
				t.Errorf("%s: %d probes", s.Name(), n)
			}
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
		if n := s.State().Breaker.ProbesOut; n != 1 {
			t.Errorf("%d probes: %+v", n, s.Account())
		}
		s.Pause(0)
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
		s.Pause(0)
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

// With one message out at a time, the ack of the one before goes out although the next
// waits on Ready and nobody takes it.
func TestPassiveFlushesBeforeItWaits(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		port := &testPort{}
		s, err := Open(g, SourceConfig{Name: "s", Policy: &Policy{Workers: 1, Window: 4}}, Limits{}, port, nil)
		if err != nil {
			t.Fatal(err)
		}
		for m := range 4 {
			if err := s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		for acked := 1; acked <= 3; acked++ {
			item := <-s.Ready()
			synctest.Wait()
			port.mu.Lock()
			before := port.flushes
			port.mu.Unlock()
			s.Done(item.Token, nil)
			synctest.Wait()
			port.mu.Lock()
			if len(port.acked) != acked || port.flushes != before+1 {
				t.Errorf("%d acked, %d flushes more", len(port.acked), port.flushes-before)
			}
			port.mu.Unlock()
			if a := s.Account(); a.Waiting != 4-acked || a.Processing != 0 {
				t.Errorf("%+v", a)
			}
		}
		port.mu.Lock()
		if n := len(port.demands); n == 0 || port.demands[n-1] < 2 {
			t.Errorf("told %v", port.demands)
		}
		port.mu.Unlock()
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// One message is out at a time unless the policy asks for more: the order of the source
// outlives a retry.
func TestPassiveDefaultKeepsOrder(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{Policy: Policy{Retry: Retry{Base: time.Second, Max: time.Second}}})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if is := s.State().Settings; is.Order != OrderSource || is.Workers != 1 {
			t.Errorf("order %v, %d workers", is.Order, is.Workers)
		}
		for m := range 4 {
			if err := s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		var got []int
		for range 5 {
			it := <-s.Ready()
			got = append(got, it.Msg)
			synctest.Wait()
			select {
			case other := <-s.Ready():
				t.Errorf("%d is out beside %d", other.Msg, it.Msg)
			default:
			}
			var err error
			if it.Msg == 1 && it.Attempt == 1 {
				err = errors.New("not yet")
			}
			s.Done(it.Token, err)
		}
		if want := []int{0, 1, 1, 2, 3}; !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What State shows of a passive source may be given back with another window, which is
// no change of how many messages may be out.
func TestPassiveUpdate(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s", Policy: &Policy{Order: OrderNone, Workers: 3}}, Limits{}, &testPort{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, window := range []int{8, 3, 4096, 4096, 5} {
			p := s.State().Settings
			p.Window = window
			if err := s.Update(p); err != nil {
				t.Error(err)
			}
			if is := s.State().Settings; is.Window != window || is.Workers != 3 {
				t.Errorf("window %d, workers %d", is.Window, is.Workers)
			}
		}
		for what, p := range map[string]Policy{"Policy.Workers": {Order: OrderNone, Workers: 2}, "Policy.Order": {}} {
			if err := s.Update(p); err == nil || !strings.Contains(err.Error(), what) {
				t.Error(what, err)
			}
		}
		if err := s.Update(Policy{Order: OrderNone, Window: 6}); err != nil {
			t.Error(err)
		}
		for m := range 6 {
			if err := s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		for range 3 {
			<-s.Ready()
		}
		synctest.Wait()
		select {
		case <-s.Ready():
			t.Error("more than 3 are out")
		default:
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := g.Close(ctx); err == nil {
			t.Error("no word of what is out")
		}
	})
}

// A program that has several messages in hand may keep them for its batch: that is no slow
// call, and opens no breaker.
func TestPassiveBatchIsNotSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := Must(New(Config{}))
		s := Must(Open[int](g, SourceConfig{Name: "s", DeadLetters: &testWriter{}, Policy: &Policy{Workers: 10, Order: OrderNone}}, Limits{}, &testPort{}, nil))
		var have []Item[int]
		for m := range 6 {
			_ = s.Offer(m)
			have = append(have, <-s.Ready())
		}
		time.Sleep(2 * time.Minute)
		if st := s.State(); st.Breaker.State != breaker.Closed {
			t.Errorf("%+v", st.Breaker)
		}
		for _, it := range have {
			s.Done(it.Token, nil)
		}
		_ = s.Offer(6)
		s.Done((<-s.Ready()).Token, nil)
		time.Sleep(time.Second)
		if a := s.Account(); a.Acked != 7 {
			t.Errorf("%+v", a)
		}
		closeAll(t, g)
	})
}

// ahead is a message that its adapter takes off Ready before the program takes it.
type ahead struct{ at atomic.Pointer[time.Time] }

func (m *ahead) take() {
	now := time.Now()
	m.at.Store(&now)
}

type aheadPort struct{}

func (aheadPort) Lane(*ahead) uint64            { return 0 }
func (aheadPort) Size(*ahead) int               { return 1 }
func (aheadPort) Meta(*ahead) Meta              { return Meta{Lag: -1} }
func (aheadPort) Ack(*ahead) error              { return nil }
func (aheadPort) Extend([]*ahead)               {}
func (aheadPort) Return([]*ahead, Reason) error { return nil }
func (aheadPort) Demand(int)                    {}
func (aheadPort) Flush() error                  { return nil }
func (aheadPort) TakenAt(m *ahead) (at time.Time) {
	if p := m.at.Load(); p != nil {
		at = *p
	}
	return at
}

// A call begins when the program has the message, and not when its adapter has it.
func TestPassiveCallBeginsWithTheProgram(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const slow = 10 * time.Second
		g := Must(New(Config{Policy: Policy{Breaker: breaker.Config{MinSample: 1, Plain: true, Slow: slow}}}))
		s := Must(Open[*ahead](g, SourceConfig{Name: "s"}, Limits{}, aheadPort{}, nil))
		m := new(ahead)
		if err := s.Offer(m); err != nil {
			t.Fatal(err)
		}
		it := <-s.Ready()
		time.Sleep(10 * slow)
		if b := s.State().Breaker; b.State != breaker.Closed {
			t.Errorf("nobody has the message, and the breaker is %+v", b)
		}
		m.take()
		time.Sleep(slow - time.Second)
		if b := s.State().Breaker; b.State != breaker.Closed {
			t.Errorf("before the call is slow: %+v", b)
		}
		time.Sleep(2 * time.Second)
		if b := s.State().Breaker; b.State == breaker.Closed {
			t.Errorf("the call is slow: %+v", b)
		}
		s.Done(it.Token, nil)
		if a := s.Account(); a.Acked != 1 {
			t.Errorf("%+v", a)
		}
		closeAll(t, g)
	})
}

// A probe that its adapter has, and the program does not take, is no failure, and leaves its
// slot to another source of the scope.
func TestPassiveProbeThatOnlyTheAdapterHas(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const lease = 10 * time.Second
		g := Must(New(Config{Scope: ScopeGroup, Policy: Policy{Breaker: breaker.Config{Lease: lease, Base: time.Second, Probes: 1, Successes: 1}}}))
		var sources []*Source[*ahead]
		for _, name := range []string{"a", "b"} {
			sources = append(sources, Must(Open[*ahead](g, SourceConfig{Name: name}, Limits{}, aheadPort{}, nil)))
		}
		if err := sources[0].ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		var messages []*ahead
		var items []Item[*ahead]
		for _, s := range sources {
			messages = append(messages, new(ahead))
			if err := s.Offer(messages[len(messages)-1]); err != nil {
				t.Fatal(err)
			}
			select {
			case it := <-s.Ready():
				items = append(items, it)
			case <-time.After(lease):
				t.Fatalf("%s has no probe: %+v", s.Name(), s.State().Breaker)
			}
		}
		for i, s := range slices.Backward(sources) {
			messages[i].take()
			s.Done(items[i].Token, nil)
			if b := s.State().Breaker; b.State != breaker.Closed || s.Account().Acked != 1 {
				t.Errorf("%s: %+v, %+v", s.Name(), b, s.Account())
			}
		}
		closeAll(t, g)
	})
}

// A program that takes each message long after its adapter has it, such as one a batch, closes
// a breaker whose dependency is back.
func TestPassiveProbesThatAreTakenLate(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const lease = 10 * time.Second
		g := Must(New(Config{Policy: Policy{Breaker: breaker.Config{Lease: lease, Base: time.Second, Probes: 1, Successes: 1}}}))
		s := Must(Open[*ahead](g, SourceConfig{Name: "s"}, Limits{}, aheadPort{}, nil))
		if err := s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		const most = 5
		for range most {
			if err := s.Offer(new(ahead)); err != nil {
				t.Fatal(err)
			}
		}
		rounds := 0
		for ; rounds < most && s.State().Breaker.State != breaker.Closed; rounds++ {
			it := <-s.Ready()
			time.Sleep(lease/4 + time.Second)
			it.Msg.take()
			s.Done(it.Token, nil)
		}
		if b, a := s.State().Breaker, s.Account(); b.State != breaker.Closed || a.Acked != uint64(rounds) {
			t.Errorf("after %d calls that have succeeded: %+v, %+v", rounds, b, a)
		}
		closeAll(t, g)
	})
}

// A call whose message was taken late, and which fails, opens the breaker again.
func TestPassiveProbeThatIsTakenLateFails(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const lease = 10 * time.Second
		g := Must(New(Config{Policy: Policy{Breaker: breaker.Config{Lease: lease, Base: time.Second, Probes: 1, Successes: 1}}}))
		s := Must(Open[*ahead](g, SourceConfig{Name: "s"}, Limits{}, aheadPort{}, nil))
		if err := s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		if err := s.Offer(new(ahead)); err != nil {
			t.Fatal(err)
		}
		it := <-s.Ready()
		time.Sleep(lease/4 + time.Second)
		if b := s.State().Breaker; b.State != breaker.HalfOpen {
			t.Fatalf("%+v", b)
		}
		it.Msg.take()
		s.Done(it.Token, errDown)
		if b := s.State().Breaker; b.State != breaker.Open || b.Forced {
			t.Errorf("%+v", b)
		}
		closeAll(t, g)
	})
}
