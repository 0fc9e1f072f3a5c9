// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

var orders = []guard.Order{guard.OrderSource, guard.OrderKey, guard.OrderNone}

const (
	callTime = 2 * time.Millisecond
	warmUp   = 5 * time.Second
)

// The limits of the table.
const (
	passBase, passEach    = 2 * time.Second, 500 * time.Millisecond // adjacent poison: once, and for each message
	messageBase           = time.Second                             // replaces passBase if the errors blame the message
	recoveryBase          = time.Second                             // idle time after an outage, see recoveryLimit
	recoveryShare         = 10                                      // further idle time: the outage divided by this
	recoveryMost          = 30 * time.Second                        // most idle time by recoveryShare
	headEach              = time.Second                             // for each poison message at the head
	flakyLetters          = 20                                      // healthy dead letters with unknown errors
	mostCalls             = 1                                       // percent of an unguarded loop's calls, but at least fewestCalls
	mostOvertaken         = 5                                       // percent of the outages, with calls of 2 ms
	formulaShare          = 0.9                                     // part of the formula's rate: retry delays are drawn
	idleLetters           = 6                                       // guesses in 20 minutes without traffic
	slowLetters           = 2                                       // guesses in 20 minutes with a message now and then
	flapLetters           = 20                                      // healthy dead letters an hour with unknown errors: the small balance
	guessShare            = 120                                     // percent of the patience before a guess
	probeEvery            = 30 * time.Second                        // between the probes of a breaker that was open for long
	outageRate            = 1000
	manyRuns, manyAll     = 150, 1500
	randomRuns, randomAll = 40, 2000
	mostAdjacent          = 64  // poison messages in a row
	provenCredits         = 500 // credits for proven poison at the start
	sparseAll             = 110 // runs of 96 hours each
	sparseGaps            = 3   // gaps between messages until one comes, and shows that the dependency is back
	sparseMost            = 8   // guesses of a source in an outage of at most two hours: each waits twice as long as the one before
)

// specs returns the rows of the table.
func specs(all bool) []spec {
	s := sheet{all: all}
	s.poison()
	s.idle()
	s.flaky()
	s.flapping()
	s.outages()
	s.recoveries()
	s.add("random", guard.OrderSource, unknown, s.many(randomRuns, randomAll), (*trial).random)
	last := &s.rows[len(s.rows)-1]
	last.order, last.class = "mixed", "mixed"
	s.add("random-sparse", guard.OrderSource, unknown, s.many(2, sparseAll), func(t *trial) error { return t.sparse(time.Duration(s.many(6, 96)) * time.Hour) })
	last = &s.rows[len(s.rows)-1]
	last.order, last.class = "mixed", "mixed"
	return s.rows
}

// sheet collects the rows of the table.
type sheet struct {
	all  bool
	rows []spec
}

func (s *sheet) add(name string, o guard.Order, c class, parts int, do func(*trial) error) *spec {
	s.rows = append(s.rows, spec{name: name, order: o.String(), class: c, parts: parts, do: do})
	return &s.rows[len(s.rows)-1]
}

// many is the number of a row's runs: n, or all with Config.All.
func (s *sheet) many(n, all int) int {
	if s.all {
		return all
	}
	return n
}

// poison adds the rows with adjacent poison.
func (s *sheet) poison() {
	for _, n := range []int{1, 2, 3, 5, 8, 20, 64} {
		for _, c := range []class{unknown, message} {
			for _, o := range orders {
				s.add(fmt.Sprintf("adjacent-%d-%s-%s", n, c, o), o, c, s.many(1, 20), func(t *trial) error { return t.adjacent(n, c, o) })
			}
		}
		for _, o := range orders {
			s.add(fmt.Sprintf("adjacent-%d-idle-unknown-%s", n, o), o, unknown, s.many(1, 20), func(t *trial) error { return t.adjacentIdle(n, o) })
			s.add(fmt.Sprintf("alone-%d-%s", n, o), o, unknown, s.many(1, 20), func(t *trial) error { return t.alone(n, o) })
		}
	}
}

// idle adds the rows with an outage at a source with little or no traffic.
func (s *sheet) idle() {
	for _, o := range orders {
		for _, n := range []int{1, 8, 64} {
			s.add(fmt.Sprintf("idle-outage-20m-%d-%s", n, o), o, unknown, s.many(1, 20), func(t *trial) error { return t.idleOutage(n, o) })
		}
		for _, every := range []time.Duration{5 * time.Second, 20 * time.Second, time.Minute, 5 * time.Minute} {
			s.add(fmt.Sprintf("slow-outage-20m-%s-%s", short(every), o), o, unknown, s.many(1, 20), func(t *trial) error { return t.slowOutage(every, o) })
		}
	}
}

// flapping adds the rows with a dependency that is in turn up and down for equal times.
func (s *sheet) flapping() {
	for _, o := range orders {
		for _, c := range []class{unknown, refused} {
			for _, rate := range []float64{50, 100} {
				for _, span := range []time.Duration{time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second} {
					s.add(fmt.Sprintf("flap-%s-%g-%s-%s", short(span), rate, c, o), o, c, s.many(1, 5), func(t *trial) error {
						return t.flap(load{order: o, rate: rate, call: callTime}, span, c)
					}).long = rate != 100 || c != unknown || span != time.Second && span != 10*time.Second
				}
			}
		}
	}
}

// flaky adds the rows with steady poison, or with a dependency that fails at random.
func (s *sheet) flaky() {
	steady := func(name string, o guard.Order, l load) {
		l.order, l.call = o, callTime
		s.add(name+"-"+o.String(), o, unknown, s.many(1, 5), func(t *trial) error { return t.steady(l) })
	}
	for _, o := range orders {
		steady("steady-9-10", o, load{rate: 10, poison: 0.09})
	}
	steady("steady-9-100", guard.OrderSource, load{rate: 100, poison: 0.09})
	steady("steady-1-100", guard.OrderSource, load{rate: 100, poison: 0.01})
	steady("flaky-5-2-20", guard.OrderSource, load{rate: 20, poison: 0.05, flaky: 0.02, fails: unknown})
	steady("flaky-20-20", guard.OrderSource, load{rate: 20, flaky: 0.2, fails: unknown})
	for _, share := range []int{20, 50} {
		for _, o := range orders {
			for _, c := range []class{unknown, refused} {
				name := fmt.Sprintf("flaky-%d-1000-%s", share, o)
				if c != unknown {
					name += "-" + string(c)
				}
				l := load{order: o, rate: 1000, call: callTime, keys: 128, flaky: float64(share) / 100, fails: c}
				s.add(name, o, c, s.many(1, 5), func(t *trial) error { return t.flakyMuch(l) })
			}
		}
	}
}

func (s *sheet) outages() {
	for _, o := range orders {
		for _, length := range []time.Duration{time.Second, 20 * time.Second, 5 * time.Minute, 20 * time.Minute} {
			for _, c := range []class{refused, unknown, hang} {
				for _, with := range []struct {
					suffix string
					poison float64
					burst  int
					long   bool
				}{{"", 0, 0, false}, {"-poison-3", 0.03, 0, false}, {"-burst-8", 0, 8, false}, {"-poison-3-burst-8", 0.03, 8, true}} {
					name := "outage-" + short(length) + "-" + string(c)
					if c == hang {
						name += short(callLimit)
					}
					name += with.suffix
					if o != guard.OrderSource {
						name += "-" + o.String()
					}
					l := load{order: o, rate: outageRate, call: callTime, poison: with.poison}
					s.add(name, o, c, s.many(1, 5), func(t *trial) error { return t.outage(l, length, c, with.burst) }).
						long = with.long || o != guard.OrderSource
				}
			}
		}
	}
	for _, o := range orders[:2] {
		for n := range 3 {
			s.add(fmt.Sprintf("outage-35s-head-%d-%s", n, o), o, unknown, s.many(1, 20), func(t *trial) error { return t.head(o, n) })
		}
	}
}

// recoveries adds the rows that measure how soon a source goes on after an outage, and
// which share of the outages has an overtaken message.
func (s *sheet) recoveries() {
	for _, length := range []time.Duration{time.Second, 20 * time.Second, 5 * time.Minute, 20 * time.Minute} {
		s.add("recovery-"+short(length), guard.OrderSource, unknown, s.many(5, 100), func(t *trial) error { return t.recovery(length) })
	}
	for _, span := range []struct {
		name     string
		low, top time.Duration
	}{{"0.2-2s", 200 * time.Millisecond, 2 * time.Second}, {"2-30s", 2 * time.Second, 30 * time.Second}, {"30-330s", 30 * time.Second, 330 * time.Second}} {
		for _, call := range []time.Duration{2 * time.Millisecond, 50 * time.Millisecond, 700 * time.Millisecond} {
			s.add(fmt.Sprintf("many-%s-%s", span.name, short(call)), guard.OrderSource, unknown, s.many(manyRuns, manyAll),
				func(t *trial) error { return t.many(span.low, span.top, call) })
		}
	}
}

// short formats a duration for a row's name: 5m, 20s, 50ms.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	return s
}

// world makes a world for the trial, calls run, and closes the world.
func (t *trial) world(l load, run func(w *world) error) error {
	w, err := newWorld(t.ctx, t.seed, l)
	if err != nil {
		return err
	}
	runErr := run(w)
	n := w.sum()
	t.Poison += n.poison
	t.Hours += w.now().Hours()
	err = w.close()
	t.Missed = append(t.Missed, w.wrong...)
	if runErr == nil {
		runErr = err
	}
	return runErr
}

// adjacent sends n poison messages in a row, and a healthy one behind them.
func (t *trial) adjacent(n int, c class, o guard.Order) error {
	return t.adjacentOf(load{order: o, rate: 10, call: callTime, says: c}, n, c)
}

func (t *trial) adjacentOf(l load, n int, c class) error {
	return t.world(l, func(w *world) error {
		s := w.all[0]
		w.pass(warmUp)
		limit := passBase + time.Duration(n)*passEach
		if c == message {
			limit = messageBase + time.Duration(n)*passEach
		}
		t.behind(w, s, n, limit, func() int { s.send(n, true); return s.send(1, false) })
		t.letters(w.sum().healthyLetters, 0)
		return nil
	})
}

// adjacentIdle sends n poison messages to a source without other traffic. It sends the
// healthy message when the guard has stood still for 30 s.
func (t *trial) adjacentIdle(n int, o guard.Order) error {
	return t.world(load{order: o, rate: 10, call: callTime, says: unknown}, func(w *world) error {
		s := w.all[0]
		w.pass(warmUp)
		s.quiet()
		w.pass(time.Second)
		s.send(n, true)
		w.pass(30 * time.Second)
		t.behind(w, s, n, passBase+time.Duration(n)*passEach+patience, func() int { return s.send(1, false) })
		t.letters(w.sum().healthyLetters, 0)
		return nil
	})
}

// alone sends n poison messages, and then nothing for an hour. In this hour only guesses
// can dead-letter them.
func (t *trial) alone(n int, o guard.Order) error {
	return t.world(load{order: o, rate: 10, call: callTime, says: unknown}, func(w *world) error {
		s := w.all[0]
		w.pass(warmUp)
		s.quiet()
		w.pass(time.Second)
		from := w.now()
		s.send(n, true)
		w.until(time.Hour, func() bool { return w.sum().letters > 0 })
		doubt := n - 1
		if n > 3 { // the guard sees a storm first
			doubt = 6
		}
		first, limit := s.lastAt()-from, passBase+(patience<<doubt)*guessShare/100
		if w.sum().letters == 0 {
			first = never
		}
		t.passed(first, limit)
		w.pass(from + time.Hour - w.now())
		s.send(1, false)
		now, limit := w.now(), passBase+time.Duration(n)*passEach+probeEvery
		w.until(3*limit, func() bool { return w.sum().letters == n })
		took := s.lastAt() - now
		if w.sum().letters < n {
			took = never
		}
		t.drained(max(took, 0), limit)
		if took == never {
			t.missf("%d of %d dead-lettered", w.sum().letters, n)
		}
		t.letters(w.sum().healthyLetters, 0)
		return nil
	})
}

// idleOutage sends n healthy messages at once while the dependency is down, and no more.
func (t *trial) idleOutage(n int, o guard.Order) error {
	return t.world(load{order: o, rate: 10, call: callTime}, func(w *world) error {
		s := w.all[0]
		w.pass(warmUp)
		s.quiet()
		w.pass(time.Second)
		w.fail(unknown)
		s.send(n, false)
		return t.guesses(w, idleLetters)
	})
}

// slowOutage is an outage at a source with little traffic.
func (t *trial) slowOutage(every time.Duration, o guard.Order) error {
	return t.world(load{order: o, rate: 1 / every.Seconds(), call: callTime}, func(w *world) error {
		w.pass(3 * every)
		w.fail(unknown)
		most := slowLetters
		if every < patience {
			most = 0
		}
		return t.guesses(w, most)
	})
}

// guesses lets an outage last 20 minutes and ends it. It allows most guesses.
func (t *trial) guesses(w *world, most int) error {
	const length = 20 * time.Minute
	w.pass(length)
	w.all[0].aim()
	w.mend()
	limit := recoveryLimit(length, unknown) + passBase
	from := w.now()
	w.until(3*limit, func() bool { return w.all[0].reachedAt() >= 0 })
	drained := w.all[0].reachedAt()
	if drained >= 0 {
		drained = max(0, drained-from)
	}
	t.drained(drained, limit)
	t.letters(w.sum().healthyLetters, most)
	return nil
}

// flap takes the dependency away and brings it back, in turns of span, for an hour.
func (t *trial) flap(l load, span time.Duration, c class) error {
	return t.world(l, func(w *world) error {
		w.pass(warmUp)
		for end := w.now() + time.Hour; w.now() < end && w.ctx.Err() == nil; {
			w.fail(c)
			w.pass(span)
			w.mend()
			w.pass(span)
		}
		n := w.sum()
		most := flapLetters
		if c == refused {
			most = 0
		}
		t.handled(100*float64(n.handled)/n.healthy, 0)
		t.letters(n.healthyLetters, most)
		return nil
	})
}

// behind calls send, and waits until the message that send returns is handled and all
// poison is settled.
func (t *trial) behind(w *world, s *source, n int, limit time.Duration, send func() int) {
	from := w.now()
	m := send()
	s.watch(m)
	drained := never
	w.until(3*limit+time.Minute, func() bool {
		letters := w.sum().letters
		if drained < 0 && letters == n {
			drained = s.lastAt() - from
		}
		return drained >= 0 && s.watchedTime() >= 0
	})
	passed := s.watchedTime()
	if passed >= 0 {
		passed -= from
	}
	t.passed(passed, limit)
	t.drained(drained, limit)
}

// steady runs a load for 10 minutes, and then waits 5 s for its last messages.
func (t *trial) steady(l load) error {
	const length, grace = 10 * time.Minute, 5 * time.Second
	l.says = unknown
	return t.world(l, func(w *world) error {
		w.pass(length)
		w.all[0].quiet()
		w.pass(grace)
		n := w.sum()
		each := (1-l.poison)*l.call.Seconds() + l.poison*poisonCosts(l.call).Seconds()
		least := 99.0
		switch share := 1 / each / l.rate; {
		case l.order == guard.OrderSource && share < 1:
			least = 100 * share * formulaShare
		case l.flaky >= 0.2:
			least = 90
		}
		t.handled(100*float64(n.handled)/n.healthy, least)
		most := 0
		if l.flaky > 0 {
			most = flakyLetters
		}
		t.letters(n.healthyLetters, most)
		return nil
	})
}

// flakyMuch compares the handled messages with those of a loop without a guard, at a flaky
// dependency.
func (t *trial) flakyMuch(l load) error {
	const length = 5 * time.Minute
	return t.world(l, func(w *world) error {
		w.pass(length)
		n := w.sum()
		t.handled(100*float64(n.handled)/float64(max(1, unguarded(l, t.seed, length))), 50)
		most := flakyLetters
		if l.fails == refused {
			most = 0
		}
		t.letters(n.healthyLetters, most)
		return nil
	})
}

// outage takes the dependency away for a while, and can send poison at the end.
func (t *trial) outage(l load, length time.Duration, c class, burst int) error {
	l.says = unknown
	return t.world(l, func(w *world) error {
		w.pass(warmUp)
		w.fail(c)
		w.pass(length)
		if burst > 0 {
			w.all[0].nextPoison(burst)
		}
		calls := w.mend()
		base := unguardedCalls(l, c, length)
		t.called(100*float64(calls)/base, max(mostCalls, 100*fewestCalls(l, c, length)/base))
		idle := recoveryLimit(length, c)
		if l.poison > 0 {
			idle += headEach
		}
		t.recovers(w, idle, 0)
		t.letters(w.sum().healthyLetters, 0)
		return nil
	})
}

// recoveryLimit is how long a source may be idle after an outage. A call that hangs at the
// end of the outage goes on hanging.
func recoveryLimit(length time.Duration, c class) time.Duration {
	limit := recoveryBase + min(length/recoveryShare, recoveryMost)
	if c == hang {
		limit += callLimit
	}
	return limit
}

// recovers waits for the first success after an outage, and then until all held messages
// are settled. The drained time counts from that success.
func (t *trial) recovers(w *world, idle time.Duration, each time.Duration) {
	s := w.all[0]
	w.until(2*idle+time.Minute, func() bool { return w.idle() >= 0 })
	t.passed(w.idle(), idle)
	open, poison := s.aim()
	limit := passBase + time.Duration(poison)*passEach + rampFor(open) + each
	w.until(2*limit+time.Minute, func() bool { return s.reachedAt() >= 0 })
	drained := s.reachedAt()
	if drained >= 0 {
		w.mu.Lock()
		drained -= max(w.first, 0)
		w.mu.Unlock()
	}
	t.drained(drained, limit)
}

// head is an outage of 35 s with n poison messages at the head when it ends.
func (t *trial) head(o guard.Order, n int) error {
	const length = 35 * time.Second
	return t.world(load{order: o, rate: 100, call: callTime, says: unknown}, func(w *world) error {
		w.pass(warmUp)
		w.fail(unknown)
		w.pass(length)
		w.all[0].headPoison(n)
		open, _ := w.all[0].aim()
		w.mend()
		from := w.now()
		limit := recoveryLimit(length, unknown) + passBase + rampFor(open) + time.Duration(n)*headEach
		w.until(3*limit, func() bool { return w.all[0].reachedAt() >= 0 })
		drained := w.all[0].reachedAt()
		if drained >= 0 {
			drained -= from
		}
		t.drained(drained, limit)
		t.letters(w.sum().healthyLetters, 0)
		return nil
	})
}

// recovery measures how long a source is idle after an outage.
func (t *trial) recovery(length time.Duration) error {
	return t.world(load{order: guard.OrderSource, rate: 100, call: callTime}, func(w *world) error {
		w.pass(warmUp)
		w.fail(unknown)
		w.pass(length)
		w.mend()
		limit := recoveryLimit(length, unknown)
		w.until(2*limit+time.Minute, func() bool { return w.idle() >= 0 })
		t.passed(w.idle(), limit)
		t.letters(w.sum().healthyLetters, 0)
		return nil
	})
}

// many is one outage. Its length is drawn between low and top.
func (t *trial) many(low, top, call time.Duration) error {
	r := rand.New(rand.NewPCG(t.seed, 3))
	length := low + time.Duration(r.Int64N(int64(top-low)))
	l := load{order: guard.OrderSource, rate: min(100, 0.5/call.Seconds()), call: call}
	return t.world(l, func(w *world) error {
		w.pass(warmUp + time.Duration(r.Int64N(int64(time.Second))))
		w.fail(unknown)
		w.pass(length)
		w.mend()
		limit := recoveryLimit(length, unknown) + 10*call
		w.until(2*limit+time.Minute, func() bool { return w.idle() >= 0 })
		w.pass(5 * time.Second)
		t.passed(w.idle(), limit)
		n := w.sum()
		t.letters(n.healthyLetters, 0)
		t.outages++
		if n.overtaken {
			t.overtaken++
		}
		if call <= callTime {
			t.OvertakenLimit = number(mostOvertaken)
		}
		return nil
	})
}

// dice draws for the random row.
type dice struct{ *rand.Rand }

func (d dice) chance(p float64) bool { return d.Float64() < p }

// between draws small numbers as often as large ones.
func (d dice) between(low, top float64) float64 { return low * math.Pow(top/low, d.Float64()) }

func (d dice) span(low, top time.Duration) time.Duration {
	return time.Duration(d.between(low.Seconds(), top.Seconds()) * float64(time.Second))
}

func (d dice) load() load {
	l := load{
		order: orders[d.IntN(len(orders))], parts: 1 + d.IntN(3), keys: 1 + d.Uint64N(64),
		call: d.span(time.Millisecond, 100*time.Millisecond), says: unknown, fails: unknown,
	}
	l.rate = min(d.between(2, 200), 0.5/l.call.Seconds())
	if d.chance(0.5) {
		l.poison = d.between(0.001, 0.05)
	}
	if d.chance(0.3) {
		l.says = message
	}
	if d.chance(0.5) {
		l.flaky = d.between(0.01, 0.3)
	}
	if d.chance(0.5) {
		l.fails = refused
	}
	return l
}

// random draws loads, poison, outages, flakiness and epochs. After the last fault every
// source must settle all its messages.
func (t *trial) random() error {
	d := dice{rand.New(rand.NewPCG(t.seed, 4))}
	l := d.load()
	return t.world(l, func(w *world) error {
		some := func() *source { return w.all[d.IntN(len(w.all))] }
		w.pass(warmUp)
		for range 2 + d.IntN(5) {
			var err error
			switch d.IntN(4) {
			case 0:
				w.pass(d.span(time.Second, 2*time.Minute))
			case 1:
				length := d.span(200*time.Millisecond, 10*time.Minute)
				err = d.outage(w, length, []class{unknown, refused, hang}[d.IntN(3)])
			case 2:
				some().spoil(1 + d.IntN(30))
			default:
				err = some().again()
			}
			if err != nil {
				return err
			}
			w.pass(d.span(100*time.Millisecond, 20*time.Second))
		}
		t.goesOn(w, d, w.recovery())
		most := 2 // several outages in a row count as a flapping dependency; docs/design.md
		if l.flaky > 0 && l.fails == unknown {
			most = flakyLetters * len(w.all)
		}
		t.letters(w.sum().healthyLetters, most)
		if len(t.Missed) > 0 {
			t.missf("order %v, %d sources, %.3g/s, calls of %v, %.2g %% poison (%s), %.2g %% fail (%s)",
				l.order, l.parts, l.rate, l.call.Round(time.Millisecond), 100*l.poison, l.says, 100*l.flaky, l.fails)
		}
		return nil
	})
}

// sparse draws days of little traffic, with outages, poison and epochs. After the last
// fault, when messages come, every source must settle all its messages.
func (t *trial) sparse(length time.Duration) error {
	d := dice{rand.New(rand.NewPCG(t.seed, 5))}
	l := d.load()
	l.rate, l.flaky, l.poison = d.between(1.0/600, 0.2), 0, min(l.poison, 0.01)
	return t.world(l, func(w *world) error {
		some := func() *source { return w.all[d.IntN(len(w.all))] }
		most := 0
		for w.now() < length && w.ctx.Err() == nil {
			var err error
			switch d.IntN(4) {
			case 0:
				w.pass(d.span(time.Minute, 5*time.Hour))
			case 1:
				length, c := d.span(time.Second, 2*time.Hour), []class{unknown, refused, hang}[d.IntN(3)]
				if c == unknown {
					most += sparseMost * len(w.all)
				}
				err = d.outage(w, length, c)
			case 2:
				some().spoil(1 + d.IntN(30))
			default:
				err = some().again()
			}
			if err != nil {
				return err
			}
			w.pass(d.span(time.Second, 20*time.Minute))
		}
		t.goesOn(w, d, w.recovery()+time.Duration(sparseGaps/l.rate*float64(time.Second)))
		t.letters(w.sum().healthyLetters, most)
		return nil
	})
}

// outage is one outage. During it the epochs of sources may end.
func (d dice) outage(w *world, length time.Duration, c class) error {
	w.fail(c)
	for d.chance(0.3) && length > time.Second {
		part := time.Duration(d.Int64N(int64(length)))
		w.pass(part)
		length -= part
		if err := w.all[d.IntN(len(w.all))].again(); err != nil {
			return err
		}
	}
	w.pass(length)
	w.mend()
	return nil
}

// goesOn ends all faults. Each source must settle its messages so far in time. The loads
// go on: sources without traffic have rows of their own.
func (t *trial) goesOn(w *world, d dice, idle time.Duration) {
	each := passEach + doubtCosts(w.flaky)
	w.mu.Lock()
	w.flaky = 0
	w.mu.Unlock()
	w.mend()
	from := w.now()
	limits := make([]time.Duration, len(w.all))
	for i, s := range w.all {
		if d.chance(0.3) {
			s.send(1, false)
		}
		open, poison := s.aim()
		limits[i] = idle + passBase + time.Duration(poison)*each + patience + rampFor(open) + time.Duration(open)*w.call
		limits[i] *= 2 // delays are drawn at random, and poison at the head of a long outage goes at the pace of the probes
	}
	for i, s := range w.all {
		w.until(3*limits[i], func() bool { return s.reachedAt() >= 0 })
		drained := s.reachedAt()
		if drained >= 0 {
			drained = max(0, drained-from)
		}
		t.drained(drained, limits[i])
	}
}
