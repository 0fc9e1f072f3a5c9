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
	looksMost = 64               // messages that one look tries at most
)

// unguarded is how many messages a loop without a guard handles in a time: with the
// same calls, retries, delays, order and window, and no breaker.
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
	var now time.Duration     // the loop's
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

// unguardedCalls is how often a loop without a guard calls a dependency that is down:
// attempts for each message, one after the other, with no delay between them.
func unguardedCalls(l load, c class, length time.Duration) float64 {
	each := l.call
	if c == hang {
		each = callLimit
	}
	return max(1, min(length.Seconds()/each.Seconds(), attempts*l.rate*length.Seconds()))
}

// fewestCalls is what an outage costs however few calls a loop without a guard makes:
// one message's attempts; of each poison message that is being retried when the outage
// begins, a call if its error says that the dependency is down, else its attempts; one
// look, and what its first groups ask the head, if the errors are of unknown class; and
// the probes without which the recovery could not be seen within a tenth of the outage,
// each with one message more where calls hang.
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

// retried is how much poison is being retried at an instant: the mean of what comes
// meanwhile, two standard deviations more, and no more than there are lanes.
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

// rampFor is how long the guard's ramp takes to let so many messages through.
func rampFor(n int) time.Duration {
	return guard.Ramp{}.WithDefaults().At(float64(max(n, 1)))
}

// poisonCosts is how long a poison message of unknown errors keeps an ordered source:
// the delays before its retries, half of each on average; one delay more after the
// proof of life; and its calls, with that of the witness.
func poisonCosts(call time.Duration) time.Duration {
	cost := time.Duration(0)
	for n := range attempts - 1 {
		cost += retryBase << n / 2
	}
	cost += retryBase / 2
	return cost + (attempts+3)*call
}

// doubtCosts is how much longer a poison message may keep a source whose dependency
// failed at random before: it gets so many attempts that chance is no excuse, and a
// delay before each.
func doubtCosts(flaky float64) time.Duration {
	if flaky <= 0 {
		return 0
	}
	const chance = 1e-6
	more := math.Ceil(math.Log(chance)/math.Log(flaky)) - attempts
	return time.Duration(max(0, more)) * (retryBase << (attempts - 1))
}
