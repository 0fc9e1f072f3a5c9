// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// If a hold lasts longer than the broker lets a delivery be unsettled, Consume waits without a
// channel:
//
//	held for half of the consumer timeout ── park ──▶ no channel
//	the source would admit a message ── awaitAdmission ──▶ a narrow epoch: for the probes and their witnesses
//	nothing holds it, and a message got through ── widen ──▶ the whole prefetch, at a ramp
//
// Each narrow epoch that fails costs all its messages a delivery. When a message has used half of
// its deliveries that way, the next narrow epochs have a prefetch of 1. If the channel of a narrow
// epoch breaks, the next epoch is narrow, too: its messages may have no delivery to spare.

// park ends an epoch in which a delivery was unsettled for half of the consumer timeout. If nothing
// holds the source, its handlers are too slow for the prefetch, or its rate limit is too low. Then
// the next epoch has half of the prefetch.
func (e *epoch) park() (outcome, error) {
	c, st := e.c, e.src.State()
	held := e.narrow // nothing got through, so the speed of the handlers is not known
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonBackpressure:
			held = held || h.Until > 0
		case guard.ReasonLimiter:
			held = held || st.Tally.Acked == 0 // the limiter lets nothing through at all
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
	case !drains(st): // else the deliveries wait for the disk, not for slow handlers
		c.prefetch = max(e.size/2, c.policy.Workers, 1)
	}
	return epochReplaced, nil
}

// awaitAdmission waits until the source would admit a message: nothing holds it, or its breaker has
// room for a probe. It returns false when ctx ends first.
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

// awaitDisk waits while the source drains its spill, or the disk is full. Then the source takes
// nothing from its input, and the deliveries of a consumer would stay unsettled. The channel would
// have to be closed again and again, each time at the cost of a delivery. awaitDisk returns false
// when ctx ends first.
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

// drains tells whether a source takes only messages from its spill.
func drains(st guard.State) bool { return st.Spilled > 0 && st.Room == 0 }

// admits tells whether a source without messages would admit a message.
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
			// If the breaker is closed, a wider scope holds the source, until the probes of others
			// open the way.
			if h.Until > 0 || st.Breaker.State.String() == "closed" {
				return false
			}
		default:
		}
	}
	return true
}

// settled tells whether the hold of a narrow epoch is over. The source's holds alone do not say so:
// the handler may ask for time again, or the dead-letter writer may still be down. Only a message
// that got through shows it.
//
// A failure is as good as an ack if the failed message blocks no other. This is so with a prefetch
// of 1, too, if the message can be dead-lettered. For a dead letter the guard needs witnesses and a
// breaker with something to count, so more than one message.
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

// progress is how many messages a source had settled at a time.
type progress struct {
	at      time.Time
	settled uint64
}

// wanted returns the prefetch that the consumer should have, 0 to keep its present one. A lowered
// prefetch grows to the number of messages that the source settles in a quarter of the consumer
// timeout. That is half of the time that a delivery may take. So a prefetch that was halved for
// slow handlers is not doubled at the same speed.
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

// widen makes a narrow epoch an ordinary one. If it can, it replaces the consumer by one with a
// larger prefetch. An epoch that is held again meanwhile stays narrow.
func (e *epoch) widen(ctx context.Context, to int) error {
	again := false // the epoch stays narrow
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

// replaceable waits a moment until the consumer can be replaced. It returns the new prefetch, as
// far as the sizes of the deliveries that are out allow it: a consumer cannot change its prefetch.
//
// A delivery on its way to a cancelled consumer goes to the tail of a quorum queue. So acks and
// rejects are kept back until the whole prefetch is out: then nothing is on its way. If the
// prefetch is not used up, a larger one gains nothing.
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

// awaitHandled waits until all deliveries that are out are handled, if there is an order to keep.
// With a single active consumer, the broker activates the next consumer as soon as this one is
// cancelled. The deliveries that are out stay with this channel, and come before those of the next
// consumer. The broker does not tell whether a consumer waits: the number of a queue's consumers
// does not count it.
//
// awaitHandled waits for a call until its timeout, and for a message that the rate limit, a ramp or
// [guard.Backoff] delays until it is handled. It waits for a failed message as long as the
// message's longest delay. It does not wait for other unsettled messages that no handler has: they
// may need further messages. It returns false if the consumer must not be replaced. That is if the
// consumer or ctx has ended, the source is held, or a delivery was out for half of the consumer
// timeout.
func (e *epoch) awaitHandled(ctx context.Context) bool {
	if e.c.policy.Order == guard.OrderNone {
		return true
	}
	look := time.NewTicker(settleTime / 50)
	defer look.Stop()
	moved, left := time.Now(), e.port.tags.unsettled()
	idle := 0 // looks in a row at which no message was on its way
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
			return false // acks are kept back: a later look sees whether the delivery is settled
		}
		stuck := false
		if still := now.Sub(moved); still >= settleMost {
			st := e.src.State() // read before the count below, which then has messages settled in between
			switch {
			case held(st):
				return false
			case delayed(st):
				moved, idle = now, 0
			case st.Account.Processing+st.Account.Settling > 0:
				idle = 0
				stuck = still >= st.Settings.Timeout+settleMost
			default:
				idle++ // a message whose delay ended a moment ago is not handled yet
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

// longest is the longest delay of a message that has attempts left. Of several such delays in a
// row, awaitHandled waits only for the first.
func longest(r guard.Retry) time.Duration {
	d := r.Base
	for n := 2; n < r.Attempts && d < r.Max; n++ {
		d *= 2
	}
	return min(d, r.Max)
}

// idleLooks is how many looks in a row may see no message on its way before the rest counts as
// stuck.
const idleLooks = 20

// held tells whether a source handles only probes until its hold ends.
func held(st guard.State) bool {
	return slices.ContainsFunc(st.Holds, func(h guard.Hold) bool {
		return h.Reason == guard.ReasonBreaker || h.Reason == guard.ReasonStorm || h.Reason == guard.ReasonOperator
	})
}

// delayed tells whether a source handles its next message at a known later time.
func delayed(st guard.State) bool {
	return slices.ContainsFunc(st.Holds, func(h guard.Hold) bool {
		return h.Until > 0 && (h.Reason == guard.ReasonLimiter || h.Reason == guard.ReasonBackpressure)
	})
}

// lighten ends an epoch whose unsettled deliveries take too many bytes. The next channel's prefetch
// is the number that fits, at their mean size, but at most half of the consumer's. lighten returns
// false if the deliveries no longer take too many bytes, or if there is only one.
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
	return epochReplaced, true
}
