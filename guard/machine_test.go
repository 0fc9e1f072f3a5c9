// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/ringbuf"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// sim drives a machine on a simulated clock: no goroutine, no timer.
type sim struct {
	*machine[int]
	now     time.Duration
	scopes  *circuit.Scopes
	letters []*item[int] // with the dead-letter writer
	handled []int        // in order of success
	dead    []int
	acked   map[int]bool
	calls   int
	at99    time.Duration // when message 99 was handled

	log      bool  // the broker keeps a low watermark
	unmarked []int // with log: from the first that is not settled on
	gone     map[int]bool
	turn     uint64
}

// put is the machine's, and what a log's port learns from it.
func (s *sim) put(now time.Duration, m int, key uint64, size int) {
	s.machine.put(now, m, key, size, nil)
	if s.log {
		s.unmarked = append(s.unmarked, m)
	}
}

func (s *sim) settled(it *item[int], err error) {
	s.machine.settled(it, err)
	if !s.log {
		return
	}
	if s.gone == nil {
		s.gone = map[int]bool{}
	}
	s.gone[it.m] = true
	for len(s.unmarked) > 0 && s.gone[s.unmarked[0]] {
		s.unmarked = s.unmarked[1:]
	}
	ahead := 0
	for _, m := range s.unmarked {
		if s.gone[m] {
			ahead++
		}
	}
	s.turn++
	s.lookedAhead(s.turn, ahead)
}

func newSim(tb interface{ Fatalf(string, ...any) }, p Policy) *sim {
	if t, ok := tb.(*testing.T); ok && RaceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	if err := p.Validate(); err != nil {
		tb.Fatalf("%v", err)
	}
	p = p.withDefaults(Limits{})
	p.Breaker = p.Breaker.WithDefaults()
	scopes, err := circuit.NewScopes(circuit.ScopesConfig{Breaker: p.Breaker})
	if err != nil {
		tb.Fatalf("%v", err)
	}
	ring, err := ringbuf.NewRing[entry[int]](ringbuf.Config{MaxCount: maxWindow}, nil)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	detector, err := storm.NewDetector(p.Storm)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	budget, err := credit.New(p.Budget, p.stormRate())
	if err != nil {
		tb.Fatalf("%v", err)
	}
	s := &sim{scopes: scopes, acked: map[int]bool{}, now: time.Second}
	s.machine = &machine[int]{
		origin: time.Now(), policy: p, storm: detector, budget: budget, letters: true, rand: rand.New(rand.NewPCG(1, 2)),
		ring: ring, lanes: map[uint64]*lane[int]{}, writing: map[*item[int]]struct{}{},
		fast: func() uint64 { return 0 }, wasClosed: true, slowAfter: p.Breaker.Slow,
	}
	s.machine.letters = true
	if p.Order == OrderNone {
		s.bulk = ring.Lane(0)
	}
	if !p.NoBreaker {
		s.gate, err = scopes.Leaf("g", "s")
		if err != nil {
			tb.Fatalf("%v", err)
		}
		s.gate.Attach(s.successes.Load)
	}
	return s
}

// account is the machine's part of Source.Account.
func (s *sim) account() Account {
	c := s.machine
	return Account{
		Received: c.tally.Received, Processing: c.count[processing], Settling: c.count[settling],
		Waiting: c.queued + c.count[waiting], RetryWait: c.count[retryWait],
		Acked: c.tally.Acked, DeadLettered: c.tally.DeadLettered, Returned: c.tally.Returned,
	}
}

// post hands what was condemned to the writer.
func (s *sim) post() {
	s.letters = append(s.letters, s.condemned...)
	s.condemned = nil
}

// confirm confirms the oldest dead letter.
func (s *sim) confirm() {
	it := s.letters[0]
	s.letters = s.letters[1:]
	s.dead = append(s.dead, it.m)
	s.confirmed(s.now, it, false)
}

// finish gives the outcome of an attempt, and acks if told to.
func (s *sim) finish(it *item[int], err error) {
	st := s.done(s.now, it, failureOf(err))
	s.post()
	if st.kind == stepAck {
		s.ackNow(st.it)
	}
}

func (s *sim) ackNow(it *item[int]) {
	s.acked[it.m] = true
	s.settled(it, nil)
}

// run drives the machine with a handler until the instant end, or until there
// is nothing left to do. feed is asked for messages while there is room.
func (s *sim) run(end time.Duration, handler func(m int) (took time.Duration, err error), feed func(now time.Duration) (m int, ok bool)) {
	s.runKeyed(end, 0, handler, feed)
}

func (s *sim) runKeyed(end time.Duration, keys int, handler func(m int) (time.Duration, error), feed func(time.Duration) (int, bool)) {
	const quantum = 5 * time.Millisecond
	nextSweep := s.now
	for s.now < end {
		if s.now >= nextSweep {
			s.sweep(s.now, nil)
			s.scopes.Tick(s.now)
			nextSweep = s.now + stormEvery
		}
		for s.room() > 0 && feed != nil {
			m, ok := feed(s.now)
			if !ok {
				break
			}
			var key uint64
			if keys > 0 && s.order() == OrderKey {
				key = uint64(m % keys)
			}
			s.put(s.now, m, key, 1)
		}
		st := s.next(s.now)
		s.post()
		switch st.kind {
		case stepHandle:
			s.calls++
			took, err := handler(st.it.m)
			s.now += took
			if err == nil {
				s.handled = append(s.handled, st.it.m)
			}
			s.finish(st.it, err)
		case stepAck:
			s.ackNow(st.it)
		default:
			at := s.now + quantum
			if st.at > s.now {
				at = min(at, st.at)
			}
			s.now = at
		}
		for len(s.letters) > 0 {
			s.confirm()
		}
	}
}

// counter feeds n messages at a rate.
func counter(n int, every time.Duration) func(time.Duration) (int, bool) {
	i := -1
	var start time.Duration
	return func(now time.Duration) (int, bool) {
		if i < 0 {
			i, start = 0, now
		}
		if i >= n || now < start+time.Duration(i)*every {
			return 0, false
		}
		i++
		return i - 1, true
	}
}

// errDown and errBad are of unknown class, errRefused is a dependency's.
var (
	errDown    = errors.New("dial tcp: connection refused")
	errBad     = errors.New("bad")
	errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
)

// failureOf is the result of a handler call.
func failureOf(err error) result {
	r := resultOf(err, nil)
	r.class = Classify(err)
	return r
}

func inOrder(t *testing.T, ms []int, key func(int) int) {
	t.Helper()
	last := map[int]int{}
	for _, m := range ms {
		k := key(m)
		if before, ok := last[k]; ok && before >= m {
			t.Fatalf("key %d: %d handled after %d", k, m, before)
		}
		last[k] = m
	}
}

func one(int) int { return 0 }

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

// everyThird admits one of three.
type everyThird struct{ n int }

func (e *everyThird) Admit(time.Duration) time.Duration {
	if e.n++; e.n%3 == 0 {
		return 0
	}
	return time.Second
}

// Every message is in exactly one state at every step of a random run.
func TestAccountingIdentity(t *testing.T) {
	steps := 0
	run := func(t *rapid.T) {
		order := rapid.SampledFrom([]Order{OrderSource, OrderKey, OrderNone}).Draw(t, "order")
		p := Policy{
			Order: order, Window: rapid.IntRange(2, 40).Draw(t, "window"),
			NoBreaker: rapid.IntRange(0, 4).Draw(t, "nobreaker") == 0,
			Retry:     Retry{Attempts: rapid.IntRange(1, 6).Draw(t, "attempts")},
		}
		if order != OrderSource {
			p.Workers = rapid.IntRange(1, min(4, p.Window)).Draw(t, "workers")
		}
		s := newSim(t, p)
		s.log = rapid.Bool().Draw(t, "log")
		s.inPlace = rapid.IntRange(0, 3).Draw(t, "in place") == 0
		if rapid.IntRange(0, 3).Draw(t, "paced") == 0 {
			s.letterPace = &everyThird{}
		}
		s.suspects = map[string]suspect{"3": {tries: 4, attempts: 4}, "4": {tries: 1, attempts: 1}, "13": {tries: 9}}
		next, in := 0, 0
		var running, acking []*item[int]
		succeeded := map[uint64][]int{}
		keyOf := func(m int) uint64 { return uint64(m) % 5 }
		laneOf := func(m int) uint64 {
			if order != OrderKey {
				return 0
			}
			return keyOf(m)
		}
		down := false
		check := func() {
			steps++
			if err := s.account().Check(); err != nil {
				t.Fatal(err)
			}
			if err := recount(s.machine, s.now); err != nil {
				t.Fatal(err)
			}
			if got := s.account().Unsettled(); got > p.Window {
				t.Fatalf("%d unsettled in a window of %d", got, p.Window)
			}
			if len(s.unmarked) > p.Window+farWitnesses {
				t.Fatalf("%d unmarked in a window of %d", len(s.unmarked), p.Window)
			}
			if len(running) != s.count[processing] {
				t.Fatalf("%d running, %d counted", len(running), s.count[processing])
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				for range rapid.IntRange(1, 10).Draw(t, "n") {
					if s.room() > 0 {
						s.put(s.now, next, laneOf(next), 1)
						next++
						in++
					}
				}
			},
			"next": func(t *rapid.T) {
				st := s.next(s.now)
				s.post()
				switch st.kind {
				case stepHandle:
					running = append(running, st.it)
				case stepAck:
					acking = append(acking, st.it)
				}
			},
			"adopt": func(t *rapid.T) {
				if s.quiet(s.now) {
					s.tally.Received++
					running = append(running, s.adopt(s.now-time.Second, next, laneOf(next), 1))
					next++
					in++
				}
			},
			"done": func(t *rapid.T) {
				if len(running) == 0 {
					return
				}
				i := rapid.IntRange(0, len(running)-1).Draw(t, "i")
				it := running[i]
				running = append(running[:i], running[i+1:]...)
				var err error
				switch rapid.IntRange(0, 9).Draw(t, "outcome") {
				case 0:
					err = Permanent(errDown)
				case 1:
					err = Backoff(errDown, s.origin.Add(s.now+time.Duration(rapid.IntRange(-1, 5).Draw(t, "s"))*time.Second))
				case 2:
					err = Ignore(errDown)
				case 3, 4:
					err = errDown
				default:
					if down || it.m%10 == 3 {
						err = errDown
					}
				}
				if err == nil {
					succeeded[keyOf(it.m)] = append(succeeded[keyOf(it.m)], it.m)
				}
				r := failureOf(err)
				r.name, r.known = fmt.Sprint(it.m), true
				st := s.done(s.now, it, r)
				for _, c := range s.condemned {
					guess := c.exhausted && s.now-c.exhaustedAt >= p.withDefaults(Limits{}).Retry.Patience
					if !c.permanent && !guess && c.after < proofs {
						t.Fatalf("message %d dead-lettered as %q without proof", c.m, c.verdict)
					}
				}
				s.post()
				if st.kind == stepAck {
					acking = append(acking, st.it)
				}
			},
			"ack": func(t *rapid.T) {
				if len(acking) > 0 {
					var err error
					if rapid.IntRange(0, 9).Draw(t, "ackfails") == 0 {
						err = errDown
					}
					s.settled(acking[0], err)
					acking = acking[1:]
				}
			},
			"confirm": func(*rapid.T) {
				if len(s.letters) > 0 {
					s.confirm()
				}
			},
			"time": func(t *rapid.T) {
				s.now += time.Duration(rapid.Int64Range(1, int64(20*time.Second)).Draw(t, "d"))
				s.sweep(s.now, nil)
				s.scopes.Tick(s.now)
			},
			"outage": func(*rapid.T) { down = !down },
			"pause":  func(t *rapid.T) { s.paused = rapid.Bool().Draw(t, "paused") },
			"force": func(t *rapid.T) {
				if s.gate == nil {
					return
				}
				if rapid.Bool().Draw(t, "open") {
					s.gate.Force(s.now, time.Second, CauseOperator)
				} else {
					s.gate.ForceClosed(s.now, CauseOperator)
				}
				s.notice(s.now)
			},
			"": func(*rapid.T) { check() },
		})
		for key, ms := range succeeded {
			if order == OrderNone {
				break
			}
			for i := 1; i < len(ms); i++ {
				if ms[i] <= ms[i-1] {
					t.Fatalf("key %d: %d succeeded after %d", key, ms[i], ms[i-1])
				}
			}
		}
		// The end: everything is given back or is with a handler, writer or ack.
		s.ended = true
		rest, _ := s.drain(s.now)
		a := s.account()
		if err := a.Check(); err != nil {
			t.Fatal(err)
		}
		if a.Waiting != 0 || a.RetryWait != 0 || uint64(len(rest)) > a.Returned {
			t.Fatalf("after the end: %+v, %d given back", a, len(rest))
		}
		seen := map[int]bool{}
		for _, m := range rest {
			if seen[m] || s.acked[m] {
				t.Fatalf("message %d given back twice or after its ack", m)
			}
			seen[m] = true
		}
	}
	for steps < 100_000 && !t.Failed() {
		rapid.Check(t, run)
	}
	t.Logf("%d steps", steps)
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
	if cause != CauseStorm {
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
