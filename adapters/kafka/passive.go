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

// WrapHandler puts the guard between a consumer group and an existing handler, which marks
// messages itself. This is the passive shape.
//
//	handler = guardkafka.WrapHandler(g, handler) // once, in front of the loop
//	for ctx.Err() == nil {
//		err := group.Consume(ctx, topics, handler)
//	}
//
// Wrapping in each round loses no messages. But then Consume does not return the guard's refusal
// of a claim in the round before.
//
// The handler gets a wrapped session and wrapped claims. The guard sees these outcomes:
//
//   - MarkMessage is success.
//   - MarkOffset is success for every message below it that was handed out.
//   - [Fail] is failure.
//   - An error from ConsumeClaim is failure for every message that is handed out and not marked.
//     ConsumeClaim is then called again for the same claim, so one failure causes no rebalance.
//   - A message that is not marked and not failed within Policy.Timeout has failed.
//
// A loop that takes batches must not return the error of one message: an error of class
// [guard.ClassMessage] dead-letters the whole batch. The loop should Fail that message.
//
// One message is out at a time, so the partition keeps its order, retries included. A loop that
// takes several messages before it marks the first, for its own workers or for a batch, must ask
// for more: by Policy.Workers or by [WithBatchMarks]. Policy.Workers sets how many messages may
// be out, and needs [guard.OrderKey] or [guard.OrderNone]. If such a loop does not ask, it gets
// its second message only when the first has failed by Policy.Timeout.
//
// Marks may come in any order and from any goroutine: the group's mark stops before the first
// message that is not settled. A message that the loop marks although it failed is lost, as
// without the guard.
//
// The passive shape has limits that [Wrap] does not have. The guard sees only these outcomes.
// There is no handler timeout, and the guard does not recover a panic. With more than one message
// out, a retry is handed out after messages that were behind it. With [guard.OrderKey] it still
// comes before the later messages of its key.
//
// While the source holds, Messages gives nothing. Messages is closed at once when the claim is
// revoked: messages in sarama's buffer are not handed out any more. Commit marks the settled
// messages and commits; with AutoCommit off nothing else commits. ResetOffset goes to the group,
// and stops marks until the loop marks again. In Setup, MarkOffset and ResetOffset seek, as
// without the guard. Do not use messages and session after Cleanup.
func WrapHandler(g *guard.Guard, existing sarama.ConsumerGroupHandler, opts ...Option) sarama.ConsumerGroupHandler {
	h := newHandler(g, opts)
	h.existing = existing
	if existing == nil {
		h.err = errors.Join(h.err, errors.New("kafka: WrapHandler: the handler must not be nil"))
	}
	return h
}

// Fail reports the failure of a message to a wrapped handler's session. err means the same as
// when a handler of [Wrap] returns it, with guard.Permanent, guard.Backoff and guard.Ignore. A
// nil err marks the message. Do not mark a failed message as well. A context.Canceled after the
// session's end is no failure: the message is delivered again. Fail returns an error only for a
// session that is not wrapped.
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
		err = guard.Backoff(err, time.Time{}) // no failure of the message
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
	meta     string                    // metadata of the mark; written before Done, read by Ack
	attempts []*sarama.ConsumerMessage // the pointers handed out; each attempt has its own
	at       atomic.Pointer[time.Time] // when the loop took the present attempt; nil before
}

// passivePort is the port of the passive shape.
type passivePort struct{ *claim }

var _ guard.Taker[*taken] = passivePort{}

func (p passivePort) Lane(m *taken) uint64                { return p.claim.Lane(m.ConsumerMessage) }
func (p passivePort) Size(m *taken) int                   { return cluster.Size(m.ConsumerMessage) }
func (p passivePort) Meta(m *taken) guard.Meta            { return p.claim.Meta(m.ConsumerMessage) }
func (p passivePort) Extend([]*taken)                     {}
func (p passivePort) Return([]*taken, guard.Reason) error { return nil }

// TakenAt implements [guard.Taker].
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
// Goroutines: the intake reads the claim. The hand-out writes Messages and looks for messages
// that are not marked. The watch waits for the end of the claim. All end before ConsumeClaim
// returns. Lock order: mu, then the tracker's.
type wrappedClaim struct {
	sarama.ConsumerGroupClaim
	claim *claim
	ss    *session
	src   *guard.Source[*taken]
	lease time.Duration // how long a message may be out, the policy's Timeout; 0: no limit
	alone bool          // one message is out at a time

	exact chan struct{} // a receive proves that no hand-over is half noted
	anew  chan struct{} // asks the hand-out for a new feed for the next call
	gone  chan struct{} // closed when the hand-out has ended

	mu      sync.Mutex
	out     map[int64]*out               // attempts in the handler's hand, by offset
	sending *out                         // the one of out that waits to be taken; nil for none
	handed  uint64                       // how many attempts were handed out
	feed    chan *sarama.ConsumerMessage // Messages of the present call; the hand-out alone changes it
	over    bool                         // the source has ended: marks go to the group directly
}

// callClaim is the claim of one call of ConsumeClaim.
type callClaim struct {
	*wrappedClaim
	messages <-chan *sarama.ConsumerMessage
}

// Messages are the messages that may be handled now, until the call has failed.
func (c callClaim) Messages() <-chan *sarama.ConsumerMessage { return c.messages }

func (w *wrappedClaim) call() sarama.ConsumerGroupClaim {
	w.mu.Lock()
	defer w.mu.Unlock()
	return callClaim{w, w.feed}
}

// consumePassive runs a claim of the passive shape.
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
	leave := reading.Done() // closed when the claim ends
	var intake, handOut sync.WaitGroup
	over := make(chan struct{}) // closed when the intake has ended
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

	// Nobody will settle the unmarked messages through the source any more, so End need not wait
	// for them.
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
			return err // the handler wants to leave, or saw the session's end before leave was closed
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
			// No message was in hand, so no retry delay slows this loop down.
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

// failing joins the log lines of a topic whose loops fail: in an outage each probe would be a
// line.
type failing struct {
	next  time.Time     // no line before this time
	every time.Duration // time from the latest line to next
	lines int           // failures since the latest line
}

const (
	failingBase = time.Second
	failingMost = time.Minute
)

// sayFailed logs that a loop failed: the first failure of a topic at once, later ones together
// with their number, at intervals that double.
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
		if now.Sub(f.next) >= failingMost || f.every == 0 { // silent for failingMost, or new
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

// intake offers the claim's messages to the source, and waits while the window is full. It ends
// with ctx, the source or the claim.
func (w *wrappedClaim) intake(ctx context.Context) {
	for {
		w.ss.yield(ctx.Done(), nil)
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
