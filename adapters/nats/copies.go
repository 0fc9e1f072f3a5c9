// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"math/bits"
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
// somebody has made the consumer anew, or has reset it, to read the stream again. Another
// process may have had the first delivery of those: a consumer counts its deliveries, and when
// it has begun to count anew, no ack is remembered.
//
// It is asked twice for each message, so it is a table, where an acked message is
// remembered until another takes its place, with a map beside it for what finds its
// place taken by an unsettled one. It is safe for concurrent use.
type copies struct {
	prefix atomic.Pointer[string] // of the ack subjects, up to the count of deliveries
	newer  atomic.Int64           // len(latest), so that an ack need not ask

	mu     sync.Mutex
	top    uint64  // the latest delivery of the consumer, as it counts them
	slack  uint64  // by how much one may come behind a later one: several pulls are open
	table  []known // a power of two
	shift  int     // of a hash, to its length
	beside map[uint64]*known
	latest map[uint64]jetstream.Msg // copies of messages that the source has
}

// known is a message that was taken.
type known struct {
	seq, time uint64
	state     uint8
}

const (
	unknown uint8 = iota
	unsettled
	acked
)

// maxCopies bounds the table: 400 KB.
const maxCopies = 1 << 14

// newCopies remembers acks of three windows or so: as many copies at most are on their
// way here when their message is acked.
func newCopies(window int) *copies {
	n := bits.Len(uint(min(max(4*window, 4), maxCopies) - 1))
	return &copies{
		table: make([]known, 1<<n), shift: 64 - n,
		beside: make(map[uint64]*known), latest: make(map[uint64]jetstream.Msg),
	}
}

// placeLocked is the message's in the table: dense sequences, and those of a stride,
// spread evenly.
func (c *copies) placeLocked(seq uint64) *known { return &c.table[seq*0x9e3779b97f4a7c15>>c.shift] }

// findLocked is what is known of a message, nil for nothing.
func (c *copies) findLocked(seq uint64) *known {
	if k := c.placeLocked(seq); k.seq == seq && k.state != unknown {
		return k
	}
	if len(c.beside) == 0 {
		return nil
	}
	return c.beside[seq]
}

// take tells whether a message is new here. One that is not is dealt with.
func (c *copies) take(m jetstream.Msg) bool {
	d, ok := c.read(m.Reply())
	if !ok {
		return true
	}
	c.mu.Lock()
	if d.number+c.slack < c.top {
		c.forgetLocked()
		c.top = 0
	}
	c.top = max(c.top, d.number)
	k := c.findLocked(d.seq)
	switch {
	case k == nil:
		if k = c.placeLocked(d.seq); k.state == unsettled {
			k = new(known)
			c.beside[d.seq] = k
		}
	case k.state == acked && d.first && k.time == d.time: // the consumer counts anew
		c.forgetLocked()
		c.top = d.number
		c.unsetLocked(d.seq)
	case k.time != d.time:
		c.unsetLocked(d.seq)
	case k.state == acked:
		c.mu.Unlock()
		_ = m.Ack() // if it is lost, the next copy brings it
		return false
	default:
		c.latest[d.seq] = m
		c.newer.Store(int64(len(c.latest)))
		c.mu.Unlock()
		return false
	}
	*k = known{d.seq, d.time, unsettled}
	c.mu.Unlock()
	return true
}

// forgetLocked forgets all acks.
func (c *copies) forgetLocked() {
	for i := range c.table {
		if c.table[i].state == acked {
			c.table[i].state = unknown
		}
	}
}

// of is the latest copy of a message that the source has: usually itself.
func (c *copies) of(m jetstream.Msg) jetstream.Msg {
	if c.newer.Load() == 0 {
		return m
	}
	d, ok := c.read(m.Reply())
	if !ok {
		return m
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if latest := c.latest[d.seq]; latest != nil && c.findLocked(d.seq).time == d.time {
		return latest
	}
	return m
}

// stale tells whether a message is of an earlier stream of the name, whose sequence a
// message that is here has, too: the server would take an ack of one for the other's.
func (c *copies) stale(m jetstream.Msg) bool {
	d, ok := c.read(m.Reply())
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.findLocked(d.seq)
	return k != nil && k.time != d.time
}

// settled takes note that the source is done with a message. One that could not be
// acked is forgotten: its next copy is handled.
func (c *copies) settled(m jetstream.Msg, ok bool) {
	d, known := c.read(m.Reply())
	if !known {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.findLocked(d.seq)
	if k == nil || k.time != d.time {
		return // of an earlier stream
	}
	c.unsetLocked(d.seq)
	if k.state = unknown; ok {
		k.state = acked
	}
	if len(c.beside) > 0 && c.beside[d.seq] == k {
		delete(c.beside, d.seq)
		if place := c.placeLocked(d.seq); ok && place.state != unsettled {
			*place = *k
		}
	}
}

func (c *copies) unsetLocked(seq uint64) {
	if len(c.latest) > 0 {
		delete(c.latest, seq)
		c.newer.Store(int64(len(c.latest)))
	}
}

// read is deliveryOf: all ack subjects of a consumer begin alike.
func (c *copies) read(reply string) (delivery, bool) {
	if p := c.prefix.Load(); p != nil {
		if rest, ok := strings.CutPrefix(reply, *p); ok {
			return deliveryIn(rest)
		}
	}
	prefix, ok := ackPrefix(reply)
	if !ok {
		return delivery{}, false
	}
	c.prefix.Store(&prefix)
	return deliveryIn(reply[len(prefix):])
}

// delivery is what an ack subject says.
type delivery struct {
	seq    uint64 // in the stream
	number uint64 // of the delivery, as the consumer counts them
	time   uint64 // in the stream, Unix nanoseconds
	first  bool   // no redelivery
}

// ackPrefix is an ack subject up to the count of deliveries. They are read as
// [jetstream.Msg.Metadata] does, without its cost:
//
//	$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>
//	$JS.ACK.<domain>.<account>.<stream>.<consumer>.<deliveries>.… and maybe one more
func ackPrefix(reply string) (prefix string, ok bool) {
	rest, ok := strings.CutPrefix(reply, "$JS.ACK.")
	if !ok {
		return "", false
	}
	skip := 2
	switch dots := strings.Count(rest, "."); {
	case dots >= 8:
		skip = 4
	case dots != 6:
		return "", false
	}
	for range skip {
		_, rest, _ = strings.Cut(rest, ".")
	}
	return reply[:len(reply)-len(rest)], true
}

// deliveryIn reads what is behind the prefix.
func deliveryIn(rest string) (d delivery, ok bool) {
	deliveries, rest, ok1 := cutNumber(rest)
	seq, rest, ok2 := cutNumber(rest)
	number, rest, ok3 := cutNumber(rest)
	at, _, ok4 := cutNumber(rest)
	return delivery{seq, number, at, deliveries == 1}, ok1 && ok2 && ok3 && ok4
}

// cutNumber reads the digits before the next dot.
func cutNumber(s string) (n uint64, rest string, ok bool) {
	for i := range len(s) {
		c := s[i] - '0'
		if s[i] == '.' {
			return n, s[i+1:], i > 0
		}
		if c > 9 {
			break
		}
		n = n*10 + uint64(c)
	}
	return 0, "", false
}
