// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Reason says why a packet, or an introduction in one, was not taken in.
type Reason uint8

// The reasons. What a packet's sections refuse is counted with the section.
const (
	Accepted         Reason = iota // it was taken in
	Malformed                      // not a packet, cut off, or says what cannot be
	Version                        // of another version
	Cluster                        // of another cluster
	Self                           // of our own name
	OtherIncarnation               // to an older incarnation of ours; its sender is told of this one
	OtherName                      // to somebody else who had our address
	Superseded                     // from an incarnation that is over; it is told
	Stale                          // so much overtaken that it could not be acknowledged
	Duplicate                      // the same packet again
	Full                           // of a newcomer for whom there is no room
	Refusal                        // says that an incarnation is over; not a refusal of ours
	Introduction                   // the introduction was malformed, the rest was taken in
	Departure                      // says that its sender's incarnation is over; not a refusal of ours
	Leaving                        // we are leaving, and take nothing in
	reasons
)

var reasonNames = [reasons]string{
	"accepted", "malformed", "version", "cluster", "self", "other_incarnation", "other_name",
	"superseded", "stale", "duplicate", "full", "refusal", "introduction",
	"departure", "leaving",
}

func (r Reason) String() string {
	if r >= reasons {
		return fmt.Sprintf("Reason(%d)", uint8(r))
	}
	return reasonNames[r]
}

// Stats is what a session has done since it began, and how it stands.
type Stats struct {
	PacketsIn, PacketsOut uint64
	BytesIn, BytesOut     uint64 // without IP and UDP headers

	Refused [reasons]uint64 // by [Reason]
	Resent  uint64          // packets whose changes had all been sent before
	Hellos  uint64          // packets to addresses where nobody is heard
	Unknown uint64          // sections of peers that this process does not have
	Gone    uint64          // incarnations of peers that are over

	Fresh, Silent, Lost int // peers now; see [Peer.State]
	Addresses           int // known, peers' included

	Unacked    uint64        // changes that peers have not acknowledged, summed
	UnackedAge time.Duration // how long the oldest has been followed; samples, as Delay

	// Delay is how long a change took from when the session saw it to its
	// acknowledgement. One change per peer is followed at a time.
	Delay Histogram

	Sections []SectionStats
}

// SectionStats are the counts of one section, over all peers.
type SectionStats struct {
	Name      string
	Merged    uint64 // blocks taken in
	Refused   uint64 // blocks for which Merge returned an error
	Oversize  uint64 // deltas that were larger than their room, and not sent
	LastError error  // of Merge; nil if there was none
}

// Histogram counts durations. Its zero value is empty.
type Histogram struct {
	Count  uint64
	Sum    time.Duration
	Max    time.Duration
	Bucket [14]uint64 // by Bounds; the last is what is longer
}

// Bounds are the upper bounds of a [Histogram]'s buckets but the last, inclusive.
var Bounds = [13]time.Duration{
	time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond, 5 * time.Millisecond, 8 * time.Millisecond,
	12 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond,
	250 * time.Millisecond, time.Second, 5 * time.Second, 30 * time.Second,
}

func (h *Histogram) add(d time.Duration) {
	h.Count++
	h.Sum += d
	h.Max = max(h.Max, d)
	i := 0
	for i < len(Bounds) && d > Bounds[i] {
		i++
	}
	h.Bucket[i]++
}

// PeerState says how lately a peer was heard, by its own packets and by no
// report of others.
type PeerState uint8

// The states.
const (
	Fresh  PeerState = iota // heard within its rest and 20 keep-alives, and has answered within 20
	Silent                  // not heard since, or has not answered
	Lost                    // not heard for its rest and 200 keep-alives; its address is tried every 1 to 5 s
)

func (p PeerState) String() string {
	switch p {
	case Fresh:
		return "fresh"
	case Silent:
		return "silent"
	case Lost:
		return "lost"
	}
	return fmt.Sprintf("PeerState(%d)", uint8(p))
}

// Peer is what the session knows of a peer.
type Peer struct {
	crdt.Replica
	Addr         netip.AddrPort
	Zone, Region string
	State        PeerState
	Heard        time.Duration // how long ago
	HearsUs      bool          // it has repeated a stamp of ours of the last 20 keep-alives, or all that was sent to it
	Unacked      uint64        // changes that it has not acknowledged

	// RTT is the shortest round trip of the last 4 to 8 s, less the time that the
	// peer kept the stamp; 0 if there was none. Offset is the peer's wall clock less
	// ours, as that round trip had it, right to within RTT/2; see HasOffset.
	RTT, Offset time.Duration
	HasOffset   bool

	// Delay is the latest, DelayMax the longest time from change to
	// acknowledgement; see [Stats.Delay].
	Delay, DelayMax time.Duration
}

// Stats returns a snapshot at now. It asks every section for its marks.
func (s *Session) Stats(now time.Duration) Stats {
	st := s.stats
	st.Addresses = len(s.book.list)
	for _, p := range s.peers {
		switch s.state(now, p) {
		case Fresh:
			st.Fresh++
		case Silent:
			st.Silent++
		default:
			st.Lost++
		}
		st.Unacked += s.unacked(p)
		if p.delay.on {
			st.UnackedAge = max(st.UnackedAge, now-p.delay.at)
		}
	}
	st.Sections = make([]SectionStats, len(s.sections))
	for k := range s.sections {
		st.Sections[k] = s.sections[k].counts
		st.Sections[k].Name = s.sections[k].name
	}
	return st
}

// Peers appends every peer at now, those nearby first, then by name.
func (s *Session) Peers(now time.Duration, dst []Peer) []Peer {
	for _, p := range s.peers {
		best := p.rtt.best()
		dst = append(dst, Peer{
			Replica:   p.incarnation,
			Addr:      p.addr,
			Zone:      p.zone,
			Region:    p.region,
			State:     s.state(now, p),
			Heard:     now - p.heardAt,
			HearsUs:   p.met && p.hears(now, s.silence()),
			Unacked:   s.unacked(p),
			RTT:       best.rtt,
			Offset:    best.offset,
			HasOffset: best.ok && best.hasWall,
			Delay:     p.last,
			DelayMax:  p.worst,
		})
	}
	return dst
}

func (s *Session) state(now time.Duration, p *peer) PeerState {
	switch {
	case now-p.heardAt >= s.lostAfter(p):
		return Lost
	case p.silent(now, s.silence()):
		return Silent
	}
	return Fresh
}

func (s *Session) unacked(p *peer) (n uint64) {
	for k := range s.sections {
		if mark := s.sections[k].Mark(p.incarnation); mark > p.acked[k] {
			n += mark - p.acked[k]
		}
	}
	return n
}
