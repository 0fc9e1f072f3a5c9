// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go/jetstream"
)

// copies knows the messages that this process has taken from the server, by their
// sequence in the stream, until some time after their ack. The server delivers a
// message again when its extension or its ack does not arrive within the AckWait:
// the connection was down, or the process stood still. Such a copy is not handled:
//
//   - while the source has the message, the copy takes its place at the server: it is
//     acked and given back instead, since it knows the latest count of deliveries;
//   - when the message has been acked, the copy is acked too.
//
// The message's time in the stream is compared as well, for a stream that was deleted
// and made anew counts from 1 again. A first delivery of an acked message is handled:
// somebody has made the consumer anew to read the stream again.
//
// It is safe for concurrent use.
type copies struct {
	newer atomic.Int64 // len(latest), so that an ack need not ask

	mu     sync.Mutex
	known  map[uint64]known
	latest map[uint64]jetstream.Msg // copies of messages that the source has
	acked  []uint64                 // the sequences acked last, a ring
	oldest int                      // its oldest
	keep   int                      // its size at most
}

// known is a message that was taken.
type known struct {
	time  uint64 // in the stream
	acked bool
}

// newCopies remembers acks of two windows: as many copies at most are on their way
// here when their message is acked.
func newCopies(window int) *copies {
	return &copies{known: make(map[uint64]known), latest: make(map[uint64]jetstream.Msg), keep: 2 * window}
}

// take tells whether a message is new here. One that is not is dealt with.
func (c *copies) take(m jetstream.Msg) bool {
	d, ok := deliveryOf(m.Reply())
	if !ok {
		return true
	}
	c.mu.Lock()
	was, found := c.known[d.seq]
	switch {
	case !found || was.time != d.time || was.acked && d.first:
		c.known[d.seq] = known{time: d.time}
		c.unsetLocked(d.seq)
		c.mu.Unlock()
		return true
	case was.acked:
		c.mu.Unlock()
		_ = m.Ack() // if it is lost, the next copy brings it
		return false
	}
	c.latest[d.seq] = m
	c.newer.Store(int64(len(c.latest)))
	c.mu.Unlock()
	return false
}

// of is the latest copy of a message that the source has: usually itself.
func (c *copies) of(m jetstream.Msg) jetstream.Msg {
	if c.newer.Load() == 0 {
		return m
	}
	d, ok := deliveryOf(m.Reply())
	if !ok {
		return m
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if latest := c.latest[d.seq]; latest != nil && c.known[d.seq].time == d.time {
		return latest
	}
	return m
}

// settled takes note that the source is done with a message. One that could not be
// acked is forgotten: its next copy is handled.
func (c *copies) settled(m jetstream.Msg, acked bool) {
	d, ok := deliveryOf(m.Reply())
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known[d.seq].time != d.time {
		return // of an earlier stream
	}
	c.unsetLocked(d.seq)
	if !acked {
		delete(c.known, d.seq)
		return
	}
	c.known[d.seq] = known{d.time, true}
	if len(c.acked) < c.keep {
		c.acked = append(c.acked, d.seq)
		return
	}
	if out := c.acked[c.oldest]; c.known[out].acked {
		delete(c.known, out)
	}
	c.acked[c.oldest] = d.seq
	c.oldest = (c.oldest + 1) % c.keep
}

func (c *copies) unsetLocked(seq uint64) {
	if len(c.latest) > 0 {
		delete(c.latest, seq)
		c.newer.Store(int64(len(c.latest)))
	}
}

// delivery is what an ack subject says.
type delivery struct {
	seq   uint64 // in the stream
	time  uint64 // in the stream, Unix nanoseconds
	first bool   // no redelivery
}

// deliveryOf reads an ack subject as [jetstream.Msg.Metadata] does, without its cost:
//
//	$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>
//	$JS.ACK.<domain>.<account>.<stream>.<consumer>.<deliveries>.… and maybe one more
func deliveryOf(reply string) (d delivery, ok bool) {
	rest, ok := strings.CutPrefix(reply, "$JS.ACK.")
	if !ok {
		return d, false
	}
	skip := 2
	switch dots := strings.Count(rest, "."); {
	case dots >= 8:
		skip = 4
	case dots != 6:
		return d, false
	}
	for range skip {
		_, rest, _ = strings.Cut(rest, ".")
	}
	deliveries, rest, _ := strings.Cut(rest, ".")
	seq, rest, _ := strings.Cut(rest, ".")
	_, rest, _ = strings.Cut(rest, ".")
	at, _, _ := strings.Cut(rest, ".")
	d.first = deliveries == "1"
	var seqErr, timeErr error
	d.seq, seqErr = strconv.ParseUint(seq, 10, 64)
	d.time, timeErr = strconv.ParseUint(at, 10, 64)
	return d, seqErr == nil && timeErr == nil
}
