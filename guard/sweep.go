// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// stormEvery is how often the storm detector checks its three readings.
const stormEvery = 250 * time.Millisecond

// causeStorm is the breaker's cause when the detector opened it.
const causeStorm breaker.Cause = "storm"

// sweep makes time pass. It returns the contexts of handlers that are over their timeout,
// and whether a storm began or ended.
func (c *machine[M]) sweep(now time.Duration, late []*callContext) ([]*callContext, bool) {
	for _, it := range c.busy {
		ran := now - it.started
		if c.policy.Timeout > 0 && ran >= c.policy.Timeout && it.ctx != nil {
			late = append(late, it.ctx)
		}
		// A probe with a timeout is not reported as slow: it ends by itself, and another
		// message goes on with it. A program with several messages in hand may collect
		// them for a batch: such a wait is not a call.
		collects := c.offers && c.policy.Workers > 1
		had, taken := c.inHand(now, it)
		switch {
		case c.gate == nil, it.slow, it.offered, it.probe && it.ctx != nil && c.policy.Timeout > 0:
		case !taken:
			if it.token.Probe() && ran >= c.offerFor() {
				c.passOn(now, it)
			}
		case !collects && had >= c.slowAfter:
			it.slow = true
			c.gate.Slow(now, it.token, it.tries == 0)
			c.freed = c.freed || it.probe
		}
	}
	c.notice(now)
	c.rampOver(now)
	if now-c.watchedAt >= watchEvery && (!c.failureLives.empty() || len(c.suspects) > 0) {
		c.watch(now)
	}
	if now < c.lookAt {
		return late, false
	}
	c.lookAt = now + stormEvery
	c.earn()
	c.flaky.count(now, c.firstTime())
	c.storm.Successes(now, c.firsts+c.fast())
	if !c.storm.Step(now, c.reading(now)) {
		return late, false
	}
	if c.storm.Storm().Active && c.gate != nil && c.gate.Closed() {
		c.gate.Trip(now, causeStorm)
		c.notice(now)
	}
	return late, true
}

// reading is the highest number of attempts, and the highest age, of the unsettled
// messages, held messages included.
func (c *machine[M]) reading(now time.Duration) (r storm.Reading) {
	if !c.calls.empty() {
		r.Attempts = int(c.calls.most())
	}
	if !c.arrivals.empty() {
		r.Age = max(0, now-time.Duration(c.arrivals.least()))
	}
	return r
}

// items visits every item outside the ring that is not being settled.
func (c *machine[M]) items(visit func(*item[M])) {
	for _, l := range c.lanes {
		for _, it := range l.front {
			if it.phase != settling {
				visit(it)
			}
		}
	}
	if c.order() != OrderNone {
		return
	}
	for _, it := range c.again.items[c.again.head:] {
		visit(it)
	}
	for _, it := range c.due {
		visit(it)
	}
	for _, it := range c.busy {
		visit(it)
	}
}

// messages appends the unsettled messages, the oldest of each lane first. It leaves out
// messages that are being settled, which the caller finds in going, and acked messages that
// are safe in the spill.
func (c *machine[M]) messages(dst []M) []M {
	c.items(func(it *item[M]) {
		if !it.copy.onDisk() {
			dst = append(dst, it.m)
		}
	})
	for l := range c.ring.Lanes() {
		held, err := l.Snapshot(nil)
		if err != nil {
			continue
		}
		for _, e := range held {
			if !e.copy.onDisk() {
				dst = append(dst, e.m)
			}
		}
	}
	return dst
}

// unspilled visits the messages without a copy in the spill, the oldest of each lane
// first. It leaves out messages that are being settled. With letters it first visits those
// of them whose dead letter is not confirmed.
func (c *machine[M]) unspilled(letters bool, visit func(M, *spilled)) {
	look := func(m M, s *spilled) {
		if s != nil && !s.placed && !s.acked {
			visit(m, s)
		}
	}
	if letters {
		for _, it := range slices.SortedFunc(maps.Keys(c.writing), func(a, b *item[M]) int { return cmp.Compare(a.id, b.id) }) {
			look(it.m, it.copy)
		}
	}
	c.items(func(it *item[M]) { look(it.m, it.copy) })
	for l := range c.ring.Lanes() {
		held, err := l.Snapshot(nil)
		if err != nil {
			continue
		}
		for _, e := range held {
			look(e.m, e.copy)
		}
	}
}

// drain ends the source. It takes out all messages that have neither a handler nor a
// writer, and counts them as returned. rest has the messages without an ack at the broker;
// kept is how many messages are in the spill instead. A credit is given back if the writer
// never got the dead letter, or gave the letter back after put-offs only.
func (c *machine[M]) drain(now time.Duration) (rest []M, kept int) {
	back := func(m M, c *spilled) {
		if c.onDisk() {
			kept++
		} else {
			rest = append(rest, m)
		}
	}
	give := func(it *item[M]) {
		if it.phase == waiting || it.phase == retryWait {
			back(it.m, it.copy)
			c.remember(now, it)
			c.refund(it)
			c.move(it, idle)
		}
	}
	c.endLook(now, nil)
	for _, l := range c.lanes {
		c.endLook(now, l)
	}
	for _, it := range c.undone {
		back(it.m, it.copy)
		c.remember(now, it)
		if !it.begun || !it.tried {
			c.refund(it)
		}
		c.unguess(it)
		c.move(it, idle)
	}
	c.undone = nil
	var all []*item[M]
	c.items(func(it *item[M]) { all = append(all, it) })
	for _, it := range all {
		give(it)
	}
	for l := range c.ring.Lanes() {
		held, err := l.Drain()
		if err != nil {
			continue
		}
		for _, e := range held {
			back(e.m, e.copy)
			c.arrivals.drop(e.arrival)
			c.queued--
		}
	}
	for it := range c.writing { // if its letter is not confirmed in time, the message comes again
		c.remember(now, it)
		if !it.begun {
			c.refund(it)
		}
		c.unguess(it)
	}
	c.tally.Returned += uint64(len(rest) + kept)
	c.emptied = true
	c.ready, c.again = fifo[*lane[M]]{}, fifo[*item[M]]{}
	return rest, kept
}

// unguess takes back a guess whose dead letter is not written: the guard guesses again, or
// the message was parked.
func (c *machine[M]) unguess(it *item[M]) {
	if it.guessed {
		it.guessed, c.guesses = false, max(0, c.guesses-1)
	}
}

// abandon ends an item whose handler or writer came back too late.
func (c *machine[M]) abandon(it *item[M]) {
	c.move(it, idle)
	c.tally.Returned++
	c.tally.Stale++
}
