// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

const (
	leaveEvery    = 10 * time.Millisecond // to each peer that has not acknowledged; a peer answers as often
	departureKeep = time.Minute           // how long others are told about a departure
	maxDepartures = 64
)

// departed is an incarnation that left in order. Peers that heard it pass it on with their
// introductions, to peers that the leaving process did not reach.
type departed struct {
	incarnation crdt.Replica
	until       time.Duration
}

// leave is Step once the incarnation is over. Every peer is told again and again until it
// acknowledges. A silent peer is told too, but not waited for.
func (s *Session) leave(now time.Duration, ev Event, actions []Action) []Action {
	if ev.Kind == Packet {
		s.stats.PacketsIn++
		s.stats.BytesIn += uint64(len(ev.Packet))
		reason, by := s.acknowledged(now, ev)
		s.stats.Refused[reason]++
		if s.over {
			return append(actions, Action{Kind: Displaced, By: by})
		}
		if reason == Departure {
			actions = s.tell(ev.Addr, by, actions)
		}
		if s.departure.same(now, s) {
			return actions
		}
	}
	budget := s.cfg.Burst
	s.wake, s.departure = Never, departure{}
	for _, p := range s.peers {
		if p.leaveAcked || now-p.heardAt >= s.lostAfter(p) {
			continue
		}
		if s.departure.waits == nil && !p.silent(now, s.silence()) {
			s.departure.waits = p
		}
		if p.due = s.leaveDue(p); p.due <= now && budget > 0 {
			budget--
			start := len(s.arena)
			p.seq++
			h := s.begin(now, 0)
			h.flags |= flagLeave
			h.toInc, h.toName, h.seq = p.incarnation.Incarnation, p.toName, p.seq
			s.arena = h.append(s.arena, s.cfg.Self.Name)
			p.sentAt, p.leaveSent = now, true
			p.asks(now)
			p.due = s.leaveDue(p)
			actions = s.sent(start, p.addr, actions)
		}
		switch {
		case p.due < s.wake:
			s.wake, s.departure.first = p.due, 1
		case p.due == s.wake:
			s.departure.first++
		}
	}
	if s.departure.waits != nil {
		return actions
	}
	s.end()
	return append(actions, Action{Kind: Left})
}

// A departure is what leave found when it last looked at all peers. When many leave at once, each
// gets a packet from all the others. The departure saves a look at all peers for each.
type departure struct {
	waits *peer // a peer that is waited for; nil if there is none
	first int   // number of peers that are due at the next wake
}

// same reports whether looking at all peers again would change nothing.
func (d *departure) same(now time.Duration, s *Session) bool {
	return now < s.wake && d.first > 0 && d.waits != nil && !d.waits.leaveAcked && !d.waits.silent(now, s.silence())
}

// informed notes that a peer knows that we leave.
func (s *Session) informed(p *peer) {
	if !p.leaveAcked && p.due == s.wake {
		s.departure.first--
	}
	p.leaveAcked = true
}

func (s *Session) leaveDue(p *peer) time.Duration {
	if p.leaveSent {
		return p.sentAt + max(leaveEvery, s.cfg.Floor)
	}
	return p.sentAt + s.cfg.Floor
}

// acknowledged takes in a packet while we leave. A peer that refuses this incarnation knows that it
// is over. A peer that leaves too need not know. A peer that sends anything else is there.
func (s *Session) acknowledged(now time.Duration, ev Event) (reason Reason, by crdt.Replica) {
	h := &s.in
	body, err := h.parse(ev.Packet)
	switch {
	case err == errMagic: //nolint:errorlint // parse returns the sentinels themselves
		return Version, by
	case err != nil:
		return Malformed, by
	case h.cluster != s.cluster:
		return Cluster, by
	case string(h.from) == s.cfg.Self.Name:
		return Self, s.mirror(h, canonical(ev.Addr))
	}
	p := s.byName[string(h.from)]
	if p == nil || h.fromInc < p.incarnation.Incarnation {
		return Leaving, by
	}
	ours := h.toInc == s.cfg.Self.Incarnation && h.toName == s.selfName
	switch {
	case h.flags&flagLeave != 0:
		s.informed(p)
		return Departure, crdt.Replica{Name: p.incarnation.Name, Incarnation: h.fromInc}
	case h.flags&flagRefusal == 0:
		// A repeated packet does not show that its sender is there.
		if ours && p.receive(h.seq) == Accepted || !ours && h.sent > p.peerSent || h.fromInc > p.incarnation.Incarnation {
			p.heardAt, p.unansweredSince, p.peerSent = now, 0, max(p.peerSent, h.sent)
		}
		return Leaving, by
	}
	r := read(body)
	inc := r.Uint64("incarnation")
	if ours && r.Fault() == nil && r.Len() == 0 && inc >= s.cfg.Self.Incarnation {
		s.informed(p)
	}
	return Refusal, by
}

// departed takes in that an incarnation left. The answer tells that incarnation that this is known.
func (s *Session) departed(now time.Duration, incarnation crdt.Replica) (reason Reason, answer crdt.Replica) {
	p := s.byName[incarnation.Name]
	switch {
	case p != nil && p.incarnation.Incarnation > incarnation.Incarnation, p == nil && s.retired[incarnation.Name] >= incarnation.Incarnation:
		return Superseded, incarnation
	case p != nil:
		s.depart(now, p, incarnation)
	}
	return Departure, incarnation // an incarnation we never met is not remembered, or anybody could fill the memory
}

// depart ends the incarnation of p, and any up to the given one, and has others told.
func (s *Session) depart(now time.Duration, p *peer, incarnation crdt.Replica) {
	s.book.forget(p)
	s.retire(now, p)
	s.retireIncarnation(incarnation)
	if len(s.left) == maxDepartures {
		s.left = slices.Delete(s.left, 0, 1)
	}
	s.left = append(s.left, departed{incarnation: incarnation, until: now + departureKeep})
}

// departures appends recent departures, the latest first, as far as there is room.
func (s *Session) departures(now time.Duration, b []byte, room int) []byte {
	for len(s.left) > 0 && s.left[0].until <= now {
		s.left = slices.Delete(s.left, 0, 1)
	}
	if len(s.left) == 0 || room < blockHeader {
		return b
	}
	start := len(b)
	b = openBlock(b, blockLeft)
	content := len(b)
	for _, o := range slices.Backward(s.left) {
		if len(b)-start+1+len(o.incarnation.Name)+8 > room {
			break
		}
		b = appendString(b, o.incarnation.Name)
		b = binary.LittleEndian.AppendUint64(b, o.incarnation.Incarnation)
	}
	if len(b) == content {
		return b[:start]
	}
	return closeBlock(b, content)
}

// mergeDepartures takes in the departures that from knows, up to the first malformed one.
func (s *Session) mergeDepartures(now time.Duration, from *peer, b []byte) {
	for r := read(b); r.Len() > 0; {
		name := r.short("name")
		inc := r.Uint64("incarnation")
		if r.Fault() != nil || len(name) < 1 || len(name) > maxName || inc == 0 {
			s.stats.Refused[Introduction]++
			return
		}
		if p := s.byName[string(name)]; p != nil && p != from && p.incarnation.Incarnation <= inc {
			s.depart(now, p, crdt.Replica{Name: p.incarnation.Name, Incarnation: inc})
		}
	}
}
