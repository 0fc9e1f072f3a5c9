// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// The settings that an unguarded loop shares with the guard's defaults.
const (
	attempts  = 5
	retryBase = 50 * time.Millisecond
	retryMax  = 10 * time.Second
	window    = 1024
	callLimit = 30 * time.Second // Policy.Timeout
	patience  = 10 * time.Second // Retry.Patience
	looksMost = 64               // most messages that one look tries
)

// unguarded simulates a loop without a guard for the time length, and returns the number of
// handled messages. The loop has the same calls, retries, delays, order and window as a
// guard, and no breaker.
func unguarded(l load, seed uint64, length time.Duration) (handled int) {
	r := rand.New(rand.NewPCG(seed, 2))
	keys := max(l.keys, 1)
	type job struct {
		message, tries int
		poison         bool
	}
	var ready []int           // lanes whose head may be tried
	queues := map[int][]job{} // by lane
	var waits delays          // lanes whose head waits for its retry
	var now time.Duration     // time since the loop began
	next, unsettled, begun := 0, 0, map[int]bool{}
	lane := func(m int) int {
		switch l.order {
		case guard.OrderKey:
			return m % int(keys)
		case guard.OrderNone:
			return m
		default:
			return 0
		}
	}
	for now < length {
		for unsettled < window {
			if at := time.Duration(float64(next) / l.rate * float64(time.Second)); at > now {
				break
			}
			at := lane(next)
			queues[at] = append(queues[at], job{message: next, poison: r.Float64() < l.poison})
			if !begun[at] {
				begun[at] = true
				ready = append(ready, at)
			}
			next++
			unsettled++
		}
		for len(waits) > 0 && waits[0].at <= now {
			ready = append(ready, heap.Pop(&waits).(delay).lane) //nolint:forcetypeassert // it holds nothing else
		}
		if len(ready) == 0 {
			soon := length
			if unsettled < window {
				soon = min(soon, time.Duration(float64(next)/l.rate*float64(time.Second)))
			}
			if len(waits) > 0 {
				soon = min(soon, waits[0].at)
			}
			now = max(soon, now+1)
			continue
		}
		at := ready[0]
		ready = ready[1:]
		head := &queues[at][0]
		now += l.call
		head.tries++
		failed := head.poison || r.Float64() < l.flaky
		if failed && head.tries < attempts {
			wait := time.Duration(r.Int64N(int64(min(retryMax, retryBase<<(head.tries-1)))))
			heap.Push(&waits, delay{now + wait, at})
			continue
		}
		if !failed {
			handled++
		}
		unsettled--
		if queues[at] = queues[at][1:]; len(queues[at]) > 0 {
			ready = append(ready, at)
		} else {
			delete(queues, at)
			delete(begun, at)
		}
	}
	return handled
}

// delay is when a lane's head is tried again.
type delay struct {
	at   time.Duration
	lane int
}

type delays []delay

func (d *delays) Len() int           { return len(*d) }
func (d *delays) Less(i, j int) bool { return (*d)[i].at < (*d)[j].at }
func (d *delays) Swap(i, j int)      { (*d)[i], (*d)[j] = (*d)[j], (*d)[i] }
func (d *delays) Push(x any)         { *d = append(*d, x.(delay)) } //nolint:forcetypeassert // it gets nothing else
func (d *delays) Pop() any {
	old := *d
	last := old[len(old)-1]
	*d = old[:len(old)-1]
	return last
}

// unguardedCalls is how often a loop without a guard calls a dependency that is down: it
// makes all attempts of each message one after the other, without delays.
func unguardedCalls(l load, c class, length time.Duration) float64 {
	each := l.call
	if c == hang {
		each = callLimit
	}
	return max(1, min(length.Seconds()/each.Seconds(), attempts*l.rate*length.Seconds()))
}

// fewestCalls is the number of calls that any outage may cost. It is the sum of
//
//   - the attempts of one message;
//   - for each poison message that is being retried when the outage begins: all attempts
//     with errors of unknown class, else one call, whose error says that the dependency is
//     down;
//   - with errors of unknown class: one look, and the calls of the head in its groups;
//   - the probes that show a recovery within a tenth of the outage, and one more message
//     for each probe if calls hang.
func fewestCalls(l load, c class, length time.Duration) float64 {
	n := attempts
	if c == unknown {
		n += 2*looksMost + attempts*l.retried()
	} else {
		n += l.retried()
	}
	backoff := breaker.Config{}.WithDefaults()
	probes := 0
	for open := time.Duration(0); open < length; probes++ {
		open += backoff.PeriodAfter(probes+1, open)
		if c == hang {
			open += callLimit
			n++
		}
	}
	return float64(n + probes)
}

// retried is the number of poison messages being retried at an instant: the mean number
// that arrives during retries, plus two standard deviations, but at most the number of
// lanes.
func (l load) retried() int {
	mean := l.rate * l.poison * poisonCosts(l.call).Seconds()
	n := int(math.Ceil(mean + 2*math.Sqrt(mean)))
	switch l.order {
	case guard.OrderSource:
		return min(n, 1)
	case guard.OrderKey:
		return min(n, int(max(l.keys, defaultKeys)))
	default:
		return n
	}
}

// rampFor is how long the guard's ramp takes to let n messages through.
func rampFor(n int) time.Duration {
	return guard.Ramp{}.WithDefaults().At(float64(max(n, 1)))
}

// poisonCosts is how long a poison message with unknown errors stops an ordered source. It
// adds up the delays before its retries (half of each on average), one more delay after the
// proof of life, its calls, and the call of the witness.
func poisonCosts(call time.Duration) time.Duration {
	cost := time.Duration(0)
	for n := range attempts - 1 {
		cost += retryBase << n / 2
	}
	cost += retryBase / 2
	return cost + (attempts+3)*call
}

// doubtCosts is how much longer a poison message may stop a source whose dependency failed
// at random before. The message gets so many attempts that all fail by chance only once in
// a million, and a delay before each.
func doubtCosts(flaky float64) time.Duration {
	if flaky <= 0 {
		return 0
	}
	const chance = 1e-6
	more := math.Ceil(math.Log(chance)/math.Log(flaky)) - attempts
	return time.Duration(max(0, more)) * (retryBase << (attempts - 1))
}
