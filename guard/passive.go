// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// The passive shape: a program's own loop handles and settles messages, and the guard
// stands between that loop and the broker. Offer takes messages in, Ready gives them out
// when they may be handled, Done takes their outcome. The machine is the same as in Run;
// the loop is not.
//
// Limits of the passive shape: the guard sees only the outcomes that the program's settling
// reveals, through Done. It sees no handler timeout, panic or Goexit, but still reports a
// slow message to the breaker. If [Policy.Workers] is above 1, the program has several
// messages at once, so a retry comes after messages that were behind it.

// Item is a message that may be handled now.
type Item[M any] struct {
	Msg     M
	Token   Token // for Done
	Attempt int   // from 1
}

// Token names one attempt of one message in one epoch of a source.
type Token struct{ epoch, id, serial uint64 }

// Offer hands a message to the source. It does not wait: without room it returns
// [ErrFull], and the message stays the caller's. The caller offers it again after a
// [Port.Demand] above 0: when half of the window is free, or any room if nothing moves.
// [Source.OfferWait] waits for any room. Messages of one caller keep their order;
// concurrent callers have none. So an adapter that keeps an order offers from one
// goroutine. Offer returns [ErrClosed] after the source has ended.
//
// A source with a handler may take its input from Offer, too: call Run(ctx, nil).
func (s *Source[M]) Offer(m M) error {
	if !s.begin() {
		return ErrClosed
	}
	key, size := s.weigh(m)
	s.mu.Lock()
	s.endLocked()
	err := s.offerLocked(m, key, size)
	owed := err == ErrFull && s.demanded != 0 //nolint:errorlint // no 0 was told, so no room would be
	if owed {
		s.demanded, s.refused = 0, true
	}
	s.unlockOffer(err)
	if owed {
		s.nudge()
	}
	return err
}

// OfferWait is [Source.Offer], but waits for room. It waits for any room, whatever the
// latest [Port.Demand] said. If ctx ends first, it returns ctx's error, and the message
// stays the caller's. Several calls may wait; their messages have no order.
func (s *Source[M]) OfferWait(ctx context.Context, m M) error {
	if !s.begin() {
		return ErrClosed
	}
	key, size := s.weigh(m)
	s.mu.Lock()
	s.endLocked()
	err := s.offerLocked(m, key, size)
	for err == ErrFull { //nolint:errorlint // offerLocked's
		s.offering++
		s.mu.Unlock()
		select {
		case <-s.space:
		case <-s.ended:
		case <-ctx.Done():
			err = ctx.Err()
		}
		s.mu.Lock()
		s.offering--
		if err == ErrFull { //nolint:errorlint // ctx lasts
			err = s.offerLocked(m, key, size)
		}
	}
	s.unlockOffer(err) // wakes the next waiting call, if there is more room
	return err
}

// unlockOffer ends the critical section of offerLocked.
func (s *Source[M]) unlockOffer(err error) {
	s.unlock(s.g.now())
	if err == nil {
		s.nudge()
		s.g.sweeper.kick()
	}
}

// offerLocked puts a message in if there is room.
func (s *Source[M]) offerLocked(m M, key uint64, size int) error {
	switch {
	case s.c.ended:
		return ErrClosed
	case s.inputRoomLocked() == 0:
		return ErrFull
	case s.over != nil && s.over.diverts:
		s.spillLocked(s.g.now(), m, size)
		return nil
	}
	if s.handler == nil && s.pump == nil {
		s.pump = &pump[M]{s: s, quit: make(chan struct{}), gone: make(chan struct{}), stopKeepAlive: s.keepAlive()}
		go s.pump.run()
	}
	s.c.put(s.g.now(), m, key, size, nil)
	return nil
}

// Ready gives out messages that may be handled now, in the order of the policy. It is
// closed when the source ends, and nil for a source with a handler.
func (s *Source[M]) Ready() <-chan Item[M] { return s.ready }

// Done takes the outcome of an attempt: nil, or an error as a handler would return it.
// It settles the message at the broker on the caller's goroutine. A second Done of one
// attempt, or a Done of an older epoch, has no effect; it counts in Tally.Stale.
func (s *Source[M]) Done(t Token, err error) {
	s.mu.Lock()
	it := s.passive[t.id]
	if it == nil || t.epoch != s.epoch || t.serial != it.serial || it.phase != processing {
		s.c.tally.Stale++
		s.mu.Unlock()
		return
	}
	delete(s.passive, t.id)
	s.mu.Unlock()
	looked := false
	defer func() {
		if !looked { // a method of err has called Goexit, which unwinds the caller
			s.finish(it, s.exited(nil))
			s.nudge()
		}
	}()
	r := s.outcome(nil, err, nil)
	looked = true
	s.finish(it, r)
	s.nudge()
}

// pump moves messages from the machine to Ready. The source owns it: Offer
// starts it and End stops it.
type pump[M any] struct {
	s             *Source[M]
	quit, gone    chan struct{}
	stopKeepAlive func()
}

func (p *pump[M]) run() {
	s := p.s
	defer close(p.gone)
	defer close(s.ready)
	timer := stoppedTimer()
	defer timer.Stop()
	var up *item[M]         // the machine's next item, not yet taken by the program
	var again time.Duration // not before then the pump asks the machine for another item
	for {
		now := s.g.now()
		s.mu.Lock()
		st := step[M]{}
		if up != nil && !s.c.mayOffer(now, up) {
			if up.probe {
				again = now + tick // other sources of the scope may want the probe
			} else {
				s.offeredAt = 0
			}
			s.takeBackLocked(now, up)
			up = nil
			s.cond.Broadcast() // End may wait for it
		}
		switch {
		case s.c.acks.len() > 0 || up == nil && again <= now:
			st = s.next(now)
		case up == nil:
			st.at = again
		}
		if st.kind == stepHandle {
			up = st.it
		}
		if up != nil { // in the critical section of next: no Account counts the item as processing
			s.passive[up.id], up.offered, s.onOffer = up, true, up
			if s.offeredAt == 0 {
				s.offeredAt = max(now, 1)
			}
		}
		s.unlock(now)
		if st.kind == stepAck {
			s.settle(st.it)
			continue
		}
		var ready chan<- Item[M]
		var out Item[M]
		if up != nil {
			if up.probe {
				st.at = up.started + s.c.offerFor()
			}
			ready = s.ready
			out = Item[M]{Msg: up.m, Token: Token{s.epoch, up.id, up.serial}, Attempt: up.tries + 1}
			select {
			case ready <- out:
				s.taken(up, out.Token)
				up = nil
				continue
			default:
			}
		}
		s.flush() // the pump waits now
		s.tellDemand()
		var tick <-chan time.Time
		if st.at > 0 {
			timer.Reset(max(st.at-now, 0))
			tick = timer.C
		}
		select {
		case ready <- out:
			s.taken(up, out.Token)
			up = nil
		case <-s.wake:
		case <-tick:
		case <-p.quit:
			if up != nil {
				s.takeBack(up)
			}
			return
		}
		if tick != nil {
			timer.Stop()
		}
	}
}

// taken starts the time of an attempt, unless its Done came first.
func (s *Source[M]) taken(it *item[M], t Token) {
	now := s.g.now()
	s.mu.Lock()
	s.offeredAt, s.onOffer = 0, nil
	if it.serial == t.serial && it.phase == processing {
		it.started, it.offered = now, false
	}
	s.mu.Unlock()
}

// errNotTaken is the outcome of an item that the program did not take: no attempt was made.
var errNotTaken = errors.New("not taken")

func (s *Source[M]) takeBack(it *item[M]) {
	now := s.g.now()
	s.mu.Lock()
	if it.phase == processing {
		s.takeBackLocked(now, it)
	}
	s.unlock(now)
}

func (s *Source[M]) takeBackLocked(now time.Duration, it *item[M]) {
	delete(s.passive, it.id)
	s.onOffer = nil
	s.c.unasked(now, it)
	s.c.done(now, it, result{outcome: cancelled, err: errNotTaken})
}

// unasked ends the probe of an item that no handler had. If the probe is a later message
// of a look, the probe has failed: the messages before it in the look did.
func (c *machine[M]) unasked(now time.Duration, it *item[M]) {
	if it.probe && (it.witness() || it.lane != nil && it.lane.step > 0 || c.round.step > 0) {
		c.gate.Failure(now, it.token, false)
	}
}

// inHand is how long the handler or the program has had an item. taken is false before
// the program has it.
func (c *machine[M]) inHand(now time.Duration, it *item[M]) (had time.Duration, taken bool) {
	had = now - it.started
	if c.takenAt == nil {
		return had, true
	}
	at := c.takenAt(it.m)
	if at.IsZero() {
		return 0, false
	}
	return min(had, c.origin.Add(now).Sub(at)), true
}

// passOn gives up the slot of a probe that the program does not take: another source may
// use the slot. The item stays where it is, and is a probe again after its call; see takeUp.
func (c *machine[M]) passOn(now time.Duration, it *item[M]) {
	c.unasked(now, it)
	c.exclude(now, it)
	it.token = circuit.Token{}
}

// takeUp makes an item a probe again after passOn, if the breaker has a free slot: the
// program has called its handler after all. Without takeUp a program that takes each
// message late would never close its breaker.
func (c *machine[M]) takeUp(now time.Duration, it *item[M]) {
	if !c.offers || !it.probe || it.slow || it.token.Probe() || c.closed() {
		return
	}
	if token, refusal := c.gate.AdmitFor(now, it.id, c.policy.lease()); refusal.OK() && token.Probe() {
		it.token = token
	}
}

// mayOffer tells whether an item that the program has not taken may stay on Ready. A probe
// may stay for a quarter of Breaker.Lease, so that its call has the rest of the lease. If
// nobody takes the probe, that is no failure. A probe is useless once the breaker is no
// longer half-open.
func (c *machine[M]) mayOffer(now time.Duration, it *item[M]) bool {
	switch {
	case c.ended, c.paused, c.asked > now, c.unseen(it):
		return false
	case it.probe:
		return now-it.started < c.offerFor() && c.gate.Snapshot(now).State == breaker.HalfOpen
	default:
		return c.closed()
	}
}

func (c *machine[M]) offerFor() time.Duration { return c.policy.Breaker.Lease / 4 }

// stopPump ends the passive shape's goroutines.
func (s *Source[M]) stopPump() {
	s.mu.Lock()
	p := s.pump
	s.mu.Unlock()
	switch {
	case p == nil && s.ready != nil:
		close(s.ready) // no message was ever offered
	case p != nil:
		close(p.quit)
		<-p.gone
		p.stopKeepAlive()
	}
}
