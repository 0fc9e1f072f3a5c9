// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// An outage is not poison: nothing is dead-lettered, the handler is hardly
// called, and everything is handled in order once it is over.
func TestOutage(t *testing.T) {
	lengths := []time.Duration{time.Second, 20 * time.Second, 10 * time.Minute}
	for i, failure := range []error{errDown, errDown, errDown, errRefused, errRefused, errRefused} {
		length := lengths[i%len(lengths)]
		t.Run(fmt.Sprint(length, failure == errDown), func(t *testing.T) {
			s := newSim(t, Policy{})
			from, to := s.now+5*time.Second, s.now+5*time.Second+length
			calls := 0
			s.run(to+3*time.Minute, func(int) (time.Duration, error) {
				if s.now >= from && s.now < to {
					calls++
					return time.Millisecond, failure
				}
				return 100 * time.Microsecond, nil
			}, counter(5000, 2*time.Millisecond))
			if len(s.dead) > 0 || len(s.handled) != 5000 {
				t.Errorf("dead %v, handled %d", s.dead, len(s.handled))
			}
			if s.tally.Overtaken == 0 {
				inOrder(t, s.handled, one)
			}
			// Without a guard 500 messages a second would be tried five times each.
			if most := max(50, int(length.Seconds()*500*5/100)); calls > most {
				t.Errorf("%d calls during the outage, more than %d", calls, most)
			}
			t.Logf("%d calls, %d overtaken", calls, s.tally.Overtaken)
		})
	}
}

// Where every message has failed, a long retry delay does not keep the breaker
// open: a head that failed a probe is up again within the backoff's period.
func TestRecoveryWithinTheBackoff(t *testing.T) {
	s := newSim(t, Policy{Order: OrderKey, Retry: Retry{Base: 10 * time.Minute}})
	from, closed := s.now, time.Duration(0)
	const outage = 6 * time.Second
	opened := false
	s.runKeyed(from+3*outage, 100, func(int) (time.Duration, error) {
		opened = opened || !s.closed()
		if s.now < from+outage {
			return time.Millisecond, errDown
		}
		if closed == 0 {
			closed = s.now
		}
		return time.Millisecond, nil
	}, func(time.Duration) (int, bool) {
		// As many as it takes to open it, and one to probe with.
		i := s.calls
		return i, !opened && s.unsettled() == i
	})
	if !opened || closed == 0 || closed > from+2*outage+time.Second {
		t.Errorf("opened %t, first success %v after the recovery", opened, closed-from-outage)
	}
}

// Only the poison is dead-lettered, whenever it comes; healthy heads never are,
// and the source does not wedge.
func TestPoisonDuringAndAfterAnOutage(t *testing.T) {
	for _, poison := range [][]int{{0}, {100}, {1000}, {1000, 1001}, {1000, 1001, 1002, 1003}, {2400, 2500, 2600}, {4999}} {
		for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
			t.Run(fmt.Sprint(poison, order), func(t *testing.T) {
				bad := map[int]bool{}
				for _, m := range poison {
					bad[m] = true
				}
				s := newSim(t, Policy{Order: order})
				from, to := s.now+2*time.Second, s.now+22*time.Second
				s.runKeyed(s.now+10*time.Minute, 7, func(m int) (time.Duration, error) {
					switch {
					case s.now >= from && s.now < to:
						return time.Millisecond, errDown
					case bad[m]:
						return time.Millisecond, errors.New("json: cannot unmarshal")
					}
					return 100 * time.Microsecond, nil
				}, counter(5000, 2*time.Millisecond))
				if len(s.handled) != 5000-len(poison) {
					t.Errorf("handled %d; %+v", len(s.handled), s.account())
				}
				if len(s.dead) != len(poison) {
					t.Errorf("dead-lettered %v, want %v", s.dead, poison)
				}
				for _, m := range s.dead {
					if !bad[m] {
						t.Errorf("healthy message %d dead-lettered", m)
					}
				}
				switch order {
				case OrderSource:
					inOrder(t, s.handled, one)
				case OrderKey:
					inOrder(t, s.handled, func(m int) int { return m % 7 })
				default:
				}
			})
		}
	}
}

// Poison alone, the dependency well: each is dead-lettered once after its
// attempts, and with other lanes around the breaker never opens.
func TestPoisonAlone(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		t.Run(order.String(), func(t *testing.T) {
			s := newSim(t, Policy{Order: order})
			opened := false
			s.runKeyed(s.now+10*time.Minute, 50, func(m int) (time.Duration, error) {
				if !opened && !s.closed() {
					opened = true
					t.Errorf("the breaker opened: %+v", s.gate.Breaker.Snapshot(s.now))
				}
				if m%100 == 7 {
					return time.Millisecond, errors.New("bad")
				}
				return 100 * time.Microsecond, nil
			}, counter(3000, 20*time.Millisecond))
			if len(s.dead) != 30 || len(s.handled) != 2970 {
				t.Errorf("dead %d, handled %d, %+v", len(s.dead), len(s.handled), s.account())
			}
		})
	}
}

// The budget alone, no breaker and no detector: five minutes of total failure
// spend at most the balance and the free credit; everything else is kept.
func TestBudgetAlone(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		t.Run(order.String(), func(t *testing.T) {
			s := newSim(t, Policy{Order: order, NoBreaker: true, Storm: dlq.StormConfig{Off: true}})
			to := s.now + 5*time.Minute
			down := func(int) (time.Duration, error) {
				if s.now < to {
					return time.Millisecond, errDown
				}
				return 100 * time.Microsecond, nil
			}
			feed := counter(3000, 10*time.Millisecond)
			s.runKeyed(to, 100, down, feed)
			if len(s.dead) > 21 {
				t.Errorf("%d dead letters", len(s.dead))
			}
			s.runKeyed(to+3*time.Minute, 100, down, feed)
			if len(s.handled)+len(s.dead) != 3000 || len(s.dead) > 21 {
				t.Errorf("handled %d, dead %d: %+v", len(s.handled), len(s.dead), s.account())
			}
		})
	}
}

// Four percent steady poison never stalls on the budget.
func TestSteadyPoisonNeverStalls(t *testing.T) {
	s := newSim(t, Policy{Order: OrderNone, NoBreaker: true, Storm: dlq.StormConfig{Off: true}})
	s.run(s.now+30*time.Minute, func(m int) (time.Duration, error) {
		if m%25 == 0 && m < 50_000 {
			return 100 * time.Microsecond, errors.New("bad")
		}
		return 100 * time.Microsecond, nil
	}, counter(60_000, 2*time.Millisecond))
	if len(s.dead) != 2000 || len(s.handled) != 58_000 || s.budget.Refused() != 0 {
		t.Errorf("dead %d, handled %d, refused %d", len(s.dead), len(s.handled), s.budget.Refused())
	}
}

// A message on an idle source has no witness: after its patience it is taken
// for poison. One that comes meanwhile settles the question.
func TestLonelyPoison(t *testing.T) {
	s := newSim(t, Policy{})
	fed := false
	bad := func(int) (time.Duration, error) { return time.Millisecond, errors.New("bad") }
	s.run(s.now+time.Minute, bad, func(time.Duration) (int, bool) {
		ok := !fed
		fed = true
		return 1, ok
	})
	if len(s.dead) != 1 {
		t.Fatalf("dead %v, %+v", s.dead, s.account())
	}
}

// The detector stands alone when the breaker is switched off: it fires under a
// storm, stops dead-lettering, and clears.
func TestStormWithoutBreaker(t *testing.T) {
	s := newSim(t, Policy{Order: OrderNone, NoBreaker: true, Budget: dlq.BudgetConfig{Off: true}})
	from, to := s.now+10*time.Second, s.now+200*time.Second
	handler := func(int) (time.Duration, error) {
		if s.now >= from && s.now < to {
			return time.Millisecond, errDown
		}
		return 100 * time.Microsecond, nil
	}
	feed := counter(30_000, 10*time.Millisecond)
	s.run(from+50*time.Second, handler, feed)
	if s.storm.Storm().Active {
		t.Error("a storm within its first minute")
	}
	s.run(to, handler, feed)
	if !s.storm.Storm().Active {
		t.Errorf("no storm after 190 s: %v", s.storm.Storm())
	}
	during := len(s.dead)
	s.run(to+5*time.Minute, handler, feed)
	if s.storm.Storm().Active {
		t.Errorf("the storm goes on: %v", s.storm.Storm())
	}
	if len(s.dead) != during {
		t.Errorf("dead-lettered %d under the storm", len(s.dead)-during)
	}
}

// The storm is seen while everything is held.
func TestStormWhileHeld(t *testing.T) {
	s := newSim(t, Policy{})
	from := s.now + 10*time.Second
	s.run(from+3*time.Minute, func(int) (time.Duration, error) {
		if s.now >= from {
			return time.Millisecond, errDown
		}
		return 100 * time.Microsecond, nil
	}, counter(1_000_000, 5*time.Millisecond))
	if !s.storm.Storm().Active {
		t.Errorf("no storm: %v", s.storm.Storm())
	}
}

// A dependency that comes back in part is still a storm, though its probes keep the breaker
// half-open: those that fail count, too.
func TestStormWhileProbesPass(t *testing.T) {
	for _, outage := range []time.Duration{2 * time.Second, 20 * time.Second} {
		t.Run(outage.String(), func(t *testing.T) {
			p := Policy{Order: OrderNone, Storm: scaled}
			p.Breaker.Successes = 100 // so it does not close
			p.Retry = Retry{Base: 300 * time.Millisecond, Attempts: 20}
			s := newSim(t, p)
			down := s.now + 2*time.Second
			partly, well := down+outage, down+outage+30*time.Second
			calls, passing, over := make(map[int]int), 0, 0
			handler := func(m int) (time.Duration, error) {
				fails := 0 // so often a message fails while the dependency is back in part
				switch {
				case m%50 == 7:
					fails = 6
				case m%3 > 0:
					fails = 1
				}
				switch {
				case s.now >= down && s.now < partly:
					return time.Millisecond, errDown
				case s.now >= partly && s.now < well:
					if calls[m]++; calls[m] <= fails {
						return time.Millisecond, errDown
					}
				}
				return time.Millisecond, nil
			}
			feed := counter(100_000, 10*time.Millisecond)
			s.run(partly+15*time.Second, handler, feed)
			for s.now < well {
				s.run(s.now+100*time.Millisecond, handler, feed)
				if s.gate.Passing() {
					passing++
				}
				if !s.storm.Storm().Active {
					over++
				}
			}
			if passing < 100 || over > 0 {
				t.Errorf("of 150 looks the breaker was half-open and passing in %d, and there was no storm in %d: %v", passing, over, s.storm.Storm())
			}
			s.run(well+time.Minute, handler, feed)
			if s.storm.Storm().Active || !s.closed() {
				t.Errorf("a minute after the recovery: %v, closed %v", s.storm.Storm(), s.closed())
			}
		})
	}
}

// The drain follows its formula to 10 %.
func TestRamp(t *testing.T) {
	p := Policy{Window: 100_000, Ramp: Ramp{Start: 50, Double: 2 * time.Second, For: 12 * time.Second}}
	s := newSim(t, p)
	s.paused = true
	s.run(s.now+time.Second, nil, counter(100_000, 0))
	s.next(s.now)
	s.paused = false
	start := s.now
	var at []time.Duration
	s.run(start+12*time.Second, func(int) (time.Duration, error) {
		at = append(at, s.now-start)
		return 0, nil
	}, nil)
	tau := 2 / math.Ln2
	for n := 20; n < len(at); n += 50 {
		want := 50 * tau * (math.Exp2(at[n].Seconds()/2) - 1)
		if got := float64(n); math.Abs(got-want) > 0.1*want {
			t.Fatalf("after %v: %v admitted, formula says %v", at[n], got, want)
		}
	}
	if len(at) < 1000 {
		t.Errorf("only %d admitted", len(at))
	}
}

// Backoff holds the source, costs no attempt and dead-letters nothing.
func TestBackoffHolds(t *testing.T) {
	s := newSim(t, Policy{})
	asked := 0
	s.run(s.now+time.Minute, func(m int) (time.Duration, error) {
		if m == 99 {
			s.at99 = s.now
		}
		if asked < 20 {
			asked++
			return time.Millisecond, Backoff(errors.New("429"), s.origin.Add(s.now+time.Second))
		}
		return time.Millisecond, nil
	}, counter(100, time.Millisecond))
	if took := s.now; s.at99 < 20*time.Second {
		t.Errorf("20 waits of a second took %v", took)
	}
	if len(s.handled) != 100 || len(s.dead) != 0 || s.tally.Failures != 0 {
		t.Errorf("handled %d, dead %d, %+v", len(s.handled), len(s.dead), s.tally)
	}
	inOrder(t, s.handled, one)
}

// What a failed probe costs: nothing that counts towards a dead letter.
func TestFailedProbesCostNoAttempt(t *testing.T) {
	var head *item[int]
	s := newSim(t, Policy{})
	to := s.now + time.Minute
	s.run(to, func(m int) (time.Duration, error) {
		if m == 0 {
			head = s.busy[0]
		}
		return time.Millisecond, errDown
	}, counter(100, 0))
	if head.attempts != 5 || head.tries < 12 {
		t.Errorf("the head has %d attempts of %d calls", head.attempts, head.tries)
	}
}

// A witness is asked out of its turn: what it says besides success, it may say
// only because the head was not handled.
func TestWitnessIsOnlyAWitness(t *testing.T) {
	for _, word := range []error{Permanent(errDown), Ignore(errDown)} {
		s := newSim(t, Policy{})
		to := s.now + 10*time.Second
		done := map[int]bool{}
		s.run(to+time.Minute, func(m int) (time.Duration, error) {
			switch {
			case s.now < to && m == 0:
				return time.Millisecond, errDown
			case m > 0 && !done[m-1]:
				return time.Millisecond, word
			}
			done[m] = true
			return time.Millisecond, nil
		}, counter(50, 0))
		if len(s.handled) != 50 || len(s.dead) != 0 || s.tally.Ignored != 0 {
			t.Errorf("%v: handled %d, dead %v", word, len(s.handled), s.dead)
		}
	}
}

// A steady share of failures opens the breaker by its rate.
func TestRateOpens(t *testing.T) {
	s := newSim(t, Policy{Order: OrderNone})
	var cause breaker.Cause
	s.run(s.now+time.Minute, func(m int) (time.Duration, error) {
		if !s.closed() && cause == "" {
			cause = s.gate.Breaker.Snapshot(s.now).Cause
		}
		if m%3 == 0 {
			return time.Millisecond, errDown
		}
		return time.Millisecond, nil
	}, counter(5000, 5*time.Millisecond))
	if cause != breaker.CauseRate {
		t.Errorf("opened by %q", cause)
	}
}

// A witness that comes late settles the question at once.
func TestLateWitness(t *testing.T) {
	s := newSim(t, Policy{Retry: Retry{Patience: time.Hour}})
	start := s.now
	var died time.Duration
	handler := func(m int) (time.Duration, error) {
		if m == 0 {
			return time.Millisecond, errors.New("bad")
		}
		died = s.now
		return time.Millisecond, nil
	}
	s.run(start+30*time.Second, handler, counter(1, 0))
	next := false
	s.run(start+time.Minute, handler, func(time.Duration) (int, bool) {
		ok := !next
		next = true
		return 1, ok
	})
	if len(s.dead) != 1 || died-start > 31*time.Second {
		t.Errorf("dead %v, witness handled after %v", s.dead, died-start)
	}
}

// scaled is a storm that a test need not wait a minute for.
var scaled = dlq.StormConfig{Age: time.Second, Window: 5 * time.Second, ClearFor: time.Second}

// A storm opens a breaker that did not see it.
func TestStormOpensBreaker(t *testing.T) {
	p := Policy{Order: OrderNone, Storm: scaled}
	p.Breaker.Ratio, p.Breaker.NoRun = 0.99, true
	p.Retry.Base = 300 * time.Millisecond
	s := newSim(t, p)
	var cause breaker.Cause
	s.run(s.now+time.Minute, func(m int) (time.Duration, error) {
		if !s.closed() && cause == "" {
			cause = s.gate.Breaker.Snapshot(s.now).Cause
		}
		if m%2 == 0 {
			return time.Millisecond, errDown
		}
		return time.Millisecond, nil
	}, counter(2000, 10*time.Millisecond))
	if cause != causeStorm {
		t.Errorf("opened by %q", cause)
	}
}

// Nothing is dead-lettered under a storm, though others succeed.
func TestStormStopsDeadLetters(t *testing.T) {
	p := Policy{Order: OrderNone, NoBreaker: true, Storm: scaled, Budget: dlq.BudgetConfig{Off: true}}
	p.Retry.Base = 300 * time.Millisecond
	s := newSim(t, p)
	before, storms := 0, 0
	s.run(s.now+time.Minute, func(m int) (time.Duration, error) {
		if s.storm.Storm().Active {
			storms++
			if len(s.dead) != before {
				t.Fatalf("dead-lettered under a storm")
			}
		}
		before = len(s.dead)
		if m%2 == 0 {
			return time.Millisecond, errDown
		}
		return time.Millisecond, nil
	}, counter(2000, 10*time.Millisecond))
	if storms == 0 {
		t.Error("no storm")
	}
}

// What poison costs under order source is what docs/design.md says: the retry
// delays and the calls of each.
func TestPoisonThroughputFollowsTheFormula(t *testing.T) {
	const p, call = 0.01, 100 * time.Microsecond
	s := newSim(t, Policy{Window: 100_000})
	start, n := s.now, 0
	var last time.Duration
	s.run(start+10*time.Minute, func(m int) (time.Duration, error) {
		if m%100 == 50 {
			return call, errors.New("bad")
		}
		n++
		last = s.now - start
		return call, nil
	}, counter(20_000, 0))
	r := s.policy.Retry
	delays := time.Duration(0)
	for i := 1; i < r.Attempts; i++ {
		delays += min(r.Max, r.Base<<(i-1)) / 2
	}
	want := 1 / (call.Seconds() + p*(delays.Seconds()+float64(r.Attempts)*call.Seconds()))
	got := float64(20_000) / last.Seconds()
	if n != 19_800 || math.Abs(got-want) > 0.15*want {
		t.Errorf("%d handled at %.0f/s; the formula says %.0f/s", n, got, want)
	}
}
