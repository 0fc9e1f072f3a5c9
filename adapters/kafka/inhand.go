// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// out is one attempt that a wrapped handler has in hand.
type out struct {
	m     *taken
	msg   *sarama.ConsumerMessage // the pointer that was handed out for this attempt
	token guard.Token
	turn  uint64    // position in the order of handing out, from 1
	at    time.Time // when the handler took the message
}

// handOut gives the handler the messages that may be handled now.
func (w *wrappedClaim) handOut(leave <-chan struct{}) {
	defer close(w.gone)
	defer func() { close(w.feed) }()
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
					now := time.Now()
					o.m.at.Store(&now)
					w.mu.Lock()
					o.at, w.sending = now, nil
					w.mu.Unlock()
				case w.exact <- struct{}{}:
				case <-w.anew:
					w.renew()
				case <-leases:
					w.expire()
				case <-leave:
					return
				}
			}
		case w.exact <- struct{}{}:
		case <-w.anew:
			w.renew()
		case <-leases:
			w.expire()
		case <-leave:
			return
		}
	}
}

// renew makes a new feed for the next call and closes that of the call before. A goroutine that
// the call before left behind must not take messages of the next one.
func (w *wrappedClaim) renew() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.feed)
	w.feed = make(chan *sarama.ConsumerMessage)
}

// hand registers an attempt before it is handed over, since its mark may come at once.
func (w *wrappedClaim) hand(it guard.Item[*taken]) *out {
	o := &out{m: it.Msg, msg: it.Msg.ConsumerMessage, token: it.Token}
	o.m.at.Store(nil)
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

// handedOut is how many attempts were handed out.
func (w *wrappedClaim) handedOut() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.handed
}

// settleDown waits until it is known whether the message that was being handed
// over was taken.
func (w *wrappedClaim) settleDown() {
	select {
	case <-w.exact:
	case <-w.gone:
	}
}

// take takes a message out of the handler's hand; nil if the handler does not have it.
func (w *wrappedClaim) take(m *sarama.ConsumerMessage) *out {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.findLocked(m)
	if o != nil {
		delete(w.out, m.Offset)
	}
	return o
}

// findLocked is the attempt that a message in the handler's hand belongs to. nil if there is
// none, or if the pointer was handed out for an earlier attempt.
func (w *wrappedClaim) findLocked(m *sarama.ConsumerMessage) *out {
	o := w.out[m.Offset]
	if o == nil || m != o.msg && slices.Contains(o.m.attempts, m) {
		return nil
	}
	return o
}

// mark implements MarkMessage.
func (w *wrappedClaim) mark(m *sarama.ConsumerMessage, meta string) {
	w.claim.marks.Resumed()
	if w.ss.h.opts.batchMarks {
		w.markBatch(m, meta)
		return
	}
	if o := w.take(m); o != nil {
		w.done([]*out{o}, meta)
	}
}

// markBatch implements MarkMessage for the last message of a batch. It goes by the order of
// handing out, not by offsets, since retries come between other messages.
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

// markBelow implements MarkOffset.
func (w *wrappedClaim) markBelow(offset int64, meta string) {
	w.claim.marks.Resumed()
	w.mu.Lock()
	unsure := w.sending != nil && w.sending.m.Offset < offset
	w.mu.Unlock()
	if unsure {
		w.settleDown()
	}
	w.done(w.takeWhere(func(o *out) bool { return o.m.Offset < offset }), meta)
}

// takeWhere takes messages out of the handler's hand, in ascending order of their offsets, but
// never the message that still waits to be taken (sending).
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
			// A mark from Cleanup, or from a worker that outlived its loop: the source has
			// given the message up, but the group still accepts the mark.
			w.claim.marks.Settle(o.m.Offset, meta)
			w.src.Done(o.token, guard.Backoff(context.Canceled, time.Time{})) // giveUp may have missed it
			continue
		}
		w.src.Done(o.token, nil)
	}
	if over {
		w.claim.mark()
	}
}

// failAll fails all messages in the handler's hand and returns their number.
func (w *wrappedClaim) failAll(err error) int {
	w.settleDown()
	return w.fail(err, func(*out) bool { return true })
}

// expire fails messages that were not marked in time.
func (w *wrappedClaim) expire() {
	late := time.Now().Add(-w.lease)
	err := fmt.Errorf("%w of %s", errNotMarked, w.lease)
	if w.alone {
		err = fmt.Errorf("%w; one message is out at a time: a loop that takes several before it marks needs Policy.Workers or WithBatchMarks", err)
	}
	w.fail(err, func(o *out) bool { return o.at.Before(late) })
}

func (w *wrappedClaim) fail(err error, which func(*out) bool) int {
	os := w.takeWhere(which)
	for _, o := range os {
		w.src.Done(o.token, err)
	}
	return len(os)
}

// giveUp gives messages that are still in the handler's hand back to the source, as not handled.
// Later marks go to the group directly.
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
