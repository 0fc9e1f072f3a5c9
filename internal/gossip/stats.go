// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Reason says why a packet, or an introduction in a packet, was not taken in.
type Reason uint8

// The reasons. Blocks that a section refuses are counted in [SectionStats].
const (
	Accepted         Reason = iota // taken in
	Malformed                      // not a packet, cut off, or with impossible values
	Version                        // of another version
	Cluster                        // of another cluster
	Self                           // from our own name
	OtherIncarnation               // to an older incarnation of ours; we tell the sender our present one
	OtherName                      // to another process that had our address before
	Superseded                     // from an incarnation that is over; we tell the sender
	Stale                          // too old to be acknowledged
	Duplicate                      // the same packet again
	Full                           // from a newcomer, and there is no room
	Refusal                        // a message that an incarnation is over; we did not refuse it
	Introduction                   // malformed introduction; the rest of the packet was taken in
	Departure                      // a message that its sender's incarnation is over; we did not refuse it
	Leaving                        // we are leaving and take in no packets
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

// Stats are the counts of a session since it began, and its present state.
type Stats struct {
	PacketsIn, PacketsOut uint64
	BytesIn, BytesOut     uint64 // without IP and UDP headers

	Refused [reasons]uint64 // by [Reason]
	Resent  uint64          // packets whose changes had all been sent before
	Hellos  uint64          // packets to addresses where nobody is heard
	Unknown uint64          // blocks of sections that this process does not have
	Gone    uint64          // incarnations of peers that are over

	Fresh, Silent, Lost int // peers now, by [PeerState]
	Addresses           int // known addresses, those of peers included

	Unacked    uint64        // changes that peers have not acknowledged, summed
	UnackedAge time.Duration // age of the oldest change that is followed; sampled, see Delay

	// Delay is the time from when the session sees a change until its acknowledgement. It is
	// sampled: one change per peer is followed at a time.
	Delay Histogram

	Sections []SectionStats
}

// SectionStats are the counts of one section, over all peers.
type SectionStats struct {
	Name      string
	Merged    uint64 // blocks taken in
	Refused   uint64 // blocks for which Merge returned an error
	Oversize  uint64 // deltas that were larger than their room, and not sent
	LastError error  // latest error of Merge; nil if there was none
}

// Histogram counts durations. Its zero value is empty.
type Histogram struct {
	Count  uint64
	Sum    time.Duration
	Max    time.Duration
	Bucket [14]uint64 // counts by upper bound in [Bounds]; the last counts longer durations
}

// Bounds are the inclusive upper bounds of a [Histogram]'s buckets. The last bucket has none.
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

// PeerState says how recently a peer was heard, by its own packets, not by reports of others.
type PeerState uint8

// The states.
const (
	Fresh  PeerState = iota // heard within its rest plus 20 keep-alives, and answers within 20
	Silent                  // not heard for its rest plus 20 keep-alives, or no answer for 20
	Lost                    // not heard for its rest plus 200 keep-alives; its address is tried every 1 to 5 s
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

// Peer is what the session knows about one peer.
type Peer struct {
	crdt.Replica
	Addr         netip.AddrPort
	Zone, Region string
	State        PeerState
	Heard        time.Duration // time since its latest packet
	HearsUs      bool          // it echoed a stamp of our last 20 keep-alives, or all packets sent to it
	Unacked      uint64        // changes that the peer has not acknowledged

	// RTT is the shortest round trip of the last 4 to 8 s, without the time that the peer held the
	// stamp; 0 if there was none. Offset is the peer's wall clock minus ours, measured in that
	// round trip, correct to within RTT/2. It is valid only if HasOffset.
	RTT, Offset time.Duration
	HasOffset   bool

	// Delay is the latest time from a change to its acknowledgement, DelayMax the longest; see
	// [Stats.Delay].
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

// Peers appends every peer at now to dst, nearby peers first, then by name.
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
