// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

var errBad = errors.New("bad")

// burst feeds the messages at once, while there is room.
func burst(ms ...int) func(time.Duration) (int, bool) {
	return func(time.Duration) (m int, ok bool) {
		if len(ms) == 0 {
			return 0, false
		}
		m, ms = ms[0], ms[1:]
		return m, true
	}
}

// While the breaker is open, a key that saw others succeed lets them go first; but
// not for ever, or poison that saw nothing would keep it from its turn.
func TestPoisonOfOneKeyDoesNotStarveAnother(t *testing.T) {
	s := newSim(t, Policy{Order: OrderKey})
	s.gate.Force(s.now, time.Second, CauseOperator)
	forced := false
	s.runKeyed(s.now+20*time.Minute, 3, func(m int) (time.Duration, error) {
		if m == 1 || m == 2 {
			if m == 2 && !forced {
				forced = true // what comes next fails as the only one since the last success
				s.gate.Force(s.now, time.Second, CauseOperator)
			}
			return time.Millisecond, errBad
		}
		return time.Millisecond, nil
	}, burst(1, 0, 2, 4, 7, 10))
	slices.Sort(s.handled)
	if !forced || !slices.Equal(s.handled, []int{0, 4, 7, 10}) {
		t.Errorf("handled %v, dead %v", s.handled, s.dead)
	}
}

// A witness that fails for a reason of its own has all its attempts, whatever
// stands before it.
func TestWitnessHasItsAttempts(t *testing.T) {
	for calls := 1; calls < 5; calls++ {
		s := newSim(t, Policy{})
		failed := 0
		s.run(s.now+10*time.Minute, func(m int) (time.Duration, error) {
			if m == 0 || m == 1 && failed < calls {
				if m == 1 {
					failed++
				}
				return time.Millisecond, errBad
			}
			return time.Millisecond, nil
		}, counter(20, 0))
		if len(s.handled) != 19 || !slices.Equal(s.dead, []int{0}) {
			t.Errorf("%d failures of the witness: handled %v, dead %v", calls, s.handled, s.dead)
		}
	}
}

// A window with nothing but poison looks like an outage. It comes loose all the
// same, and what is behind it is handled.
func TestWindowFullOfPoisonComesLoose(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, breaker := range []bool{true, false} {
			s := newSim(t, Policy{Order: order, Window: 6, NoBreaker: !breaker})
			s.runKeyed(s.now+8*time.Hour, 5, func(m int) (time.Duration, error) {
				if m < 8 {
					return time.Millisecond, errBad
				}
				return time.Millisecond, nil
			}, counter(30, 0))
			slices.Sort(s.dead)
			if len(s.handled) != 22 || !slices.Equal(s.dead, []int{0, 1, 2, 3, 4, 5, 6, 7}) {
				t.Errorf("order %s, breaker %t: handled %v, dead %v", order, breaker, s.handled, s.dead)
			}
		}
	}
}

// An outage during which nothing can be compared costs one healthy message after
// ten minutes, and each further one takes twice as long.
func TestGuessesDouble(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, outage := range []struct {
			length time.Duration
			most   int
		}{{9 * time.Minute, 0}, {29 * time.Minute, 1}, {69 * time.Minute, 2}, {149 * time.Minute, 3}} {
			s := newSim(t, Policy{Order: order, Window: 6})
			down := s.now + outage.length
			s.runKeyed(down+time.Hour, 5, func(int) (time.Duration, error) {
				if s.now < down {
					return time.Millisecond, errDown
				}
				return time.Millisecond, nil
			}, counter(100, 0))
			if len(s.dead) > outage.most || len(s.handled)+len(s.dead) != 100 {
				t.Errorf("order %s, %s: handled %d, dead %v", order, outage.length, len(s.handled), s.dead)
			}
		}
	}
}

// What failed as a witness in one outage and fails in its own turn in the next is
// no poison, although the head of the first succeeded in between.
func TestWitnessOfOneOutageIsNotCondemnedInTheNext(t *testing.T) {
	for _, gap := range []time.Duration{0, 10 * time.Millisecond, 20 * time.Second} {
		s := newSim(t, Policy{})
		first, second := s.now+20*time.Second, time.Duration(0)
		witnessed := 0
		s.run(s.now+10*time.Minute, func(m int) (time.Duration, error) {
			switch {
			case s.now < first:
				if m == 1 {
					witnessed++
				}
				return time.Millisecond, errDown
			case m == 0 && second == 0: // it is back for this one call
				second = s.now + gap + time.Minute
				if gap > 0 {
					s.gate.Force(s.now, gap, CauseOperator)
				}
				return time.Millisecond, nil
			case s.now < second:
				return time.Millisecond, errDown
			}
			return time.Millisecond, nil
		}, counter(50, 0))
		if witnessed < 5 || len(s.handled) != 50 || len(s.dead) != 0 {
			t.Errorf("gap %v: a witness %d times; handled %d, dead %v", gap, witnessed, len(s.handled), s.dead)
		}
	}
}

// An outage that ends within a round of witnesses costs healthy messages, the head
// and those tried in vain before the one that succeeds: seldom, and few.
func TestOutageEndsWithinARound(t *testing.T) {
	if RaceEnabled {
		t.Skip("eighty outages of one goroutine: run without -race")
	}
	const outages, call = 80, 700 * time.Millisecond
	rng := rand.New(rand.NewPCG(4, 9))
	hit, dead := 0, 0
	for range outages {
		s := newSim(t, Policy{})
		from := s.now + time.Second
		to := from + 30*time.Second + time.Duration(rng.Int64N(int64(5*time.Minute)))
		s.run(to+5*time.Minute, func(int) (time.Duration, error) {
			switch {
			case s.now < from || s.now >= to:
				return time.Millisecond, nil
			case s.now+call > to: // it is back before the call ends
				return call, nil
			}
			return call, errDown
		}, counter(200, 100*time.Millisecond))
		dead += len(s.dead)
		if len(s.dead) > 0 {
			hit++
		}
		if len(s.handled)+len(s.dead) != 200 || len(s.dead) > maxWitnesses {
			t.Errorf("handled %d, dead %v", len(s.handled), s.dead)
		}
	}
	t.Logf("%d of %d outages cost %d messages", hit, outages, dead)
	if hit > outages*6/100 || dead > outages*10/100 {
		t.Errorf("%d of %d outages cost %d messages", hit, outages, dead)
	}
}

// A witness that a limit keeps waiting is no longer fresh: the dependency may have
// come back meanwhile. Poison comes loose behind such a limit all the same.
func TestWitnessThatALimitKeepsWaiting(t *testing.T) {
	for _, breaker := range []bool{true, false} {
		for _, every := range []time.Duration{1900 * time.Millisecond, 3 * time.Second, 8 * time.Second} {
			s := newSim(t, Policy{NoBreaker: !breaker})
			s.limiter = &pace{every: every}
			s.run(s.now+time.Hour, func(m int) (time.Duration, error) {
				if m == 0 && s.calls <= 5 { // the attempts that message 0 has
					return time.Millisecond, errDown
				}
				return time.Millisecond, nil
			}, counter(20, 0))
			lost := 0
			if every < witnessFresh {
				lost = 1
			}
			if len(s.dead) != lost || len(s.handled) != 20-lost {
				t.Errorf("breaker %t, one call in %v: outage: handled %d, dead %v", breaker, every, len(s.handled), s.dead)
			}

			s = newSim(t, Policy{NoBreaker: !breaker})
			s.limiter = &pace{every: every}
			s.run(s.now+time.Hour, func(m int) (time.Duration, error) {
				if m == 0 || m == 1 || m == 5 {
					return time.Millisecond, errBad
				}
				return time.Millisecond, nil
			}, counter(20, 0))
			if !slices.Equal(s.dead, []int{0, 1, 5}) || len(s.handled) != 17 {
				t.Errorf("breaker %t, one call in %v: poison: handled %d, dead %v", breaker, every, len(s.handled), s.dead)
			}
		}
	}
}

// Without order, retries that take longer than their delays leave no time for anything
// else; a few messages whose handler hangs are passed all the same.
func TestSlowPoisonWithoutOrder(t *testing.T) {
	for _, breaker := range []bool{true, false} {
		s := newSim(t, Policy{Order: OrderNone, NoBreaker: !breaker})
		s.run(s.now+time.Hour, func(m int) (time.Duration, error) {
			if m < 5 {
				return 3 * time.Second, errBad
			}
			return time.Millisecond, nil
		}, counter(30, 10*time.Millisecond))
		slices.Sort(s.dead)
		if len(s.handled) != 25 || !slices.Equal(s.dead, []int{0, 1, 2, 3, 4}) {
			t.Errorf("breaker %t: handled %d, dead %v", breaker, len(s.handled), s.dead)
		}
	}
}

// Adjacent poison needs more credits than a spent budget ever gives at once. It is
// passed for one, and the others go as credits come.
func TestAdjacentPoisonWithoutCredits(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey} {
		for _, breaker := range []bool{true, false} {
			for _, took := range []time.Duration{time.Millisecond, 3 * time.Second} {
				s := newSim(t, Policy{Order: order, NoBreaker: !breaker})
				for s.budget.Spend(s.now, dlq.Exhausted) {
				}
				s.runKeyed(s.now+2*time.Hour, 2, func(m int) (time.Duration, error) {
					if m < 8 {
						return took, errBad
					}
					return time.Millisecond, nil
				}, counter(40, 10*time.Millisecond))
				slices.Sort(s.dead)
				if len(s.handled) != 32 || !slices.Equal(s.dead, []int{0, 1, 2, 3, 4, 5, 6, 7}) {
					t.Errorf("order %s, breaker %t, %v: handled %d, dead %v", order, breaker, took, len(s.handled), s.dead)
				}
				inOrder(t, s.handled, func(m int) int {
					if order == OrderKey {
						return m % 2
					}
					return 0
				})
				if a := s.account(); a.Received != a.Acked+a.DeadLettered {
					t.Errorf("order %s, breaker %t, %v: %+v", order, breaker, took, a)
				}
			}
		}
	}
}

// Messages that arrive do not call an exhausted head again: it has its delays, also
// where no breaker holds it, so that an outage seldom ends within a round.
func TestArrivalsDoNotHurryAnExhaustedHead(t *testing.T) {
	s := newSim(t, Policy{NoBreaker: true, Window: 1000})
	calls := 0
	s.run(s.now+time.Minute, func(m int) (time.Duration, error) {
		if m == 0 {
			calls++
		}
		return 100 * time.Microsecond, errDown
	}, counter(6000, 10*time.Millisecond))
	if calls > 50 || len(s.dead) > 0 {
		t.Errorf("the head was called %d times in a minute, dead %v", calls, s.dead)
	}

	const call = 5 * time.Millisecond
	for i := range 50 {
		s := newSim(t, Policy{NoBreaker: true})
		from := s.now + 2*time.Second
		to := from + 10*time.Second + time.Duration(i)*2600*time.Microsecond
		s.run(to+time.Minute, func(int) (time.Duration, error) {
			if s.now+call >= from && s.now+call < to {
				return call, errDown
			}
			return call, nil
		}, counter(600, 50*time.Millisecond))
		if len(s.dead) > 0 || len(s.handled) != 600 {
			t.Errorf("outage %d: handled %d, dead %v", i, len(s.handled), s.dead)
		}
	}
}

// An exhausted head that is alone is called again as soon as there is a witness.
func TestFirstWitnessWakesTheHead(t *testing.T) {
	s := newSim(t, Policy{NoBreaker: true, Retry: Retry{Base: time.Minute, Max: time.Hour, Patience: 24 * time.Hour}})
	bad := func(m int) (time.Duration, error) {
		if m == 0 {
			return time.Millisecond, errBad
		}
		return time.Millisecond, nil
	}
	s.run(s.now+6*time.Hour, bad, burst(0))
	s.run(s.now+time.Second, bad, burst(1))
	if !slices.Equal(s.dead, []int{0}) || !slices.Equal(s.handled, []int{1}) {
		t.Errorf("handled %v, dead %v", s.handled, s.dead)
	}
}

// More adjacent poison than a round has witnesses at first is passed by proof: the
// rounds of a head that goes on failing get longer.
func TestAdjacentPoisonBeyondARound(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey} {
		for _, breaker := range []bool{true, false} {
			for n, within := range map[int]time.Duration{maxWitnesses + 1: time.Hour, 20: 2 * time.Hour, farWitnesses: 7 * time.Hour} {
				s := newSim(t, Policy{Order: order, NoBreaker: !breaker})
				for s.budget.Spend(s.now, dlq.Exhausted) {
				}
				s.budget.Grant(float64(n))
				s.runKeyed(s.now+within, 1, func(m int) (time.Duration, error) {
					if m < n {
						return time.Millisecond, errBad
					}
					return time.Millisecond, nil
				}, counter(n+20, time.Second))
				inOrder(t, s.handled, one)
				slices.Sort(s.dead)
				if len(s.handled) != 20 || len(s.dead) != n || s.dead[n-1] != n-1 || s.guesses > 0 {
					t.Errorf("order %s, breaker %t, %d poison: handled %d, dead %v, %d guesses", order, breaker, n, len(s.handled), s.dead, s.guesses)
				}
				if a := s.account(); a.Received != a.Acked+a.DeadLettered {
					t.Errorf("order %s, breaker %t, %d poison: %+v", order, breaker, n, a)
				}
			}
		}
	}
}

// A round has an end, in messages and, beyond the first few, in time; what it took of
// the budget it gives back, and a long outage costs nothing.
func TestLongRoundsAreBounded(t *testing.T) {
	for _, breaker := range []bool{true, false} {
		for took, farthest := range map[time.Duration]int{
			time.Millisecond: farWitnesses, 100 * time.Millisecond: 20, time.Second: maxWitnesses, 5 * time.Second: maxWitnesses,
		} {
			s := newSim(t, Policy{NoBreaker: !breaker})
			s.budget.Grant(100)
			credits := s.budget.Balance(dlq.Exhausted)
			far := 0
			s.run(s.now+7*time.Hour, func(m int) (time.Duration, error) {
				far = max(far, m)
				return took, errDown
			}, counter(200, 0))
			if far != farthest || len(s.dead) > 0 {
				t.Errorf("breaker %t, calls of %v: a round went as far as message %d, want %d; dead %v", breaker, took, far, farthest, s.dead)
			}
			for _, l := range s.lanes {
				s.rewind(s.now, l)
			}
			if b := s.budget.Balance(dlq.Exhausted); b < credits {
				t.Errorf("breaker %t, calls of %v: %v credits of %v are left", breaker, took, b, credits)
			}
			s.run(s.now+time.Hour, func(int) (time.Duration, error) { return time.Millisecond, nil }, nil)
			if len(s.dead) > 0 || len(s.handled) != 200 {
				t.Errorf("breaker %t, calls of %v: handled %d, dead %v", breaker, took, len(s.handled), s.dead)
			}
		}
	}
}

// What a limit keeps waiting beyond the first few of a long round is not called when the
// head's attempt is too long ago.
func TestLongRoundBehindALimit(t *testing.T) {
	s := newSim(t, Policy{NoBreaker: true})
	s.limiter = &hiccup{}
	var began time.Duration
	far := 0
	s.run(s.now+2*time.Hour, func(m int) (time.Duration, error) {
		if far = max(far, m); m == 0 {
			began = s.now
		}
		if m > maxWitnesses && s.now-began > witnessFresh {
			t.Fatalf("message %d is called %v after the head", m, s.now-began)
		}
		return time.Millisecond, errDown
	}, counter(200, 0))
	if far <= maxWitnesses || len(s.dead) > 0 {
		t.Errorf("a round went as far as message %d; dead %v", far, s.dead)
	}
}

// hiccup is a limiter that after each 37 admissions refuses for 3s.
type hiccup struct {
	n     int
	until time.Duration
}

func (h *hiccup) Admit(now time.Duration) time.Duration {
	if now < h.until {
		return h.until - now
	}
	if h.n++; h.n%37 == 0 {
		h.until = now + 3*time.Second
	}
	return 0
}
