// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Adjacent poison messages of unknown errors are passed within 2 s and half a second
// each, in any order, and nothing else is dead-lettered.
func TestAdjacentPoison(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, breaker := range []bool{true, false} {
			for _, n := range []int{1, 2, 3, 5, 8, 20, 64} {
				t.Run(fmt.Sprint(order, breaker, n), func(t *testing.T) {
					s := newSim(t, Policy{Order: order, NoBreaker: !breaker})
					var passed time.Duration
					first := 200
					start := time.Duration(0)
					s.runKeyed(s.now+10*time.Minute, 100, func(m int) (time.Duration, error) {
						if m >= first && m < first+n {
							if start == 0 {
								start = s.now
							}
							return 2 * time.Millisecond, errBad
						}
						if m == first+n && passed == 0 {
							passed = s.now - start
						}
						return 2 * time.Millisecond, nil
					}, counter(1000, 10*time.Millisecond))
					slices.Sort(s.dead)
					if len(s.dead) != n || s.dead[0] != first || s.dead[n-1] != first+n-1 || len(s.handled) != 1000-n {
						t.Errorf("handled %d, dead %v", len(s.handled), s.dead)
					}
					if limit := 2*time.Second + time.Duration(n)*500*time.Millisecond; passed > limit {
						t.Errorf("passed in %v, limit %v", passed, limit)
					}
					t.Logf("passed in %v; %d calls, overtaken %d", passed, s.calls, s.tally.Overtaken)
				})
			}
		}
	}
}

// The histories of a few poison messages fill no window: the message that proves life
// still comes in.
func TestAdjacentPoisonInSmallWindowBytes(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		const first, n = 200, 20
		s := newSim(t, Policy{Order: order, WindowBytes: 1024})
		passed, start := time.Duration(0), time.Duration(0)
		s.runKeyed(s.now+2*time.Minute, 100, func(m int) (time.Duration, error) {
			switch {
			case m >= first && m < first+n:
				if start == 0 {
					start = s.now
				}
				return 2 * time.Millisecond, errBad
			case m == first+n && passed == 0:
				passed = s.now - start
			}
			return 2 * time.Millisecond, nil
		}, counter(1000, 10*time.Millisecond))
		if limit := 2*time.Second + n*500*time.Millisecond; passed == 0 || passed > limit || len(s.dead) != n || len(s.handled) != 1000-n {
			t.Errorf("order %v: passed in %v, limit %v, handled %d, dead %v", order, passed, limit, len(s.handled), s.dead)
		}
	}
}

// Poison that is the last of an idle source goes when one message comes and succeeds,
// though some of it was never tried, and though the head of its key has just been probed.
// With odd seeds it comes in the middle of a probe's look.
func TestAdjacentPoisonIdle(t *testing.T) {
	const first, wait, seeds = 50, 30 * time.Second, 20
	for i := range 3 * 2 * seeds {
		order, n, seed := Order(i%3), []int{20, 64}[i/3%2], uint64(i/6)
		limit := 2*time.Second + time.Duration(n)*500*time.Millisecond + 10*time.Second
		s := newSim(t, Policy{Order: order})
		s.rand = rand.New(rand.NewPCG(seed, 5))
		sent, from, quiet, passed := 0, s.now, time.Duration(0), time.Duration(0)
		s.runKeyed(s.now+2*time.Minute, 16, func(m int) (time.Duration, error) {
			switch {
			case m >= first && m < first+n:
				return 2 * time.Millisecond, errBad
			case m == first+n && passed == 0:
				passed = s.now - quiet
			}
			return 2 * time.Millisecond, nil
		}, func(now time.Duration) (int, bool) {
			switch {
			case sent < first && now >= from+time.Duration(sent)*100*time.Millisecond, sent >= first && sent < first+n:
				quiet = now + wait
			case sent == first+n && now >= quiet && (seed%2 == 0 || s.round.on):
				quiet = now
			default:
				return 0, false
			}
			sent++
			return sent - 1, true
		})
		slices.Sort(s.dead)
		if len(s.dead) != n || s.dead[0] != first || s.dead[n-1] != first+n-1 || len(s.handled) != first+1 || passed > limit {
			t.Errorf("order %v, seed %d: handled %d after %v, limit %v, dead %v", order, seed, len(s.handled), passed, limit, s.dead)
		}
	}
}

// A message that is ignored, permanent or at fault itself says nothing about the dependency:
// a look goes on behind it, and it makes no outage. Poison in front of 200 such messages goes
// once one behind them succeeds, also at the end of an outage.
func TestLookPassesWhatSaysNothing(t *testing.T) {
	const poison, mute, all = 5, 200, 300
	for name, said := range map[string]error{
		"ignored": Ignore(errDown), "permanent": Permanent(errDown), "message": &json.SyntaxError{},
	} {
		for _, outage := range []time.Duration{0, 30 * time.Second} {
			s := newSim(t, Policy{})
			var passed time.Duration
			up := s.now + outage
			s.run(s.now+15*time.Minute, func(m int) (time.Duration, error) {
				switch {
				case s.now < up:
					return 2 * time.Millisecond, errRefused
				case m == poison:
					return 2 * time.Millisecond, errBad
				case m > poison && m <= poison+mute:
					return 2 * time.Millisecond, said
				case m > poison && passed == 0:
					passed = s.now - up
				}
				return 2 * time.Millisecond, nil
			}, counter(all, 5*time.Millisecond))
			dead := 1
			if name != "ignored" {
				dead += mute
			}
			if passed == 0 || passed > 2*time.Minute || len(s.dead) != dead || s.account().Acked+s.account().DeadLettered != all {
				t.Errorf("%s, outage of %v: passed in %v, dead %d, %+v", name, outage, passed, len(s.dead), s.account())
			}
			t.Logf("%s, outage of %v: passed in %v, %d calls", name, outage, passed, s.calls)
		}
	}
}

// One success that proves life for all that is here proves it for the last of them, too.
func TestOneProofForTheLastFew(t *testing.T) {
	const poison = 14
	s := newSim(t, Policy{Order: OrderNone, NoBreaker: true, Retry: Retry{Attempts: 2, Max: time.Second}})
	for m := range poison + 2 {
		s.put(s.now, m, 0, 1)
	}
	call := func(err error) {
		st := s.next(s.now)
		if st.kind != stepHandle || st.it.m > poison {
			t.Fatalf("%+v", st)
		}
		s.finish(st.it, err)
		for len(s.letters) > 0 {
			s.confirm()
			s.ackNow(s.next(s.now).it)
		}
	}
	for range poison {
		call(errBad)
	}
	call(nil)
	for range proofs {
		s.now += time.Second
		for range poison {
			call(errBad)
		}
	}
	if len(s.dead) != poison || s.unfailed() != 1 {
		t.Errorf("dead %v, %d were never tried", s.dead, s.unfailed())
	}
}

// A head that was proven to be poison does not hide an outage that says so: its source
// goes on as soon after it as any other.
func TestOutageBehindPoison(t *testing.T) {
	const first = 200
	for _, length := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
		t.Run(fmt.Sprint(length), func(t *testing.T) {
			limit := 2*time.Second + length/10
			for seed := range uint64(20) {
				s := newSim(t, Policy{})
				s.rand = rand.New(rand.NewPCG(seed, 5))
				var from, next time.Duration
				s.run(s.now+2*time.Minute, func(m int) (time.Duration, error) {
					if m == first && from == 0 && s.lanes[0].head().after > 0 {
						from = s.now
					}
					switch {
					case from > 0 && s.now < from+length:
						return 2 * time.Millisecond, Unavailable(errDown)
					case m == first:
						return 2 * time.Millisecond, errBad
					case from > 0 && next == 0:
						next = s.now - from - length
					}
					return 2 * time.Millisecond, nil
				}, counter(1000, 10*time.Millisecond))
				if len(s.dead) != 1 || s.dead[0] != first || len(s.handled) != 999 {
					t.Errorf("seed %d: handled %d, dead %v", seed, len(s.handled), s.dead)
				}
				if next == 0 || next > limit {
					t.Errorf("seed %d: the first success %v after the outage, limit %v", seed, next, limit)
				}
			}
		})
	}
}

// Where most keys have poison at their head, an outage of unknown errors is seen by the
// looks of all of them together.
func TestOutageBehindPoisonOfManyKeys(t *testing.T) {
	const keys, enough = 16, 12
	worst, began := 0, 0
	for seed := range 20 {
		r := rand.New(rand.NewPCG(uint64(seed), 4))
		bad := make([]bool, 30_000)
		for m := range bad {
			bad[m] = r.IntN(33) == 0
		}
		s := newSim(t, Policy{Order: OrderKey})
		var from, open time.Duration
		calls := 0
		s.runKeyed(s.now+20*time.Second, keys, func(m int) (time.Duration, error) {
			proven := 0
			for _, l := range s.lanes {
				if it := l.head(); it != nil && bad[it.m] && it.after > 0 {
					proven++
				}
			}
			if from == 0 && proven >= enough && s.closed() {
				from = s.now
			}
			switch {
			case from == 0 && !bad[m]:
				return 2 * time.Millisecond, nil
			case from > 0 && open == 0 && s.closed():
				calls++
			case from > 0 && open == 0:
				open = s.now - from
			}
			return 2 * time.Millisecond, errBad
		}, counter(len(bad), time.Millisecond))
		if from > 0 {
			began++
		}
		if (open > 0) != (from > 0) {
			t.Errorf("seed %d: from %v, open after %v", seed, from, open)
		}
		worst = max(worst, calls)
	}
	// Each head's attempts, the looks, and what the other heads do between these.
	if most := keys*mostAttempts/2 + 2*maxLook; worst > most || began < 10 {
		t.Errorf("%d calls before the breaker opened, limit %d; %d outages", worst, most, began)
	}
	t.Logf("%d calls at most before the breaker opened, %d outages", worst, began)
}

// Bursts of poison with successes between them are no outage, however many there are.
func TestManyBurstsAreNoOutage(t *testing.T) {
	const every, burst = 100, 8
	s := newSim(t, Policy{})
	opened := 0
	s.run(s.now+5*time.Minute, func(m int) (time.Duration, error) {
		if !s.closed() {
			opened++
		}
		if m%every < burst && m >= every {
			return 2 * time.Millisecond, errBad
		}
		return 2 * time.Millisecond, nil
	}, counter(20*every, 20*time.Millisecond))
	if len(s.dead) != 19*burst || opened > 0 {
		t.Errorf("%d dead letters, %d calls with the breaker open", len(s.dead), opened)
	}
}
