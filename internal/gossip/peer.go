// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"math/bits"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// window is how many packets back acknowledgements reach: the width of their
// bitmap.
const window = 64

// peer is what the session knows of one incarnation of one name. The object stays when
// a later incarnation takes the name; reset empties it.
type peer struct {
	incarnation  crdt.Replica
	toName       uint32 // hash of incarnation.Name
	addr         netip.AddrPort
	zone, region string
	distance     int          // 0 is in our zone, 1 in our region
	places       [agendas]int // in the session's agendas
	at           *address     // where it was last heard

	// What was heard. Sequence numbers are the peer's.
	heardAt time.Duration // own clock
	heard   uint64        // highest sequence number
	bits    uint64        // bit i: heard-i was merged
	refuse  []uint64      // per section, bit i: heard-i was not taken in
	theirs  time.Duration // highest Sent, the peer's clock
	gotAt   time.Duration // own clock, when theirs came
	owes    bool          // we owe a packet
	rest    time.Duration // how much later than a keep-alive its next packet may come
	asksTil time.Duration // own clock: until then it wants keep-alives at their full pace

	// What was sent. Sequence numbers are ours.
	everSent bool
	sentAt   time.Duration
	due      time.Duration // when the next packet leaves, as last computed
	seq      uint64        // of the latest packet; 0 is none
	ring     [window]uint64
	upto     []uint64 // window × sections: the mark that a packet makes complete
	acked    []uint64 // per section
	refused  []bool   // per section: the latest word about it was a refusal
	sentUpto []uint64 // per section: the highest mark that was sent
	ackSeen  uint64
	bitsSeen uint64
	echo     time.Duration // own clock: the latest of our Sent that it has heard
	hearsAt  time.Duration // own clock: as of when it hears us, see hearing
	unechoed time.Duration // own clock: no packet before this lacks an echo; 0 if none does
	asked    time.Duration // own clock: the first packet that wants an answer and has no echo; 0 is none
	waits    time.Duration // own clock: the first one that wants an answer since the peer was heard; 0 is none
	restAt   time.Duration // when the next packet leaves if there is nothing to say
	promise  time.Duration // how much later than a keep-alive that is, as our latest packet says
	mine     time.Duration // the most that those say which have no echo
	wallAt   time.Duration
	introAt  time.Duration // when the next introduction is due
	met      bool          // it has repeated a Sent of ours
	lost     bool
	told     bool // that we leave
	knows    bool // that we leave

	rtt   rttFilter
	delay delayProbe
	last  time.Duration // latest sample of delay
	worst time.Duration
}

// reset begins with an incarnation of the peer's name.
func (p *peer) reset(now time.Duration, incarnation crdt.Replica, sections int) {
	*p = peer{
		incarnation: incarnation,
		toName:      hash32(incarnation.Name),
		addr:        p.addr,
		zone:        p.zone,
		region:      p.region,
		distance:    p.distance,
		places:      p.places,
		at:          p.at,
		heardAt:     now,
		echo:        now, // until it has had time to hear us, it counts as if it had
		hearsAt:     now,
		introAt:     now,
		refuse:      make([]uint64, sections),
		upto:        make([]uint64, window*sections),
		acked:       make([]uint64, sections),
		refused:     make([]bool, sections),
		sentUpto:    make([]uint64, sections),
	}
}

// receive notes a sequence number. It reports whether the packet is to be taken
// in: it is not if it was already, or is so old that it could not be acknowledged.
func (p *peer) receive(seq uint64) Reason {
	if seq > p.heard {
		shift := seq - p.heard
		p.bits = shl(p.bits, shift) | 1
		for i := range p.refuse {
			p.refuse[i] = shl(p.refuse[i], shift)
		}
		p.heard = seq
		return Accepted
	}
	back := p.heard - seq
	if back >= window {
		return Stale
	}
	if p.bits>>back&1 != 0 {
		return Duplicate
	}
	p.bits |= 1 << back
	return Accepted
}

func shl(v, n uint64) uint64 {
	if n >= 64 {
		return 0
	}
	return v << n
}

func shr(v, n uint64) uint64 {
	if n >= 64 {
		return 0
	}
	return v >> n
}

// acks takes in what the peer acknowledges: for each packet that it merged, and
// each section that did not refuse it, the packet's mark.
func (p *peer) acks(h *header, sections []section) {
	if h.ack == 0 {
		return
	}
	var fresh uint64
	if h.ack >= p.ackSeen {
		shift := h.ack - p.ackSeen
		p.bitsSeen = shl(p.bitsSeen, shift)
		fresh = h.bits &^ p.bitsSeen
		p.bitsSeen |= h.bits
		p.ackSeen = h.ack
	} else {
		back := p.ackSeen - h.ack
		fresh = h.bits &^ shr(p.bitsSeen, back)
		p.bitsSeen |= shl(h.bits, back)
	}
	n := len(sections)
	for ; fresh != 0; fresh &= fresh - 1 {
		i := uint64(bits.TrailingZeros64(fresh))
		slot := int((h.ack - i) % window)
		if p.ring[slot] != h.ack-i {
			continue // longer ago than the ring remembers
		}
		for k := range sections {
			up := p.upto[slot*n+k]
			if h.nrefusals != 0 && h.refused(sections[k].id)>>i&1 != 0 {
				p.refused[k] = p.refused[k] || up > p.acked[k]
				continue
			}
			if up > p.acked[k] {
				p.acked[k], p.refused[k] = up, false
			}
		}
	}
}

// hears says whether the peer has heard us lately, so that it pays to send fast. One that
// rests, or that we let rest, has until it was asked.
func (p *peer) hears(now, silence time.Duration) bool {
	return (now-p.hearsAt < silence || p.restful()) && !p.deaf(now, silence)
}

// restful says whether one side of the pair rests, or did when the other was last heard.
func (p *peer) restful() bool { return max(p.rest, p.mine) > 0 }

// deaf says that the peer owes us an answer for silence, though others may come.
func (p *peer) deaf(now, silence time.Duration) bool { return p.asked != 0 && now-p.asked >= silence }

// away says that it does not pay to ask any more.
func (p *peer) away(now, silence time.Duration) bool {
	return p.silent(now, silence) || p.deaf(now, silence)
}

// silent says whether the peer is overdue by silence, or owes an answer for as long.
func (p *peer) silent(now, silence time.Duration) bool {
	return now-p.heardAt >= silence+p.rest || p.waits != 0 && now-p.waits >= silence
}

// asks notes that a packet leaves that wants an answer.
func (p *peer) asks(now time.Duration) {
	if p.asked == 0 {
		p.asked = now
	}
	if p.waits == 0 {
		p.waits = now
	}
}

// hearing notes which of our packets have an echo. Between two that rest little is sent:
// there an echo is as old as what it answers, and says nothing of when. So a peer that
// lacks none of our packets hears us now; one that does, as of the first of them.
func (p *peer) hearing(now, echo, keepAlive time.Duration) {
	p.echo = max(p.echo, echo)
	switch {
	case p.echo >= p.sentAt:
		p.unechoed, p.mine = 0, p.promise
	case p.unechoed != 0 && p.unechoed <= p.echo:
		p.unechoed = p.echo
	}
	if p.asked <= p.echo {
		p.asked = 0
	}
	p.hearsAt = max(p.hearsAt, p.echo)
	if p.restful() {
		as := now
		if p.unechoed != 0 {
			as = p.unechoed
		}
		p.hearsAt = max(p.hearsAt, as-keepAlive)
	}
}

// delayProbe follows one change at a time from when it is seen to when it is
// acknowledged.
type delayProbe struct {
	on      bool
	section int
	mark    uint64
	at      time.Duration
}

// rttFilter keeps the sample with the least round trip of the last one to two
// spans: queues only ever add to a round trip, so it is the one whose middle is
// known best.
type rttFilter struct {
	began     time.Duration
	cur, prev rttSample
}

type rttSample struct {
	ok      bool
	rtt     time.Duration
	offset  time.Duration
	hasWall bool
}

const rttSpan = 4 * time.Second

func (f *rttFilter) add(now time.Duration, s rttSample) {
	if now-f.began >= rttSpan {
		f.prev, f.cur = f.cur, rttSample{}
		if now-f.began >= 2*rttSpan {
			f.prev = rttSample{}
		}
		f.began = now
	}
	f.cur = better(f.cur, s)
}

func (f *rttFilter) best() rttSample { return better(f.prev, f.cur) }

// better prefers a sample with a wall stamp, since only that has an offset.
func better(a, b rttSample) rttSample {
	switch {
	case !a.ok:
		return b
	case !b.ok:
		return a
	case a.hasWall != b.hasWall:
		if a.hasWall {
			return a
		}
		return b
	case b.rtt < a.rtt:
		return b
	}
	return a
}
