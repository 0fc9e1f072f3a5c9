// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// A turn whose process has lost what it wanted to probe with passes on: its source
// is paused just then.
func TestFleetPermitWithNothingWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, ss := heldFleet(t, 500)
		for i := range 40 { // somewhere in here it is the one whose turn it is
			s := ss[i%2]
			time.Sleep(700 * time.Millisecond)
			s.Pause(0)
			time.Sleep(700 * time.Millisecond)
			s.Resume()
			r.check()
		}
		ss[0].Pause(0)
		ss[1].Pause(0)
		r.down.Store(false)
		r.until(90*time.Second, "the third closes it for all", func() bool { return ss[2].State().Breaker.State == breaker.Closed })
		r.until(10*time.Second, "every breaker is closed", r.closed)
		ss[0].Resume()
		ss[1].Resume()
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 500 })
		r.handled("orders", 500, false)
	})
}

// While nobody has a message nobody probes, and the first that comes anywhere
// does.
func TestFleetNothingWaitsAnywhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, ss := heldFleet(t, 100) // half of them fail: enough that two processes get some
		for _, s := range ss {
			s.Pause(0)
		}
		time.Sleep(5 * time.Minute)
		at := r.now()
		time.Sleep(time.Minute)
		if n := len(r.since(at)); n > 0 {
			t.Errorf("%d calls while all are paused", n)
		}
		r.down.Store(false)
		ss[0].end(t)
		ss[2].end(t)
		ss[1].Resume()
		for n := range uint64(60) { // enough for it to have ten
			r.broker.Publish("orders", guardtest.Message{Body: guardtest.Body(101+n, 0)})
		}
		took := r.until(time.Minute, "every breaker is closed", r.closed)
		if took > 40*time.Second {
			t.Errorf("it took %v", took)
		}
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 160 })
	})
}

// A source that ends and is opened again in the same process, again and again
// while the fleet changes its mind, is never held by an action that was meant for
// an earlier epoch.
func TestFleetReopenedSourcesAreNotHeldForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := heldFleet(t, 1500)
		for i := range 60 {
			r.down.Store(i%20 < 10)
			k := i % 3
			ss[k].end(t)
			time.Sleep(time.Duration(i%7) * 13 * time.Millisecond)
			ss[k] = ps[k].open("orders", "")
			time.Sleep(time.Duration(i%5) * 171 * time.Millisecond)
			r.check()
		}
		r.down.Store(false)
		r.until(2*time.Minute, "every breaker is closed", r.closed)
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 1500 })
	})
}

// A prober that dies with its probe out does not keep the others: they pass its
// turn on.
func TestFleetProberDies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := heldFleet(t, 300)
		r.until(time.Minute, "somebody probes", func() bool {
			for i, p := range ps {
				if s, _ := p.scope("g/orders"); s.Probing {
					p.crash()
					ss[i].end(t)
					return true
				}
			}
			return false
		})
		r.down.Store(false)
		r.until(2*time.Minute, "every breaker is closed", r.closed)
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 300 })
	})
}

// A handler that takes almost its Timeout is well, and its probes close the scope:
// by default a probe may be out for longer than a call may be slow.
func TestFleetClosesForASlowHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, _ := heldFleet(t, 200)
		r.slow.Store(true)
		r.down.Store(false)
		r.until(10*time.Minute, "every breaker is closed", r.closed)
		r.slow.Store(false)
		r.until(5*time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 200 })
	})
}

// The only process with messages has a poison message at its head: the fleet does
// not stay open for it.
func TestFleetPoisonHead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		ps := r.startAll()
		ss := openAll(ps)
		r.feed("orders", 300, 10*time.Millisecond)
		time.Sleep(time.Second)
		r.down.Store(true)
		r.until(30*time.Second, "the fleet opens", func() bool { return ss[0].held() && ss[1].held() && ss[2].held() })
		time.Sleep(2 * time.Second)
		ss[1].end(t)
		ss[2].end(t)
		r.mu.Lock()
		r.bad = r.calls[len(r.calls)-1].number // what was tried last fails for ever
		r.mu.Unlock()
		r.down.Store(false)
		r.until(5*time.Minute, "every breaker is closed", r.closed)
		r.until(5*time.Minute, "all is settled", func() bool { return r.broker.Stats("orders").Acked == 300 })
		if n := r.broker.DeadLetters("orders").Len(); n > 1 {
			t.Errorf("%d dead letters of one poison message", n)
		}
	})
}

// A function under the fleet's hold is refused, with an honest time to come back,
// and its next call probes when it is its turn.
func TestFleetHoldsAFunction(t *testing.T) {
	for _, c := range []struct{ every, closes time.Duration }{
		{50 * time.Millisecond, time.Minute},
		{5 * time.Second, 4 * time.Minute},
		{2 * time.Minute, 40 * time.Minute}, // a job that runs now and then
	} {
		if guard.RaceEnabled && c.every > time.Minute { // half an hour of three processes' time
			continue
		}
		t.Run(c.every.String(), func(t *testing.T) { heldFunction(t, c.every, c.closes) })
	}
}

func heldFunction(t *testing.T, seldom, closes time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		every := 50 * time.Millisecond
		r := newFleetRig(t, "a", "b", "c")
		ps := r.startAll()
		var fs []*guard.Func[int]
		for _, p := range ps {
			f, err := guard.Protect(p.guard, guard.SourceConfig{Name: "charge", Policy: &guard.Policy{Retry: guard.Retry{Attempts: 1}}}, func(context.Context, int) error {
				if r.down.Load() {
					return errFleetDown
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			fs = append(fs, f)
		}
		call := func() (held *guard.HeldError) {
			for _, f := range fs {
				if err := f.Do(t.Context(), 0); err != nil {
					errors.As(err, &held)
				}
			}
			time.Sleep(every)
			return held
		}
		r.down.Store(true)
		r.until(30*time.Second, "the fleet opens", func() bool { _ = call(); return fs[0].State().Breaker.Held && fs[1].State().Breaker.Held })
		for range 200 {
			if h := call(); h == nil || h.Until > time.Hour {
				t.Fatalf("refused with %+v", h)
			}
		}
		r.down.Store(false)
		every = seldom
		r.until(closes, "every breaker is closed", func() bool { _ = call(); return r.closed() })
		if h := call(); h != nil {
			t.Errorf("refused with %+v", h)
		}
	})
}

// Where calls may take longer than the lease of a fleet's probe, no probe could pass: the breaker
// goes by itself, loudly.
func TestFleetHasNoPartInLongCalls(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		r.cfg.Policy.Retry.Attempts = 1
		r.cfg.Policy.Breaker.Window, r.cfg.Policy.Timeout = 10*time.Minute, 2*time.Minute
		var fs []*guard.Func[int]
		for _, p := range r.startAll() {
			f, err := guard.Protect(p.guard, guard.SourceConfig{Name: "report"}, func(context.Context, int) error {
				time.Sleep(time.Minute)
				if r.down.Load() {
					return errFleetDown
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			fs = append(fs, f)
		}
		call := func() (failed int) {
			errs := make(chan error, len(fs))
			for _, f := range fs {
				go func() { errs <- f.Do(t.Context(), 0) }()
			}
			for range fs {
				if <-errs != nil {
					failed++
				}
			}
			return failed
		}
		r.down.Store(true)
		for range 60 {
			_ = call()
		}
		r.down.Store(false)
		r.until(20*time.Minute, "every call succeeds", func() bool { return call() == 0 })
	})
	if want := "FleetConfig.Lease: 45s is not in [2m0s, 1h]"; !strings.Contains(log.String(), want) {
		t.Errorf("no %q in\n%s", want, &log)
	}
}

// A fleet has one driver. What it asks for after that one is gone harms nobody.
func TestFleetHasOneDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		self := crdt.Replica{Name: "a", Incarnation: 1}
		v, err := fleetstate.NewVerdicts(0, fleetstate.Config{}, self, fleetstate.Roster{Number: 1, Names: []string{"a", "b"}})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		m := fleetstate.NewMember(func() time.Duration { return time.Since(began) }, v, nil)
		g, err := guard.New(guard.Config{}, guard.WithFleet(m))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := guard.New(guard.Config{}, guard.WithFleet(m)); !errors.Is(err, fleetstate.ErrAttached) {
			t.Errorf("a second driver: %v", err)
		}
		e, err := guardtest.NewBroker().Consume(t.Context(), "s", guardtest.ConsumerConfig{})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		s, err := guard.Open(g, guard.SourceConfig{Name: "s"}, guard.Limits{}, e.Port(), func(context.Context, *guardtest.Message) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Scopes()) != 1 || !m.Scopes()[0].Held {
			t.Errorf("%+v", m.Scopes())
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if n := len(m.Scopes()); n != 0 {
			t.Errorf("%d scopes after Close", n)
		}
		if b := s.State().Breaker; b.Held {
			t.Errorf("held after its end: %+v", b)
		}
		m.Step(time.Hour, nil)
		time.Sleep(time.Hour)
		m.Step(2*time.Hour, nil)
		if g, err = guard.New(guard.Config{}, guard.WithFleet(m)); err != nil {
			t.Errorf("the next driver: %v", err)
		} else if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A name that cannot travel leaves its breaker to itself.
func TestFleetScopeThatCannotBeShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		p := r.start("a")
		topic := fmt.Sprintf("%0260d", 0)
		r.feed(topic, 50, 5*time.Millisecond)
		s := p.open(topic, "")
		r.until(5*time.Second, "all is handled", func() bool { return r.broker.Stats(topic).Acked == 50 })
		if st := s.State(); st.Breaker.Held || st.Tally.Probes > 0 {
			t.Errorf("%+v", st.Breaker)
		}
		s.end(t)
	})
}

// Whatever comes together (cuts, loss, revokes, crashes of the dependency, pauses,
// forces), when it is over every breaker closes and every message is handled.
func TestFleetComesBack(t *testing.T) {
	seeds := uint64(6)
	if guard.RaceEnabled {
		seeds = 2
	}
	if os.Getenv("STORMGUARD_FULL") != "" {
		if seeds = 600; guard.RaceEnabled {
			seeds = 10 // ten seconds of a processor each
		}
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				names := []string{"a", "b", "c", "d", "e"}
				r := newFleetRig(t, names...)
				r.rng = rand.New(rand.NewPCG(seed, 7))
				r.loss = 0.25
				ps := r.startAll()
				const parts, n = 8, 300
				ss := make([]*fleetSource, parts)
				for i := range parts {
					r.feed(fmt.Sprintf("orders/%d", i), n, 100*time.Millisecond)
					ss[i] = ps[i%len(ps)].open("orders", fmt.Sprint(i))
				}
				pick := func(n int) int {
					r.mu.Lock()
					defer r.mu.Unlock()
					return r.rng.IntN(n)
				}
				for range 80 {
					i := pick(parts)
					switch pick(9) {
					case 0, 1:
						r.turn(&r.down)
					case 2, 3:
						ss[i].end(t)
						time.Sleep(time.Duration(pick(300)) * time.Millisecond)
						ss[i] = ps[pick(len(ps))].open("orders", fmt.Sprint(i))
					case 4:
						r.turn(&ps[pick(len(ps))].broken)
					case 5:
						islands := make(map[string]int)
						for _, name := range names {
							islands[name] = pick(1 + pick(3))
						}
						r.split(islands)
					case 6:
						ss[i].Pause(0)
						time.Sleep(time.Duration(pick(3000)) * time.Millisecond)
						ss[i].Resume()
					case 7:
						if err := ss[i].ForceOpen(time.Duration(1+pick(20)) * time.Second); err != nil {
							t.Fatal(err)
						}
					case 8:
						if err := ss[i].ForceClosed(); err != nil {
							t.Fatal(err)
						}
					}
					time.Sleep(time.Duration(pick(2500)) * time.Millisecond)
					r.check()
				}
				r.split(nil)
				for _, b := range breaks(r, ps) {
					if b.Load() {
						r.turn(b)
					}
				}
				total := [parts]uint64{}
				for i := range parts {
					total[i] = n
				}
				settled := func() bool {
					for i := range parts {
						if r.broker.Stats(fmt.Sprintf("orders/%d", i)).Acked < total[i] {
							return false
						}
					}
					return true
				}
				// What is idle stays as it is, so there is always something to probe with.
				took := r.until(3*time.Minute, "every breaker is closed", func() bool {
					for i := range parts {
						total[i]++
						r.broker.Publish(fmt.Sprintf("orders/%d", i), guardtest.Message{Body: guardtest.Body(total[i], 0)})
					}
					return r.closed()
				})
				r.until(5*time.Minute, "all is handled", settled)
				t.Logf("closed after %v, %d calls", took, len(r.since(0)))
				for i := range parts {
					queue := fmt.Sprintf("orders/%d", i)
					dead := make(map[uint64]bool)
					for _, d := range r.broker.DeadLetters(queue).Records() {
						number := guardtest.Number(d.Body)
						dead[number] = true
						if why := r.condemned(queue, &d, n); why != "" {
							t.Errorf("%s: message %d is a dead letter: %s\n%s", queue, number, why, r.before(&d))
						}
					}
					for _, c := range r.since(0) {
						if c.ok && c.queue == queue {
							dead[c.number] = true
						}
					}
					if uint64(len(dead)) != total[i] {
						t.Errorf("%s: %d of %d messages are handled or dead letters", queue, len(dead), total[i])
					}
				}
			})
		})
	}
}

// breaks is what can be broken: the dependency, and each process's way to it.
func breaks(r *fleetRig, ps []*party) []*atomic.Bool {
	all := []*atomic.Bool{&r.down}
	for _, p := range ps {
		all = append(all, &p.broken)
	}
	return all
}

// turn breaks what is whole and the other way round, and remembers when it became
// whole.
func (r *fleetRig) turn(b *atomic.Bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b.Store(!b.Load())
	if !b.Load() {
		r.whole = append(r.whole, r.now())
	}
}

// condemned says what is wrong about a healthy message's dead letter, if anything. A
// dependency that comes and goes may cost one (docs/design.md), but only after a proof
// of life: another message succeeded after it had failed, and it failed twice more. Or
// it was one of the last that were fed, and so a guess: that waits for Retry.Patience, and
// twice as long for each message behind it. Or a guess that other processes vouched for.
func (r *fleetRig) condemned(queue string, d *dlq.Record, fed uint64) (why string) {
	number := guardtest.Number(d.Body)
	behind := fed - min(fed, number)
	if behind <= 5 && d.LastFailed.Sub(d.FirstFailed) >= 10*time.Second<<behind {
		return ""
	}
	if behind < 8 && r.vouchedFor(queue, number) {
		return ""
	}
	failed, after := false, 0
	for _, c := range r.since(0) {
		switch {
		case c.queue != queue:
		case c.number == number && c.ok:
			return fmt.Sprintf("it succeeded: %+v", c)
		case c.number == number && after > 0:
			after++
		case c.number == number:
			failed = true
		case c.ok && failed && after == 0:
			after = 1 // the proof
		}
	}
	if after < 3 {
		return fmt.Sprintf("no two failures after a proof of life: %d", max(0, after-1))
	}
	return ""
}

// before are the calls of all processes that came before a dead letter, the latest 100.
func (r *fleetRig) before(d *dlq.Record) string {
	calls := r.since(0)
	end := 0
	for i, c := range calls {
		if c.queue == d.Origin.Source && c.number == guardtest.Number(d.Body) {
			end = i + 1
		}
	}
	return fmt.Sprintf("%+v", calls[max(0, end-100):end])
}

// vouchedFor tells whether another process succeeded after a message had failed for the
// last process that tried it, while nothing of its partition succeeded there: each partition
// has a breaker, and looks for life, of its own.
func (r *fleetRig) vouchedFor(queue string, number uint64) bool {
	calls := r.since(0)
	is := func(c fleetCall) bool { return c.queue == queue && c.number == number }
	last := len(calls) - 1
	for last >= 0 && !is(calls[last]) {
		last--
	}
	if last < 0 {
		return false
	}
	failed, vouched := false, false
	for i, c := range calls {
		switch {
		case is(c):
			failed = true
		case !c.ok || !failed:
		case c.who != calls[last].who:
			vouched = true
		case i > last:
			return vouched
		case c.queue == queue:
			failed, vouched = false, false
		}
	}
	return vouched
}
