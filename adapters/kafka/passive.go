// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
)

// WrapHandler is the passive shape: a consumer group's handler that exists
// already and marks by itself, with the guard between it and the group.
//
//	handler = guardkafka.WrapHandler(g, handler) // once, in front of the loop
//	for ctx.Err() == nil {
//		err := group.Consume(ctx, topics, handler)
//	}
//
// To wrap in each round is safe for the messages, but then Consume does not return what
// the guard has refused for a claim in the round before.
//
// Its session and claims are wrapped. MarkMessage is success, and so is
// MarkOffset for everything below it that was handed out; [Fail] is failure; an
// error from ConsumeClaim is the failure of every message that is handed out and
// not marked, and ConsumeClaim is then called again for the same claim, so that
// one failure costs the group no rebalance. A message that is neither marked nor
// failed within the policy's Timeout has failed.
//
// So a loop that takes batches must not return the error of one message: with a
// class of [guard.ClassMessage] it condemns all. It should Fail that message.
//
// One message is out at a time, so the order of the partition is kept, retries
// included. A loop that takes several messages before it marks the first, for
// workers of its own or for a batch, has to ask for more: by Policy.Workers, which
// is how many may be out and needs [guard.OrderKey] or [guard.OrderNone], or by
// [WithBatchMarks]. Otherwise it waits for its second message until the first has
// failed by that Timeout.
//
// Marks may come in any order and from any goroutine: only what is settled
// without a gap is marked at the group. What a loop marks although it failed is
// lost to it, as without the guard.
//
// What it cannot do: it sees only these outcomes. There is no handler timeout,
// and a panic is the program's. With more than one message out, a retry is handed
// out after messages that were behind it, but with [guard.OrderKey] not after those
// of its key. [Wrap] has none of these limits.
//
// While the source holds, Messages has nothing to give. It is closed when the
// claim is revoked, at once: what sarama has buffered is not handed out any more.
// Commit marks what is settled and commits; with AutoCommit off nothing else
// does. ResetOffset goes through, and stops marks until the loop marks again. In Setup
// both seek, as without the guard.
// Messages and session are not to be used after Cleanup.
func WrapHandler(g *guard.Guard, existing sarama.ConsumerGroupHandler, opts ...Option) sarama.ConsumerGroupHandler {
	h := newHandler(g, opts)
	h.existing = existing
	if existing == nil {
		h.err = errors.Join(h.err, errors.New("kafka: WrapHandler: the handler must not be nil"))
	}
	return h
}

// Fail reports the failure of a message to a wrapped handler's session, as a
// handler of [Wrap] would return it: guard.Permanent, guard.Backoff and
// guard.Ignore mean what they mean there. A nil err marks. The message must not
// be marked as well. A context.Canceled after the session's end is no failure: the
// message is delivered again.
func Fail(s sarama.ConsumerGroupSession, m *sarama.ConsumerMessage, err error) error {
	ss, ok := s.(*session)
	if !ok {
		return errNotWrapped
	}
	if err == nil {
		ss.MarkMessage(m, "")
		return nil
	}
	if ss.cut(err) {
		err = guard.Backoff(err, time.Time{}) // nobody's fault
	}
	if w := ss.wrapped(m.Topic, m.Partition); w != nil {
		if o := w.take(m); o != nil {
			w.src.Done(o.token, err)
		}
	}
	return nil
}

// taken is a message of the passive shape.
type taken struct {
	*sarama.ConsumerMessage
	meta     string                    // of its mark; written before Done, read by Ack
	attempts []*sarama.ConsumerMessage // as handed out; each attempt has a pointer of its own
	at       atomic.Pointer[time.Time] // when the loop took this attempt; nil before
}

// passivePort is the port of the passive shape.
type passivePort struct{ *claim }

var _ guard.Taker[*taken] = passivePort{}

func (p passivePort) Lane(m *taken) uint64                { return p.claim.Lane(m.ConsumerMessage) }
func (p passivePort) Size(m *taken) int                   { return cluster.Size(m.ConsumerMessage) }
func (p passivePort) Meta(m *taken) guard.Meta            { return p.claim.Meta(m.ConsumerMessage) }
func (p passivePort) Extend([]*taken)                     {}
func (p passivePort) Return([]*taken, guard.Reason) error { return nil }

// TakenAt is that of [guard.Taker].
func (passivePort) TakenAt(m *taken) time.Time {
	if at := m.at.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

func (p passivePort) Ack(m *taken) error {
	p.marks.Settle(m.Offset, m.meta)
	return nil
}

// wrappedClaim is the claim that a wrapped handler sees.
//
// Goroutines: the intake, which reads the claim, and the hand-out, which writes
// Messages and looks for messages that are not marked. Both end before
// ConsumeClaim returns. Lock order: mu, then the tracker's.
type wrappedClaim struct {
	sarama.ConsumerGroupClaim
	claim *claim
	ss    *session
	src   *guard.Source[*taken]
	lease time.Duration // 0: none
	alone bool          // one message is out at a time

	exact chan struct{} // a token taken from it says that no hand-over is half noted
	anew  chan struct{} // asks for a feed of its own for the next call
	gone  chan struct{} // the hand-out has ended

	mu      sync.Mutex
	out     map[int64]*out               // handed out, by offset
	sending *out                         // of these, the one that waits to be taken
	handed  uint64                       // how many attempts were handed out
	feed    chan *sarama.ConsumerMessage // of this call; the hand-out alone changes it
	over    bool                         // the source has ended: marks go to the group directly
}

// callClaim is the claim of one call of ConsumeClaim.
type callClaim struct {
	*wrappedClaim
	messages <-chan *sarama.ConsumerMessage
}

// Messages are those that may be handled now, until the call has failed.
func (c callClaim) Messages() <-chan *sarama.ConsumerMessage { return c.messages }

func (w *wrappedClaim) call() sarama.ConsumerGroupClaim {
	w.mu.Lock()
	defer w.mu.Unlock()
	return callClaim{w, w.feed}
}

// consumePassive is the passive shape.
func (ss *session) consumePassive(c *claim, revoked <-chan struct{}) error {
	cfg := ss.sourceConfig(c)
	cfg.Policy = ss.h.opts.passivePolicy(ss.h.g)
	src, err := openClaim(ss, c.name, revoked, func() (*guard.Source[*taken], error) {
		return guard.Open(ss.h.g, cfg, limits(ss.set.config), guard.Port[*taken](passivePort{c}), nil)
	})
	if src == nil {
		return err
	}
	ss.add(c)
	defer ss.remove(c)
	w := &wrappedClaim{
		ConsumerGroupClaim: c.native, claim: c, ss: ss, src: src,
		lease: src.State().Settings.Timeout, alone: src.State().Settings.Workers == 1, out: make(map[int64]*out),
		feed: make(chan *sarama.ConsumerMessage), exact: make(chan struct{}), anew: make(chan struct{}), gone: make(chan struct{}),
	}
	ss.mu.Lock()
	ss.wraps[place{c.topic, c.partition}] = w
	ss.mu.Unlock()

	reading, stop := context.WithCancel(context.WithoutCancel(ss.native.Context()))
	defer stop()
	leave := reading.Done() // the claim ends
	var intake, handOut sync.WaitGroup
	over := make(chan struct{}) // the intake has ended
	intake.Go(func() {
		defer close(over)
		w.intake(reading)
	})
	handOut.Go(func() { w.handOut(leave) })
	var watch sync.WaitGroup
	watch.Go(func() {
		ss.await(c, src.Ended(), over, revoked)
		stop()
	})
	err = w.loop(leave)
	stop()
	intake.Wait()
	watch.Wait()
	handOut.Wait()

	// What the loop left unmarked nobody will settle any more through the source,
	// so End need not wait for it.
	w.giveUp()
	report := ss.endSource(c.topic, src.End)
	c.mark()
	return errors.Join(err, leftError(c.name, report))
}

// loop calls the wrapped handler's ConsumeClaim until it returns nil or the claim
// ends.
func (w *wrappedClaim) loop(leave <-chan struct{}) error {
	for failures := 0; ; failures++ {
		before := w.handedOut()
		err := w.ss.h.existing.ConsumeClaim(w.ss, w.call())
		select {
		case <-leave:
			return err
		default:
		}
		if err == nil || w.ss.native.Context().Err() != nil {
			return err // it wants to leave, or saw the session's end before leave did
		}
		w.ss.h.sayFailed(w.claim, err, time.Now())
		if w.handedOut() > before {
			failures = 0
		}
		select {
		case w.anew <- struct{}{}:
		case <-w.gone:
		}
		if w.failAll(err) == 0 {
			// Nothing was in hand, so no retry delay holds it back.
			pause := time.NewTimer(min(time.Second, 10*time.Millisecond<<min(failures, 10)))
			select {
			case <-pause.C:
			case <-leave:
				pause.Stop()
				return err
			}
		}
	}
}

// failing joins the lines of a topic whose loops fail: in an outage each probe is one.
type failing struct {
	next  time.Time     // not before then …
	every time.Duration // … which is so long after the latest line
	lines int           // since then
}

const (
	failingBase = time.Second
	failingMost = time.Minute
)

// sayFailed logs that a loop failed: the first of a topic at once, and those behind it at
// distances that double, with their number.
func (h *handler) sayFailed(c *claim, err error, now time.Time) {
	h.mu.Lock()
	f := h.failing[c.topic]
	if f == nil {
		f = new(failing)
		h.failing[c.topic] = f
	}
	f.lines++
	lines, say := f.lines, !now.Before(f.next)
	if say {
		f.every *= 2
		if now.Sub(f.next) >= failingMost || f.every == 0 { // it has been silent
			f.every = failingBase
		}
		f.every = min(f.every, failingMost)
		f.next, f.lines = now.Add(f.every), 0
	}
	h.mu.Unlock()
	if say {
		h.opts.log.Warn("the handler's ConsumeClaim failed and is called again", "source", c.name, "error", err, "lines", lines)
	}
}

// intake offers what the claim brings, and waits while the window is full. It ends with
// ctx, the source or the claim.
func (w *wrappedClaim) intake(ctx context.Context) {
	for {
		w.ss.yield(ctx.Done())
		var m *sarama.ConsumerMessage
		var ok bool
		select {
		case m, ok = <-w.ConsumerGroupClaim.Messages():
		case <-ctx.Done():
			return
		}
		if !ok {
			return
		}
		w.claim.marks.Deliver(m.Offset)
		if w.src.OfferWait(ctx, &taken{ConsumerMessage: m}) != nil {
			return
		}
	}
}
