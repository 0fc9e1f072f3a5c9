// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
)

// Mark is the number of the latest change that concerns a peer. Mark, Delta,
// Merge and Gone are what a gossip session asks of a section.
func (v *Verdicts) Mark(to crdt.Replica) uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.log.mark(to)
}

// Counted rises whenever the mark for any peer does; see gossip.Counter.
func (v *Verdicts) Counted() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.log.Mark()
}

// OnChange has f called after each change that there is to tell, under the lock of
// v: it must not wait or call v. The Kick of a gossip.Node is meant. nil ends it.
func (v *Verdicts) OnChange(f func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.log.notify = f
}

// Delta appends to b what a peer has not acknowledged, oldest change first, in
// at most room bytes. A room of 2 KiB always makes progress; with less than the
// header takes it appends nothing. With nothing new it appends the header, which
// tells that this process is there.
func (v *Verdicts) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if room < maxHeader {
		return b, since
	}
	if _, ok := v.log.met[to]; !ok || since == 0 {
		v.log.met[to] = v.log.Mark()
	}
	mark, met, end := v.log.mark(to), v.log.met[to], len(b)+room
	b = appendHeader(b, v.roster.Number, v.digest, v.informed)
	upto = since
	for c := v.log.After(since); c != nil; c = c.Next() {
		if !c.Of.concerns(to, v.self, c.Mark, met) {
			upto = c.Mark
			continue
		}
		rec := v.recordLocked(now, c.Of)
		before := len(b)
		if b = appendRecord(b, &rec); len(b) > end {
			return b[:before], upto
		}
		upto = c.Mark
	}
	if whole := appendComplete(b, v.version, to.Incarnation); len(whole) <= end {
		b = whole
	}
	return b, max(upto, mark)
}

func (v *Verdicts) recordLocked(now time.Duration, c change) record {
	if c.row == nil {
		return record{kind: recordState, name: c.sc.name, state: c.sc.known, age: now - c.sc.since}
	}
	rec := record{kind: recordOwn, vote: c.row.Vote, age: now - c.row.opened}
	if c.row.Node != v.self {
		rec.kind = recordOther
		rec.silent = now - v.stoodLocked(v.scopes[c.row.Scope], c.row)
	}
	return rec
}

// Merge takes in what a peer's Delta appended. It is commutative and idempotent.
// The errors are [ErrMalformed], [ErrRoster] and [ErrSelf], and then nothing was
// taken in. What there is no room for is left out and counted, see [Status].
func (v *Verdicts) Merge(c crdt.Contact, b []byte) error {
	if c.From == v.self {
		return ErrSelf
	}
	m, err := readMessage(b, c.From)
	if err != nil {
		return err
	}
	v.mu.Lock()
	defer v.unlock()
	if m.number == v.roster.Number && m.digest != v.digest {
		return fmt.Errorf("%w: number %d of %v", ErrRoster, m.number, c.From)
	}
	var from *peer
	if c.From.Name != v.self.Name {
		if from = v.peers.hear(c); !from.live {
			v.lookAroundLocked(c.Now)
		}
	}
	for i := range m.records {
		v.mergeLocked(c.Now, &m.records[i])
	}
	// What is complete for an earlier life of ours is not for this one.
	m.complete = m.complete && m.life == v.self.Incarnation
	if m.complete && from != nil && from.life == c.From.Incarnation {
		from.floor = max(from.floor, m.floor)
		v.informed = v.informed || m.informed
	}
	for i := range m.records {
		r := &m.records[i]
		if sc := v.scopes[r.name]; sc != nil {
			v.decideLocked(c.Now, sc)
		}
	}
	if m.complete {
		v.stepAskingLocked(c.Now)
	}
	return nil
}

// stepAskingLocked answers the scopes that wait to be told.
func (v *Verdicts) stepAskingLocked(now time.Duration) {
	for _, sc := range v.active {
		if sc.asking {
			v.answerLocked(now, sc)
		}
	}
}

func (v *Verdicts) mergeLocked(now time.Duration, rec *record) {
	if rec.kind == recordState {
		if rec.state == (State{}) {
			return
		}
		if sc := v.scopeLocked(now, rec.name); sc != nil {
			v.joinLocked(now, sc, rec.state, rec.age)
		}
		return
	}
	w := &rec.vote
	rec.name = w.Scope
	if w.Node == v.self || rec.kind == recordOther && rec.silent > v.cfg.Keep {
		return
	}
	sc := v.scopes[w.Scope]
	var old *row
	if sc != nil {
		old = sc.rows[w.Node.Name]
	}
	if old != nil && !w.later(&old.Vote) {
		if old.Vote == *w && !w.Gone && w.Troubled(sc.known.Gen) {
			old.seen = max(old.seen, now-rec.silent)
		}
		return
	}
	if p := v.peers.m[w.Node.Name]; p != nil && old == nil && p.life == w.Node.Incarnation && w.Version <= p.floor {
		return // it was forgotten, or taken back
	}
	if old == nil {
		if v.votes >= v.cfg.Votes {
			v.refused++
			return
		}
		if sc = v.scopeLocked(now, w.Scope); sc == nil {
			return
		}
		old = &row{}
		sc.rows[w.Node.Name] = old
		v.votes++
	}
	old.Vote, old.at, old.opened, old.seen, old.relay = *w, now, now-rec.age, now-rec.silent, false
	v.log.vote(old, false)
	v.stirLocked(sc)
}

// Gone says that a peer's life is over for good. Its votes no longer count, and
// wait for who takes its scopes over.
func (v *Verdicts) Gone(now time.Duration, peer crdt.Replica) {
	v.mu.Lock()
	defer v.unlock()
	v.peers.gone(peer)
	delete(v.log.met, peer)
	v.lookAroundLocked(now)
}
