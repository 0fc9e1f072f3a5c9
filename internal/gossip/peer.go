// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"math/bits"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// window is the number of packets that an acknowledgement covers: the width of its bitmap.
const window = 64

// peer is what the session knows of one incarnation of one name. The object stays when a later
// incarnation takes the name; reset empties it.
type peer struct {
	incarnation  crdt.Replica
	toName       uint32 // hash of incarnation.Name
	addr         netip.AddrPort
	zone, region string
	distance     int          // 0 is in our zone, 1 in our region, 2 elsewhere
	places       [agendas]int // by agenda: one more than the peer's index; 0 is none
	at           *address     // book entry of the address where the peer was last heard

	// Packets received. Sequence numbers are the peer's.
	heardAt       time.Duration // own clock: when the latest packet came
	heard         uint64        // highest sequence number received
	bits          uint64        // bit i: heard-i was merged
	refuse        []uint64      // per section, bit i: the section did not take in heard-i
	peerSent      time.Duration // peer's clock: highest sent stamp
	peerSentAt    time.Duration // own clock: when peerSent came
	owes          bool          // we owe the peer a packet
	rest          time.Duration // how much later than a keep-alive its next packet may come
	fullPaceUntil time.Duration // own clock: until then the peer wants keep-alives at their full pace

	// Packets sent. Sequence numbers are ours.
	everSent         bool
	sentAt           time.Duration
	due              time.Duration  // when the next packet leaves, as last computed
	seq              uint64         // number of the latest packet; 0 is none
	ring             [window]uint64 // by slot of upto: the number of its packet
	upto             []uint64       // window × sections: the mark that a packet makes complete
	acked            []uint64       // per section: the mark that the peer acknowledged
	refused          []bool         // per section: the latest acknowledgement was a refusal
	sentUpto         []uint64       // per section: the highest mark that was sent
	ackSeen          uint64         // highest number that the peer acknowledged
	bitsSeen         uint64         // bit i: packet ackSeen-i was acknowledged
	echo             time.Duration  // own clock: the latest sent stamp of ours that the peer echoed
	hearsAt          time.Duration  // own clock: when the peer last heard us, as far as we know; see hearing
	unechoed         time.Duration  // own clock: all packets before this have an echo; 0 if all packets have one
	unechoedAskAt    time.Duration  // own clock: when the first packet left that wants an answer and has no echo; 0 is none
	unansweredSince  time.Duration  // own clock: when the first packet left that wants an answer, since the peer was heard; 0 is none
	restAt           time.Duration  // when the next packet leaves if there is nothing to say
	announcedRest    time.Duration  // the rest that our latest packet announced
	maxAnnouncedRest time.Duration  // the longest rest that packets without an echo announced
	wallAt           time.Duration  // no wall-clock stamp is sent before this
	introAt          time.Duration  // when the next introduction is due
	met              bool           // the peer has echoed a stamp of ours
	lost             bool
	leaveSent        bool // the peer was told that we leave
	leaveAcked       bool // the peer knows that we leave

	rtt   rttFilter
	delay delayProbe
	last  time.Duration // latest sample of delay
	worst time.Duration
}

// reset begins anew, with an incarnation of the peer's name.
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
		echo:        now, // until the peer has had time to hear us, it counts as hearing us
		hearsAt:     now,
		introAt:     now,
		refuse:      make([]uint64, sections),
		upto:        make([]uint64, window*sections),
		acked:       make([]uint64, sections),
		refused:     make([]bool, sections),
		sentUpto:    make([]uint64, sections),
	}
}

// receive notes a sequence number. It returns Accepted if the packet is to be taken in. It returns
// Duplicate if that was done before, and Stale if the packet is too old to be acknowledged.
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

// acks takes in the peer's acknowledgements. Each merged packet raises the acknowledged mark of
// each section that did not refuse it.
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

// hears reports whether the peer has heard us lately, so that it is useful to send fast. If one
// side of the pair rests, the peer counts as hearing us until it is deaf.
func (p *peer) hears(now, silence time.Duration) bool {
	return (now-p.hearsAt < silence || p.restful()) && !p.deaf(now, silence)
}

// restful reports whether one side of the pair rests, or did when the other was last heard.
func (p *peer) restful() bool { return max(p.rest, p.maxAnnouncedRest) > 0 }

// deaf reports that the peer has owed us an answer for silence. Other packets of it may still come.
func (p *peer) deaf(now, silence time.Duration) bool {
	return p.unechoedAskAt != 0 && now-p.unechoedAskAt >= silence
}

// away reports that it is of no use to ask the peer any more.
func (p *peer) away(now, silence time.Duration) bool {
	return p.silent(now, silence) || p.deaf(now, silence)
}

// silent reports whether the peer is overdue by silence, or has owed an answer for as long.
func (p *peer) silent(now, silence time.Duration) bool {
	return now-p.heardAt >= silence+p.rest || p.unansweredSince != 0 && now-p.unansweredSince >= silence
}

// asks notes that a packet leaves now that wants an answer.
func (p *peer) asks(now time.Duration) {
	if p.unechoedAskAt == 0 {
		p.unechoedAskAt = now
	}
	if p.unansweredSince == 0 {
		p.unansweredSince = now
	}
}

// hearing notes which of our packets have an echo. A pair that rests sends little: an echo is then
// as old as the packet that it answers, and does not show when the peer heard it. So a peer that
// has echoed all our packets hears us now. Otherwise it hears us as of the first packet that has no
// echo.
func (p *peer) hearing(now, echo, keepAlive time.Duration) {
	p.echo = max(p.echo, echo)
	switch {
	case p.echo >= p.sentAt:
		p.unechoed, p.maxAnnouncedRest = 0, p.announcedRest
	case p.unechoed != 0 && p.unechoed <= p.echo:
		p.unechoed = p.echo
	}
	if p.unechoedAskAt <= p.echo {
		p.unechoedAskAt = 0
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

// rttFilter keeps the sample with the shortest round trip of the last one to two spans. Queues only
// lengthen a round trip, so the middle of the shortest one is known best.
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
