// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// Mark returns the number of the latest change that concerns a peer. A gossip session calls Mark,
// Delta, Merge and Gone of each section.
func (v *Verdicts) Mark(to crdt.Replica) uint64 {
	v.m.Lock()
	defer v.m.Unlock()
	return v.log.mark(to)
}

// Counted returns a number that rises whenever the mark for any peer does; see gossip.Counter.
func (v *Verdicts) Counted() uint64 {
	v.m.Lock()
	defer v.m.Unlock()
	return v.log.Mark()
}

// OnChange sets f, which is called after each change to send, under the lock of v. f must not wait
// or call v. It is meant for the Kick of a gossip.Node. nil ends it.
func (v *Verdicts) OnChange(f func()) {
	v.m.Lock()
	defer v.m.Unlock()
	v.log.notify = f
}

// Delta appends the changes that a peer has not acknowledged to b, oldest first, in at most room
// bytes. A room of 2 KiB always makes progress. With less room than the header takes it appends
// nothing. Without news it appends the header, which shows that this process is there.
func (v *Verdicts) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	v.m.Lock()
	defer v.m.Unlock()
	if room < maxHeader {
		return b, since
	}
	if _, ok := v.log.met[to]; !ok || since == 0 {
		v.log.met[to] = v.log.Mark()
	}
	mark, met, end := v.log.mark(to), v.log.met[to], len(b)+room
	b = appendHeader(b, v.number, v.digest, v.informed)
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
		return record{kind: recordState, name: c.sc.Name, state: c.sc.Known, age: now - c.sc.Since}
	}
	rec := record{kind: recordOwn, vote: c.row.Vote, age: now - c.row.opened}
	if c.row.Node != v.self {
		rec.kind = recordOther
		rec.silent = now - bookOf(v.m.Get(c.row.Scope)).stood(c.row)
	}
	return rec
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent. The errors are
// [ErrMalformed], [ErrRoster] and [ErrSelf], and then nothing was taken in. Records without room
// are left out and counted, see [Verdicts.Refused].
func (v *Verdicts) Merge(c crdt.Contact, b []byte) error {
	if c.From == v.self {
		return ErrSelf
	}
	m, err := readMessage(b, c.From)
	if err != nil {
		return err
	}
	v.m.Lock()
	defer v.m.End()
	if m.number == v.number && m.digest != v.digest {
		return fmt.Errorf("%w: number %d of %v", ErrRoster, m.number, c.From)
	}
	var from *peer
	if c.From.Name != v.self.Name {
		if from = v.peers.hear(c); !from.live {
			v.m.LookAround(c.Now)
		}
	}
	for i := range m.records {
		v.mergeLocked(c.Now, &m.records[i])
	}
	// A record of kind 4 for an earlier incarnation of this process does not count for this one.
	m.complete = m.complete && m.incarnation == v.self.Incarnation
	if m.complete && from != nil && from.incarnation == c.From.Incarnation {
		from.floor = max(from.floor, m.floor)
		v.informed = v.informed || m.informed
	}
	for i := range m.records {
		r := &m.records[i]
		if sc := v.m.Get(r.name); sc != nil {
			sc.Book.Decide(c.Now)
		}
	}
	if m.complete {
		v.m.Answer(c.Now)
	}
	return nil
}

func (v *Verdicts) mergeLocked(now time.Duration, rec *record) {
	if rec.kind == recordState {
		if rec.state == (scope.State{}) {
			return
		}
		if sc := v.m.Obtain(now, rec.name); sc != nil {
			bookOf(sc).join(now, rec.state, rec.age)
		}
		return
	}
	w := &rec.vote
	rec.name = w.Scope
	if w.Node == v.self || rec.kind == recordOther && rec.silent > v.m.Config().Keep {
		return
	}
	sc := v.m.Get(w.Scope)
	var old *row
	if sc != nil {
		old = bookOf(sc).rows[w.Node.Name]
	}
	if old != nil && !w.Later(&old.Vote) {
		if old.Vote == *w && !w.Gone && w.Troubled(sc.Known.Gen) {
			old.seen = max(old.seen, now-rec.silent)
		}
		return
	}
	if p := v.peers.m[w.Node.Name]; p != nil && old == nil && p.incarnation == w.Node.Incarnation && w.Version <= p.floor {
		return // the vote was forgotten, or taken back
	}
	if old == nil {
		if v.votes >= v.m.Config().Votes {
			v.refused++
			return
		}
		if sc = v.m.Obtain(now, w.Scope); sc == nil {
			return
		}
		old = &row{}
		bookOf(sc).rows[w.Node.Name] = old
		v.votes++
	}
	old.Vote, old.at, old.opened, old.seen, old.relay = *w, now, now-rec.age, now-rec.silent, false
	v.log.vote(old, false)
	v.m.Stir(sc)
}

// Gone says that a peer's incarnation has ended for good. Its votes no longer count. They wait for
// the processes that take its scopes over.
func (v *Verdicts) Gone(now time.Duration, peer crdt.Replica) {
	v.m.Lock()
	defer v.m.End()
	v.peers.gone(peer)
	delete(v.log.met, peer)
	v.m.LookAround(now)
}
