// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A tap measures how long each change of a section takes to reach each peer: from the
// change to its merge. It writes the section's mark in front of each of its deltas.
type tap struct {
	pairs  map[[2]int]*pending // by sender and receiver
	delays []time.Duration
	from   time.Duration // earlier changes are not counted
}

// pending holds the changes of one node that another node has not yet merged.
type pending struct {
	mark uint64
	at   []change
}

type change struct {
	mark uint64
	at   time.Duration
}

func newTap(from time.Duration) *tap {
	return &tap{pairs: make(map[[2]int]*pending), from: from}
}

func (t *tap) pair(from, to int) *pending {
	p := t.pairs[[2]int{from, to}]
	if p == nil {
		p = &pending{}
		t.pairs[[2]int{from, to}] = p
	}
	return p
}

// note records the changes of a member.
func (t *tap) note(m *member) {
	now := m.w.net.Now()
	for to, other := range m.w.members {
		if to == m.id || other == nil {
			continue
		}
		p := t.pair(m.id, to)
		if mark := m.limits.Mark(other.self); mark > p.mark {
			p.mark = mark
			p.at = append(p.at, change{mark, now})
		}
	}
}

// p99 is the 99th percentile of all delays; 0 if nothing was measured. A change that is not
// yet merged counts with its delay until now.
func (t *tap) p99(now time.Duration) time.Duration {
	if t == nil {
		return 0
	}
	all := slices.Clone(t.delays)
	for _, p := range t.pairs {
		for _, c := range p.at {
			if c.at >= t.from {
				all = append(all, now-c.at)
			}
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[min(len(all)-1, len(all)*99/100)]
}

// tapped is a section with a tap.
type tapped struct {
	gossip.Section
	tap *tap
	w   *world
	id  int
}

func (s *tapped) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) ([]byte, uint64) {
	start := len(b)
	b = append(b, make([]byte, 8)...)
	b, upto := s.Section.Delta(now, b, to, since, room-8)
	binary.BigEndian.PutUint64(b[start:], upto)
	return b, upto
}

func (s *tapped) Keeps(to crdt.Replica) bool {
	keeper, ok := s.Section.(gossip.Keeper)
	return ok && keeper.Keeps(to)
}

func (s *tapped) Merge(c crdt.Contact, b []byte) error {
	if len(b) < 8 {
		return errors.New("no mark")
	}
	if err := s.Section.Merge(c, b[8:]); err != nil {
		return err
	}
	from := s.w.number(c.From.Name)
	p, mark, now := s.tap.pair(from, s.id), binary.BigEndian.Uint64(b), s.w.net.Now()
	n := 0
	for ; n < len(p.at) && p.at[n].mark <= mark; n++ {
		if p.at[n].at >= s.tap.from {
			s.tap.delays = append(s.tap.delays, now-p.at[n].at)
		}
	}
	p.at = slices.Delete(p.at, 0, n)
	return nil
}

// ears measure, for each pair of nodes, how long the receiver merges nothing from the
// sender. A pair counts from the first packet that the receiver merged.
type ears struct {
	heard map[[2]int]hearing // by sender and receiver
	most  time.Duration      // the longest silence that has ended
}

// hearing is the newest packet of a sender that a receiver merged.
type hearing struct {
	sent time.Duration // by the sender's clock
	at   time.Duration // true time of the merge
}

// longest is the longest silence of any pair, including silences that last until now.
func (e *ears) longest(now time.Duration) time.Duration {
	most := e.most
	for _, h := range e.heard {
		most = max(most, now-h.at)
	}
	return most
}

// listening is a section that reports its merges to ears.
type listening struct {
	gossip.Section
	ears *ears
	w    *world
	id   int
}

func (s *listening) Merge(c crdt.Contact, b []byte) error {
	if err := s.Section.Merge(c, b); err != nil {
		return err
	}
	pair, now := [2]int{s.w.number(c.From.Name), s.id}, s.w.net.Now()
	last, ok := s.ears.heard[pair]
	if ok && c.Sent <= last.sent {
		return nil
	}
	if ok {
		s.ears.most = max(s.ears.most, now-last.at)
	}
	s.ears.heard[pair] = hearing{c.Sent, now}
	return nil
}
