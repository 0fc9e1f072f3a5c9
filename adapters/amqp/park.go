// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// A hold that lasts longer than the broker lets a delivery be unsettled is sat
// out without a channel:
//
//	held for half of the consumer timeout ── park ──▶ no channel
//	the source would admit a message ── awaitAdmission ──▶ a narrow epoch: for the probes and their witnesses
//	nothing holds it, and a message got through ── widen ──▶ the whole prefetch, at a ramp
//
// Each narrow epoch that fails is a delivery more of all its messages. When one has
// had half of its deliveries that way, the next narrow epochs have a prefetch of 1.

// park ends an epoch in which a delivery was unsettled for half of the consumer
// timeout. Where nothing holds the source its handlers are too slow for the
// prefetch, or its rate limit too low: then the next has half of it.
func (e *epoch) park() (outcome, error) {
	c, st := e.c, e.src.State()
	held := e.narrow // nothing got through, so nothing is known of its speed
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonBackpressure:
			held = held || h.Until > 0
		case guard.ReasonLimiter:
			held = held || st.Tally.Acked == 0 // it lets nothing through at all
		default:
			held = true
		}
	}
	c.o.log.Warn("closing the channel: a delivery was unsettled for half of the consumer timeout",
		"source", c.o.name, "held", held, "consumer_timeout", c.o.timeout, "prefetch", c.prefetch)
	c.tired = c.tired || e.worn.Load()
	switch {
	case held:
		return epochParked, nil
	case !drains(st): // else what it has waits for the disk, not for slow handlers
		c.prefetch = max(e.size/2, c.policy.Workers, 1)
	}
	return epochLost, nil
}

// awaitAdmission waits until the source would admit a message: nothing holds it,
// or its breaker has room for a probe. false when ctx ends first.
func (e *epoch) awaitAdmission(ctx context.Context) bool {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for !admits(e.src.State()) {
		select {
		case <-look.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// awaitDisk waits while the source drains its spill, or the disk is full: it takes nothing
// from its input, and what a consumer has would be unsettled until the channel had to be
// closed, again and again, each time a delivery more. false when ctx ends first.
func (e *epoch) awaitDisk(ctx context.Context) bool {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for drains(e.src.State()) {
		select {
		case <-look.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// drains tells whether a source takes nothing but what is in its spill.
func drains(st guard.State) bool { return st.Spilled > 0 && st.Room == 0 }

// admits tells whether a source without messages would try one.
func admits(st guard.State) bool {
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonOperator:
			return false
		case guard.ReasonBackpressure: // a handler asked for time
			if h.Until > 0 {
				return false
			}
		case guard.ReasonBreaker:
			// A closed one is held by a wider scope, which others' probes open.
			if h.Until > 0 || st.Breaker.State.String() == "closed" {
				return false
			}
		default:
		}
	}
	return true
}

// settled tells whether what held the source is over for a narrow epoch. The
// holds alone do not say so: the handler may ask for time again, or the dead-letter
// writer be down still, and that shows only when a message has got through.
//
// A failure is as good as an ack where the failed message holds up nobody. It is so
// with a prefetch of 1, too, if the message can be dead-lettered: what that takes,
// witnesses and a breaker with something to count, needs more than one message.
func (e *epoch) settled() bool {
	st := e.src.State()
	ordered := st.Settings.Order == guard.OrderSource
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonBreaker, guard.ReasonStorm, guard.ReasonOperator:
			return false
		case guard.ReasonDLQ:
			if ordered {
				return false
			}
		default:
		}
	}
	through := st.Tally.Acked + st.Tally.DeadLettered
	if !ordered || e.size == 1 && e.c.o.letters != nil && st.Budget >= 1 && st.Account.Settling == 0 {
		through += st.Tally.Failures
	}
	return through > 0
}

// progress is how much a source had settled at a time.
type progress struct {
	at      time.Time
	settled uint64
}

// wanted is the prefetch that the consumer should have instead of its own, 0 if
// none. A prefetch that was lowered grows to what the source settles in a quarter
// of the consumer timeout, half of the time that a delivery may take: one that was
// halved for slow handlers is not doubled for the same speed.
func (e *epoch) wanted(now time.Time) int {
	c := e.c
	switch {
	case e.narrow && e.settled():
		c.tired = false
		return c.prefetch
	case e.narrow || e.size >= c.full:
		return 0
	}
	a := e.src.Account()
	settled := a.Acked + a.DeadLettered
	if e.done.at.IsZero() || now.Sub(e.done.at) > c.o.timeout/4 {
		e.done = progress{now, settled}
		return 0
	}
	if to := int(min(uint64(c.full), settled-e.done.settled)); e.worthwhile(to) && e.port.tags.usedUp() && !held(e.src.State()) {
		return to
	}
	return 0
}

// worthwhile tells whether a new prefetch is worth a new consumer.
func (e *epoch) worthwhile(to int) bool { return to >= min(2*e.size, e.c.full) }

// widen makes a narrow epoch an ordinary one, and replaces the consumer by one with
// a larger prefetch if it can. An epoch that is held again meanwhile remains narrow.
func (e *epoch) widen(ctx context.Context, to int) error {
	again := false // it goes on to probe
	begin := func() {
		if e.narrow && !again {
			e.narrow = false
			e.pace.begin()
		}
	}
	defer begin()
	if to <= e.size {
		return nil
	}
	e.port.hold()
	defer e.port.release()
	to, ok := e.replaceable(ctx, to)
	if !ok {
		again = e.narrow && held(e.src.State())
		return nil
	}
	if err := e.ch.Cancel(e.tag, false); err != nil {
		return err
	}
	select {
	case <-e.read:
	case <-ctx.Done():
		return nil
	}
	begin()
	e.c.prefetch = to
	e.c.o.log.Info("prefetch", "source", e.c.o.name, "from", e.size, "to", to)
	return e.subscribe(to)
}

// replaceable waits a moment until the consumer can be replaced, and says by which
// prefetch, as the sizes of the deliveries that are out allow: a prefetch is the
// consumer's from its beginning.
//
// A delivery that is on its way when its consumer is cancelled goes to the tail
// of a quorum queue. So acks and rejects are kept back until all of the prefetch is
// out: then nothing else is on its way. When it is not used up there is nothing to
// be gained either.
func (e *epoch) replaceable(ctx context.Context, to int) (int, bool) {
	for deadline := time.Now().Add(settleTime); !e.port.tags.full(e.size, e.after); time.Sleep(settleTime / 50) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return 0, false
		}
	}
	if !e.awaitHandled(ctx) {
		return 0, false
	}
	n, bytes := e.port.tags.weight()
	to = min(to, int(e.budget*int64(n)/bytes))
	return to, e.narrow && to > e.size || e.worthwhile(to)
}

// awaitHandled waits until all that is out is handled, where there is an order to keep. With
// a single active consumer the broker activates the next one as soon as this one is
// cancelled, and leaves with this channel what is out: messages that come before those of
// the next. Whether one waits it does not tell: the number of a queue's consumers is without
// those.
//
// A call is waited for until its timeout is over, and a message that the rate limit, a ramp or
// [guard.Backoff] delays until it is handled. A message that has failed is waited for as long as
// its longest delay. Any other message that no handler has, and that is not settled, is not waited
// for: it may need others beside it. false if the consumer must not be
// replaced: it has ended, ctx has, the source is held, or a delivery was out for half of the
// consumer timeout.
func (e *epoch) awaitHandled(ctx context.Context) bool {
	if e.c.policy.Order == guard.OrderNone {
		return true
	}
	look := time.NewTicker(settleTime / 50)
	defer look.Stop()
	moved, left := time.Now(), e.port.tags.unsettled()
	idle := 0 // looks at which nothing was on its way
	for left > 0 {
		select {
		case <-look.C:
		case <-e.read:
			return false
		case <-ctx.Done():
			return false
		}
		now := time.Now()
		if oldest, high := e.port.tags.oldest(); e.age.over(now, oldest, high) {
			return false // acks are kept back: whether it is settled is seen after this
		}
		stuck := false
		if still := now.Sub(moved); still >= settleMost {
			st := e.src.State() // before the count below, which sees what is settled in between
			switch {
			case held(st):
				return false
			case delayed(st):
				moved, idle = now, 0
			case st.Account.Processing+st.Account.Settling > 0:
				idle = 0
				stuck = still >= st.Settings.Timeout+settleMost
			default:
				idle++ // a message whose delay has just ended is not handled yet
				stuck = idle > idleLooks && (st.Account.RetryWait == 0 || still >= longest(st.Settings.Retry)+settleMost)
			}
		}
		if n := e.port.tags.unsettled(); n < left {
			left, moved, idle = n, now, 0
		} else if stuck {
			return true
		}
	}
	return true
}

// longest is the longest delay of a message that has attempts left. Of several such delays in a row
// only the first is waited for.
func longest(r guard.Retry) time.Duration {
	d := r.Base
	for n := 2; n < r.Attempts && d < r.Max; n++ {
		d *= 2
	}
	return min(d, r.Max)
}

// idleLooks is at how many looks in a row nothing may be on its way before it is taken for stuck.
const idleLooks = 20

// held tells whether a source handles nothing but probes until something else clears the way.
func held(st guard.State) bool {
	return slices.ContainsFunc(st.Holds, func(h guard.Hold) bool {
		return h.Reason == guard.ReasonBreaker || h.Reason == guard.ReasonStorm || h.Reason == guard.ReasonOperator
	})
}

// delayed tells whether a source handles its next message later, by the clock.
func delayed(st guard.State) bool {
	return slices.ContainsFunc(st.Holds, func(h guard.Hold) bool {
		return h.Until > 0 && (h.Reason == guard.ReasonLimiter || h.Reason == guard.ReasonBackpressure)
	})
}

// lighten ends an epoch whose unsettled deliveries take too many bytes; false if
// they do not any more, or it is one that is as large. The next channel's prefetch
// is what fits at their mean size.
func (e *epoch) lighten() (outcome, bool) {
	c := e.c
	n, bytes := e.port.tags.weight()
	if n < 2 || bytes <= 2*e.budget {
		return 0, false
	}
	c.prefetch = max(1, min(int(e.budget*int64(n)/bytes), e.size/2))
	c.o.log.Warn("closing the channel: the unsettled deliveries take more than twice Policy.WindowBytes; WithPrefetch sets fewer from the start",
		"source", c.o.name, "messages", n, "bytes", bytes, "window_bytes", e.budget, "prefetch", c.prefetch)
	if e.narrow {
		return epochParked, true
	}
	return epochLost, true
}
