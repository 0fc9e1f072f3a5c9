// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// These methods make the sections a gossip.Rejoiner: if its name is known with a higher
// incarnation, a process goes on with one above that. For its peers that is a restart.

// Rejoin sends all own votes again, as those of the new incarnation.
func (v *Verdicts) Rejoin(_ time.Duration, self crdt.Replica) {
	v.m.Lock()
	defer v.m.Unlock()
	v.self = self
	for _, sc := range v.m.All() {
		own := bookOf(sc).own
		if own == nil {
			continue
		}
		v.version++
		own.Node, own.Version = self, v.version
		v.log.vote(own, true)
	}
}

// Rejoin changes only the replica: snapshots are kept by name.
func (s *Storms) Rejoin(_ time.Duration, self crdt.Replica) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.self = self
}

// Rejoin sends the same status again, as the new incarnation.
func (m *MemberStatuses) Rejoin(_ time.Duration, self crdt.Replica) {
	m.mu.Lock()
	m.self = self
	own := m.own
	m.mu.Unlock()
	m.Say(own)
}

// Rejoin writes this process's entries again, as those of the new incarnation.
func (j *Journal) Rejoin(_ time.Duration, self crdt.Replica) {
	j.mu.Lock()
	defer j.mu.Unlock()
	was := j.self
	log, err := crdt.NewOpLog(self, crdt.OpLogConfig{MaxRecords: j.cfg.Keep + j.cfg.Backlog, MaxHeld: j.cfg.Keep + j.cfg.Backlog}, j.applyLocked)
	if err != nil {
		return // cannot happen: the bounds were accepted before
	}
	j.self, j.log = self, log
	j.log.Join(archivist)
	clear(j.readers)
	old := j.entries
	j.entries = nil
	for _, e := range old {
		if e.By != was {
			j.entries = append(j.entries, e) // peers send it again, and it is known then
		}
	}
	for _, e := range old {
		if e.By != was {
			continue
		}
		op := crdt.OpAdd
		if e.Kind == EntryReset {
			op = crdt.OpReset
		}
		if _, err := j.log.Append(op, e.At, lineOf(e)); err != nil {
			j.lost++
		}
	}
	j.fileLocked()
}

// Rejoin counts from 0 as the new incarnation. Peers keep the row of the previous one, as that of
// an incarnation that has ended. Here it is folded.
func (t *Totals) Rejoin(_ time.Duration, self crdt.Replica) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.self
	t.self = self
	for _, k := range t.keys {
		for i, c := range k.counts {
			n := c.Of(was)
			k.folded[i] = min(k.folded[i], math.MaxUint64-n) + n
			k.counts[i], _ = crdt.NewGCounter(self) // the error is nil: a session has accepted the name
			for r, n := range c.All() {
				if r != was {
					_ = k.counts[i].Join(r, n)
				}
			}
		}
		k.last = [totalKinds]uint64{}
	}
}
