// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// WrapHandler is the passive shape: a consumer group's handler that exists
// already and marks by itself, with the guard between it and the group.
//
//	err := group.Consume(ctx, topics, kafka.WrapHandler(g, existing))
//
// Its session and claims are wrapped. MarkMessage is success, and so is
// MarkOffset for everything below it that was handed out; [Fail] is failure; an
// error from ConsumeClaim is the failure of every message that is handed out and
// not marked, and ConsumeClaim is then called again for the same claim, so that
// one failure costs the group no rebalance. A message that is neither marked nor
// failed within the policy's Timeout has failed with [ErrNotMarked].
//
// Marks may come in any order and from any goroutine: only what is settled
// without a gap is marked at the group. See [WithBatchMarks] for a loop that
// marks the last of several. What a loop marks although it failed is lost to it,
// as without the guard.
//
// What it cannot do: it sees only these outcomes. There is no handler timeout,
// and a panic is the program's. A retry is handed out after messages that were
// behind it, unless the policy has one worker, which hands out one message at a
// time. [Wrap] has none of these limits.
//
// While the source holds, Messages has nothing to give. It is closed when the
// claim is revoked, at once: what sarama has buffered is not handed out any more.
// Commit marks what is settled and commits; with AutoCommit off nothing else
// does. ResetOffset goes through, and stops marks until the loop marks again.
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
// be marked as well.
func Fail(s sarama.ConsumerGroupSession, m *sarama.ConsumerMessage, err error) error {
	ss, ok := s.(*session)
	if !ok {
		return ErrNotWrapped
	}
	if err == nil {
		ss.MarkMessage(m, "")
		return nil
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
}

// passivePort is the port of the passive shape.
type passivePort struct {
	*claim
	more chan struct{} // holds a token when room came; capacity 1
}

func (p passivePort) Lane(m *taken) uint64                { return p.claim.Lane(m.ConsumerMessage) }
func (p passivePort) Size(m *taken) int                   { return size(m.ConsumerMessage) }
func (p passivePort) Meta(m *taken) guard.Meta            { return p.claim.Meta(m.ConsumerMessage) }
func (p passivePort) Extend([]*taken)                     {}
func (p passivePort) Return([]*taken, guard.Reason) error { return nil }

func (p passivePort) Ack(m *taken) error {
	p.marks.settle(m.Offset, m.meta)
	return nil
}

func (p passivePort) Demand(n int) {
	p.claim.Demand(n)
	if n > 0 {
		select {
		case p.more <- struct{}{}:
		default:
		}
	}
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
	port  passivePort
	lease time.Duration // 0: none

	exact chan struct{} // a token taken from it says that no hand-over is half noted
	gone  chan struct{} // the hand-out has ended

	mu      sync.Mutex
	out     map[int64]*out // handed out, by offset
	sending *out           // of these, the one that waits to be taken
	handed  uint64         // how many attempts were handed out
	feed    chan *sarama.ConsumerMessage
	over    bool // the source has ended: marks go to the group directly
}

// out is one attempt that a wrapped handler has in hand.
type out struct {
	m     *taken
	msg   *sarama.ConsumerMessage // as handed out
	token guard.Token
	turn  uint64    // its place in the order in which they were handed out, from 1
	at    time.Time // when it was taken
}

// Messages are those that may be handled now.
func (w *wrappedClaim) Messages() <-chan *sarama.ConsumerMessage {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.feed
}

// consumePassive is the passive shape.
func (ss *session) consumePassive(c *claim, revoked <-chan struct{}) error {
	port := passivePort{c, make(chan struct{}, 1)}
	src, err := openClaim[*taken](ss, ss.sourceConfig(c), port, nil, revoked)
	if src == nil {
		return err
	}
	ss.add(c)
	defer ss.remove(c)
	w := &wrappedClaim{
		ConsumerGroupClaim: c.native, claim: c, ss: ss, src: src, port: port,
		lease: src.State().Settings.Timeout, out: make(map[int64]*out),
		feed: make(chan *sarama.ConsumerMessage), exact: make(chan struct{}), gone: make(chan struct{}),
	}
	ss.mu.Lock()
	ss.wraps[place{c.topic, c.partition}] = w
	ss.mu.Unlock()

	leave := make(chan struct{}) // the claim ends, or the loop is to begin anew
	var intake, handOut sync.WaitGroup
	over := make(chan struct{}) // the intake has ended
	intake.Go(func() {
		defer close(over)
		w.intake(leave)
	})
	handOut.Go(func() { w.handOut(leave) })
	stop := sync.OnceFunc(func() { close(leave) })
	var watch sync.WaitGroup
	watch.Go(func() {
		ss.await(src, over, revoked)
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
	report := ss.endSource(src.End)
	_ = c.Flush() // it has no error
	return errors.Join(err, leftError(c.name, report))
}

// loop calls the wrapped handler's ConsumeClaim until it returns nil or the claim
// ends.
func (w *wrappedClaim) loop(leave <-chan struct{}) error {
	for failures := 0; ; failures++ {
		err := w.ss.h.existing.ConsumeClaim(w.ss, w)
		select {
		case <-leave:
			return err
		default:
		}
		if err == nil || w.ss.native.Context().Err() != nil {
			return err // it wants to leave, or saw the session's end before leave did
		}
		w.ss.h.opts.log.Warn("the handler's ConsumeClaim failed and is called again", "source", w.claim.name, "error", err)
		if w.failAll(err) == 0 {
			// Nothing was in hand, so no retry delay holds it back.
			pause := time.NewTimer(min(time.Second, 10*time.Millisecond<<min(failures, 10)))
			select {
			case <-pause.C:
			case <-leave:
				pause.Stop()
				return err
			}
			continue
		}
		failures = 0
	}
}

// intake offers what the claim brings, and waits while the window is full.
func (w *wrappedClaim) intake(leave <-chan struct{}) {
	poll := time.NewTimer(time.Hour)
	defer poll.Stop()
	for {
		w.ss.yield(leave)
		var m *sarama.ConsumerMessage
		var ok bool
		select {
		case m, ok = <-w.ConsumerGroupClaim.Messages():
		case <-leave:
			return
		}
		if !ok {
			return
		}
		w.claim.marks.deliver(m.Offset)
		t := &taken{ConsumerMessage: m}
		for {
			err := w.src.Offer(t)
			if err == nil {
				break
			}
			if !errors.Is(err, guard.ErrFull) {
				return
			}
			poll.Reset(roomPoll) // room of less than half the window is not told
			select {
			case <-w.port.more:
			case <-poll.C:
			case <-leave:
				return
			}
		}
	}
}

const roomPoll = 20 * time.Millisecond

// handOut gives the handler what may be handled.
func (w *wrappedClaim) handOut(leave <-chan struct{}) {
	defer close(w.gone)
	defer close(w.feed)
	var leases <-chan time.Time
	if w.lease > 0 {
		look := time.NewTicker(max(w.lease/4, time.Millisecond))
		defer look.Stop()
		leases = look.C
	}
	for {
		select {
		case it, ok := <-w.src.Ready():
			if !ok {
				return
			}
			o := w.hand(it)
			for handed := false; !handed; {
				select {
				case w.feed <- o.msg:
					handed = true
					w.mu.Lock()
					o.at, w.sending = time.Now(), nil
					w.mu.Unlock()
				case w.exact <- struct{}{}:
				case <-leases:
					w.expire()
				case <-leave:
					return
				}
			}
		case w.exact <- struct{}{}:
		case <-leases:
			w.expire()
		case <-leave:
			return
		}
	}
}

// hand registers an attempt. It is registered before it is handed over, since
// its mark may come at once.
func (w *wrappedClaim) hand(it guard.Item[*taken]) *out {
	o := &out{m: it.Msg, msg: it.Msg.ConsumerMessage, token: it.Token}
	if len(it.Msg.attempts) > 0 {
		again := *it.Msg.ConsumerMessage
		o.msg = &again
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	it.Msg.attempts = append(it.Msg.attempts, o.msg)
	w.handed++
	o.turn = w.handed
	w.out[o.m.Offset], w.sending = o, o
	return o
}

// settleDown waits until it is known whether the message that was being handed
// over was taken.
func (w *wrappedClaim) settleDown() {
	select {
	case <-w.exact:
	case <-w.gone:
	}
}

// take takes a message out of the handler's hand; nil if it is not there.
func (w *wrappedClaim) take(m *sarama.ConsumerMessage) *out {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.findLocked(m)
	if o != nil {
		delete(w.out, m.Offset)
	}
	return o
}

// findLocked is the attempt that a message in the handler's hand belongs to. A
// pointer that was handed out for an earlier attempt is not this one's.
func (w *wrappedClaim) findLocked(m *sarama.ConsumerMessage) *out {
	o := w.out[m.Offset]
	if o == nil || m != o.msg && slices.Contains(o.m.attempts, m) {
		return nil
	}
	return o
}

// mark is MarkMessage.
func (w *wrappedClaim) mark(m *sarama.ConsumerMessage, meta string) {
	w.claim.marks.resumed()
	if w.ss.h.opts.batchMarks {
		w.markBatch(m, meta)
		return
	}
	if o := w.take(m); o != nil {
		w.done([]*out{o}, meta)
	}
}

// markBatch is MarkMessage of the last of several. Retries come between others, so
// it is the order of handing out that counts, not that of the offsets.
func (w *wrappedClaim) markBatch(m *sarama.ConsumerMessage, meta string) {
	w.mu.Lock()
	last := w.findLocked(m)
	unsure := last != nil && w.sending == last
	w.mu.Unlock()
	if last == nil {
		return
	}
	if unsure {
		w.settleDown()
	}
	w.done(w.takeWhere(func(o *out) bool { return o.turn <= last.turn }), meta)
}

// markBelow is MarkOffset.
func (w *wrappedClaim) markBelow(offset int64, meta string) {
	w.claim.marks.resumed()
	w.mu.Lock()
	unsure := w.sending != nil && w.sending.m.Offset < offset
	w.mu.Unlock()
	if unsure {
		w.settleDown()
	}
	w.done(w.takeWhere(func(o *out) bool { return o.m.Offset < offset }), meta)
}

// takeWhere takes messages out of the handler's hand, the oldest first; never the
// one that waits to be taken.
func (w *wrappedClaim) takeWhere(which func(*out) bool) []*out {
	w.mu.Lock()
	defer w.mu.Unlock()
	var os []*out
	for at, o := range w.out {
		if o != w.sending && which(o) {
			os = append(os, o)
			delete(w.out, at)
		}
	}
	slices.SortFunc(os, func(a, b *out) int { return cmp.Compare(a.m.Offset, b.m.Offset) })
	return os
}

// done settles messages.
func (w *wrappedClaim) done(os []*out, meta string) {
	w.mu.Lock()
	over := w.over
	w.mu.Unlock()
	for _, o := range os {
		o.m.meta = meta
		if over {
			// A mark from Cleanup, or from a worker that outlived its loop: the
			// source has given the message up, but the group still takes it.
			w.claim.marks.settle(o.m.Offset, meta)
			continue
		}
		w.src.Done(o.token, nil)
	}
	if over {
		_ = w.claim.Flush() // it has no error
	}
}

// failAll fails what the handler has in hand and returns how many those are.
func (w *wrappedClaim) failAll(err error) int {
	w.settleDown()
	return w.fail(err, func(*out) bool { return true })
}

// expire fails what was not marked in time.
func (w *wrappedClaim) expire() {
	late := time.Now().Add(-w.lease)
	w.fail(fmt.Errorf("%w of %s", ErrNotMarked, w.lease), func(o *out) bool { return o.at.Before(late) })
}

func (w *wrappedClaim) fail(err error, which func(*out) bool) int {
	os := w.takeWhere(which)
	for _, o := range os {
		w.src.Done(o.token, err)
	}
	return len(os)
}

// giveUp takes the source's share in what the handler still has in hand.
func (w *wrappedClaim) giveUp() {
	w.mu.Lock()
	w.over = true
	os := make([]*out, 0, len(w.out))
	for _, o := range w.out {
		os = append(os, o)
	}
	w.mu.Unlock()
	for _, o := range os {
		w.src.Done(o.token, guard.Backoff(context.Canceled, time.Time{}))
	}
}
