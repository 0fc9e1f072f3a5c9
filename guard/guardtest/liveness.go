// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// liveness are the rules about time under the default policy: poison is dead-lettered soon,
// and handling restarts soon after an outage, both without help.
//
// All times come from the handler's calls. On a real broker a rule has three tries and the
// best counts. There the time that healthy messages took before, from their publication
// on, is subtracted: it is the cost of machine and broker.
var liveness = []rule{
	burstRule("poison-burst", 1, 2*time.Second, unknownPoison),
	burstRule("poison-burst", 3, 2*time.Second, unknownPoison),
	burstRule("poison-burst", 8, 2*time.Second, unknownPoison),
	burstRule("poison-burst", 20, 2*time.Second, unknownPoison),
	burstRule("poison-burst", 64, 2*time.Second, unknownPoison),
	burstRule("poison-class", 1, time.Second, malformed),
	burstRule("poison-class", 8, time.Second, malformed),
	burstRule("poison-class", 64, time.Second, malformed),
	{
		name: "recovery", says: "soon after an outage the handler is called again",
		run: func(x *run) {
			x.defaults()
			d := x.outageTime()
			x.best("from the end of the outage to the first success", func() (took, limit time.Duration) {
				o := x.recovers(d, 0, nil)
				return o.idle, soonAfter(d)
			})
		},
	},
	{
		name: "outage-head", says: "poison at the head when an outage ends delays what is behind it by a second each",
		run: func(x *run) {
			x.defaults()
			d := x.outageTime()
			healthy := x.recovers(d, 0, nil).drained
			for n := 1; n <= 2; n++ {
				x.best(fmt.Sprintf("with %d, from the end of the outage until all is handled", n), func() (took, limit time.Duration) {
					return x.recovers(d, n, nil).drained, healthy + time.Duration(n)*time.Second + soonAfter(d)
				})
			}
		},
	},
	{
		name: "refused", says: "an outage of refused connections costs no message, no order and few calls",
		run: func(x *run) {
			x.defaults()
			d := x.outageTime()
			x.best("from the end of the outage to the first success", func() (took, limit time.Duration) {
				o := x.recovers(d, 0, refused())
				if most := x.mostCalls(o.published, d, 1); o.calls > most {
					x.errorf("%d calls in an outage of %s, more than %d", o.calls, d, most)
				}
				return o.idle, soonAfter(d)
			})
		},
	},
}

func burstRule(name string, n int, least time.Duration, poison func() error) rule {
	return rule{
		name: fmt.Sprintf("%s-%d", name, n),
		says: fmt.Sprintf("%d poison messages in a row are dead-lettered and nothing else is, soon", n),
		needs: func(f Features) string {
			return lack(f.RealTime && n > 8 && os.Getenv("STORMGUARD_FULL") == "", "RealTime unset, or STORMGUARD_FULL")
		},
		run: func(x *run) {
			x.defaults()
			x.publish(behind)
			x.start()
			x.handled(behind)
			x.best("from the first call of the poison until all behind it is handled", func() (took, limit time.Duration) {
				return x.burst(n, poison()), least + time.Duration(n)*time.Second/2
			})
		},
	}
}

// behind is how many healthy messages follow a burst.
const behind = 10

func unknownPoison() error { return errPoison }

// malformed is the error of a message whose JSON does not have the expected type.
func malformed() error {
	var order struct {
		ID int `json:"id"`
	}
	return fmt.Errorf("order: %w", json.Unmarshal([]byte(`{"id":"x"}`), &order))
}

// refused is the error of a dependency that is down.
func refused() error {
	return fmt.Errorf("store: %w", os.NewSyscallError("connect", errRefused))
}

// soonAfter is how soon after an outage of d the handler must be called again.
func soonAfter(d time.Duration) time.Duration { return time.Second + d/10 }

func (x *run) outageTime() time.Duration { return x.span(35*time.Second, 5*time.Second) }

// defaults uses the guard's default policy, except for order and workers.
func (x *run) defaults() {
	x.policy = guard.Policy{Order: x.policy.Order, Workers: x.policy.Workers}
}

// best checks a time against its limit. On a real broker the machine may be busy otherwise,
// so the best of three tries counts.
func (x *run) best(what string, try func() (took, limit time.Duration)) {
	x.t.Helper()
	tries := 1
	if x.f.RealTime {
		tries = 3
	}
	for n := 1; ; n++ {
		took, limit := try()
		x.t.Logf("%s: %s, at most %s", what, took, limit)
		if took <= limit || x.t.Failed() {
			return
		}
		if n == tries {
			x.errorf("%s: %s, more than %s, in %d tries", what, took, limit, tries)
			return
		}
	}
}

// healthy publishes messages and returns how long they took.
func (x *run) healthy(n int) time.Duration {
	x.t.Helper()
	from := time.Now()
	first := x.numbers + 1
	x.publish(n)
	x.eventually("healthy messages are handled", func() bool { return x.allHandled(first, x.numbers) })
	return x.lastSuccess(first, x.numbers).Sub(from)
}

func (x *run) allHandled(first, last uint64) bool {
	done := x.h.Successes()
	for n := first; n <= last; n++ {
		if done[n] == 0 {
			return false
		}
	}
	return true
}

// lastSuccess is when the last of the messages first to last had its first success.
func (x *run) lastSuccess(first, last uint64) (at time.Time) {
	seen := make(map[uint64]bool)
	for _, c := range x.h.Calls() {
		if c.Outcome != Succeeded || c.Seq < first || c.Seq > last || seen[c.Seq] {
			continue
		}
		seen[c.Seq] = true
		if c.End.After(at) {
			at = c.End
		}
	}
	return at
}

// trickle publishes a message every 50 ms until cond holds.
func (x *run) trickle(what string, cond func() bool) {
	x.t.Helper()
	start := time.Now()
	for !cond() {
		if time.Since(start) > x.deadline() {
			x.fatalf("not so after %s: %s; %s", x.deadline(), what, x.describe())
		}
		x.publish(1)
		x.pass(50*time.Millisecond, 50*time.Millisecond)
		x.look()
	}
}

// bad makes the next n messages always fail with err.
func (x *run) bad(n int, err error) {
	for i := range uint64(n) {
		x.h.On(x.numbers+1+i, repeat(Fail(err))...)
		x.expect(x.numbers + 1 + i)
	}
}

// gone waits until so many dead letters are written, and publishes meanwhile.
func (x *run) gone(letters uint64) {
	x.t.Helper()
	s := x.source()
	x.trickle(fmt.Sprintf("%d messages are dead-lettered", letters), func() bool {
		return s.Account().DeadLettered >= letters
	})
}

// burst publishes n poison messages with healthy messages behind them. It returns the time
// from the first call of the poison until both are done: the last call of the poison, and
// the success of all messages behind it. On a real broker it subtracts the time of as many
// healthy messages.
func (x *run) burst(n int, err error) time.Duration {
	x.t.Helper()
	var machine time.Duration
	if x.f.RealTime {
		machine = x.healthy(n + behind)
	}
	letters := x.source().Account().DeadLettered + uint64(n)
	first := x.numbers + 1
	x.bad(n, err)
	x.publish(n + behind)
	last := x.numbers
	x.gone(letters)
	x.eventually("what is behind the poison is handled", func() bool { return x.allHandled(first+uint64(n), last) })
	end := x.lastSuccess(first+uint64(n), last)
	var from time.Time
	for _, c := range x.h.Calls() {
		if c.Seq < first || c.Seq >= first+uint64(n) {
			continue
		}
		if from.IsZero() {
			from = c.Start
		}
		if c.End.After(end) {
			end = c.End
		}
	}
	return end.Sub(from) - machine
}

// recovered has the measured times and counts of an outage.
type recovered struct {
	idle      time.Duration // from the end of the outage to the first success
	drained   time.Duration // from the end of the outage until all its messages were handled
	calls     int           // calls during the outage
	published int           // messages published during the outage
}

// recovers runs an outage of d under a new Guard, since a breaker remembers the outage
// before. The first n messages that are published in the outage are poison. err is the
// dependency's error; nil is an error of unknown class.
func (x *run) recovers(d time.Duration, n int, err error) (o recovered) {
	x.t.Helper()
	x.start()
	machine := x.healthy(behind)
	if !x.f.RealTime {
		machine = 0
	}
	if err == nil {
		x.recoveries++
	}
	calls, began := x.h.Len(), time.Now()
	x.h.Down(err)
	first := x.numbers + 1
	x.bad(n, errPoison)
	x.publish(n + 20)
	for range 10 {
		time.Sleep(time.Until(began) + d/10)
		began = began.Add(d / 10)
		x.publish(2)
	}
	x.rest()
	last := x.numbers
	o.calls, o.published = x.h.Len()-calls, int(last-first)+1
	if dead := x.source().Account().DeadLettered; dead > 0 {
		x.errorf("%d dead letters in an outage", dead)
	}
	up := time.Now()
	x.h.Up()
	x.gone(uint64(n))
	x.eventually("what was held is handled", func() bool { return x.allHandled(first+uint64(n), last) })
	o.drained = x.lastSuccess(first, last).Sub(up) - machine
	o.idle = -machine
	for _, c := range x.h.Calls() {
		if c.Outcome == Succeeded && !c.Start.Before(up) {
			o.idle += c.End.Sub(up)
			break
		}
	}
	x.eventually("the broker has nothing pending", func() bool { return x.nothingMissing() && x.backlog().Pending <= 0 })
	if a, ok := x.subject.(Auditor); ok {
		x.eventually("the guard received what the broker handed over", func() bool { return x.received() == uint64(a.Handed()) })
	}
	x.stop()
	return o
}

// nothingMissing reports whether every published message is handled or dead-lettered.
func (x *run) nothingMissing() bool {
	done := x.h.Successes()
	for n := uint64(1); n <= x.numbers; n++ {
		if done[n] == 0 && !x.dead[n] {
			return false
		}
	}
	return true
}

// callsOfLook is the number of calls of a probe that looks behind its head: 1, and on
// average up to 4.5 others with a call of the head after each. A probe that looks beside
// its head makes 7.
const callsOfLook = 10

// mostCalls is the most calls in an outage of d in which n messages come: calls that run
// when it begins, calls that open the breaker, and each calls for every probe.
func (x *run) mostCalls(n int, d time.Duration, each int) int {
	backoff := x.policy.Breaker.WithDefaults()
	probes := 0
	for open := time.Duration(0); open < d; probes++ {
		open += backoff.PeriodAfter(probes+1, open)
	}
	if x.f.Options != nil { // a fleet has its own backoff
		probes = max(probes, 40+int(d/time.Second))
	}
	most := 60 + 4*max(x.policy.Workers, 1) + each*probes
	if x.f.Passive && x.policy.Workers == 0 {
		most += n
	}
	return most
}
