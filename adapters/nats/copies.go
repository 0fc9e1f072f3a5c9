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

// copies remembers the messages that this process took from the server, by their sequence in
// the stream, until some time after their ack. The server redelivers a message when its
// extension or ack does not arrive within the AckWait, because the connection was down or
// the process stood still. Such a copy is not handled:
//
//   - While the source has the message, the copy replaces it at the server: the copy is acked
//     or given back instead, since it has the latest count of deliveries.
//   - When the message has been acked, the copy is acked too.
//
// copies also compares the message's time in the stream: a stream that was deleted and made
// again counts from 1 again. A first delivery of an acked message is handled: somebody has
// made the consumer again, or has reset it, to read the stream again. Another process may
// have got that first delivery. So when the consumer's own count of deliveries begins again,
// copies forgets all acks.
//
// Each message needs two lookups, so copies is a table. It remembers an acked message until
// another message takes its place. The map overflow has messages whose place is taken by an
// unsettled message. copies is safe for concurrent use.
type copies struct {
	prefix      atomic.Pointer[string] // common start of the ack subjects, up to the count of deliveries
	latestCount atomic.Int64           // len(latest): while it is 0, of takes no lock

	mu       sync.Mutex
	top      uint64  // number of the latest delivery, by the consumer's count
	slack    uint64  // how far a delivery may come behind a later one, with several open pulls
	table    []known // its length is a power of two
	shift    int     // reduces a hash to an index of table
	overflow map[uint64]*known
	latest   map[uint64]jetstream.Msg // latest copies of messages that the source has
}

// known is a message that this process has taken.
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

// newCopies makes a table for the acks of about three windows. At most as many copies are on
// their way when their message is acked.
func newCopies(window int) *copies {
	n := bits.Len(uint(min(max(4*window, 4), maxCopies) - 1))
	return &copies{
		table: make([]known, 1<<n), shift: 64 - n,
		overflow: make(map[uint64]*known), latest: make(map[uint64]jetstream.Msg),
	}
}

// placeLocked is the message's place in the table. Dense sequences, and sequences with a
// stride, spread evenly.
func (c *copies) placeLocked(seq uint64) *known { return &c.table[seq*0x9e3779b97f4a7c15>>c.shift] }

// findLocked returns the entry of a message, nil if it is unknown.
func (c *copies) findLocked(seq uint64) *known {
	if k := c.placeLocked(seq); k.seq == seq && k.state != unknown {
		return k
	}
	if len(c.overflow) == 0 {
		return nil
	}
	return c.overflow[seq]
}

// take reports whether a message is new here. It acks or keeps a copy.
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
			c.overflow[d.seq] = k
		}
	case k.state == acked && d.first && k.time == d.time: // the consumer's count began again
		c.forgetLocked()
		c.top = d.number
		c.unsetLocked(d.seq)
	case k.time != d.time:
		c.unsetLocked(d.seq)
	case k.state == acked:
		c.mu.Unlock()
		_ = m.Ack() // if the ack is lost, the next copy is acked
		return false
	default:
		c.latest[d.seq] = m
		c.latestCount.Store(int64(len(c.latest)))
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

// of returns the latest copy of a message that the source has, usually the message itself.
func (c *copies) of(m jetstream.Msg) jetstream.Msg {
	if c.latestCount.Load() == 0 {
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

// stale reports whether a message is from an earlier stream of the same name, and this
// process has a message of the present stream with its sequence. The server would take an ack
// of the first for an ack of the second.
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

// settled notes that the source is done with a message. A message whose ack failed is
// forgotten: its next copy is handled.
func (c *copies) settled(m jetstream.Msg, ok bool) {
	d, known := c.read(m.Reply())
	if !known {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.findLocked(d.seq)
	if k == nil || k.time != d.time {
		return // the message is from an earlier stream
	}
	c.unsetLocked(d.seq)
	if k.state = unknown; ok {
		k.state = acked
	}
	if len(c.overflow) > 0 && c.overflow[d.seq] == k {
		delete(c.overflow, d.seq)
		if place := c.placeLocked(d.seq); ok && place.state != unsettled {
			*place = *k
		}
	}
}

func (c *copies) unsetLocked(seq uint64) {
	if len(c.latest) > 0 {
		delete(c.latest, seq)
		c.latestCount.Store(int64(len(c.latest)))
	}
}

// read reads an ack subject. All ack subjects of a consumer begin alike.
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

// delivery has the facts of an ack subject.
type delivery struct {
	seq    uint64 // sequence of the message in the stream
	number uint64 // number of the delivery, by the consumer's count
	time   uint64 // time of the message in the stream, Unix nanoseconds
	first  bool   // the first delivery of the message
}

// ackPrefix returns the start of an ack subject, up to the count of deliveries. It reads the
// subject as [jetstream.Msg.Metadata] does, at a lower cost:
//
//	$JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>
//	$JS.ACK.<domain>.<account>.<stream>.<consumer>.<deliveries>... (as above, and maybe one more)
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

// deliveryIn reads the rest of an ack subject behind the prefix.
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
