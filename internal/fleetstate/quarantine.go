// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
	"github.com/stormguard-mq/stormguard/internal/quarantine"
)

// A Quarantine is the fleet's list of rules: a [dlq.Quarantine] that all processes share. No
// process handles a message that matches a rule. It is a [crdt.LWWSet]: of two writes about one
// rule the later one wins. Stamps are the fleet's time. A write that is made here is later than all
// writes about its rule that are known here, even if a clock is wrong. So a rule that is removed
// during a split stays removed after it.
//
// Entries travel with the fleet's time: the wall clock, corrected by the median of the offsets of
// the peers and of this process, whose own is 0 ([Quarantine.Offset]). A process returns them with
// its own wall clock's time. So a clock that is an hour off ends no entry an hour early or late. A
// write that is made before the fleet's time is known counts here at once. It is sent later, with
// the time at which it was made.
//
// Memory is bounded: [quarantine.Max] entries that are set by this process, and four times as many
// with peers' entries and removed ones. Beyond that a peer's packet is refused and counted. A
// removed entry is remembered for as long as an entry may last, so that no process can bring it
// back. So is an entry that has ended: it may have replaced one that lasts longer. Ended entries
// take at most half of the room. Without room those that changed first are forgotten.
//
// It is its own section of the gossip session, and safe for concurrent use.
type Quarantine struct {
	wall func() time.Time

	*board

	shift   time.Duration         // the fleet's time minus our wall clock
	timed   bool                  // shift is known
	early   map[string]earlyWrite // writes that were made here before timed, by element
	ended   map[string]struct{}   // elements that had ended at the latest prune and stay; peers may have changed some since
	pruneAt time.Time
	refused uint64 // packets refused for lack of room
}

// earlyWrite is a write that was made before the fleet's time was known.
type earlyWrite struct {
	removed bool
	entry   dlq.QuarantineEntry // with times of our clock
	at      time.Time           // when it was made, by our clock
	heard   crdt.Stamp          // stamp of the write that counted before it
}

const (
	pruneEvery  = time.Minute
	voidAfter   = time.Hour // how long after its time an entry counts as ended, for peers whose clock is behind
	maxElements = 4 * quarantine.Max

	// removedFor is how long a write overrules earlier ones: longer than any of them lasts.
	removedFor = dlq.MaxQuarantineFor + 2*voidAfter
)

// NewQuarantine returns the empty list of self. wall is the wall clock: [time.Now], or a test's.
// The error is [ErrConfig].
func NewQuarantine(self crdt.Replica, wall func() time.Time) (*Quarantine, error) {
	if wall == nil {
		return nil, fmt.Errorf("%w: wall: nil is not a clock", ErrConfig)
	}
	b, err := newBoard(self)
	if err != nil {
		return nil, err
	}
	return &Quarantine{wall: wall, board: b, early: make(map[string]earlyWrite), ended: make(map[string]struct{})}, nil
}

// Offset takes the known offsets of the peers' wall clocks: how far each is ahead of ours. It
// returns how far the fleet's time is ahead of ours.
func (q *Quarantine) Offset(peers []time.Duration) time.Duration {
	all := append(slices.Clone(peers), 0)
	slices.Sort(all)
	q.mu.Lock()
	defer q.mu.Unlock()
	was := q.shift
	if q.shift = all[len(all)/2]; (q.shift - was).Abs() >= time.Second {
		q.watchedLocked() // watchers were told wrong times
	}
	if len(peers) > 0 && !q.timed {
		q.timed, q.pruneAt = true, q.wall().Add(pruneEvery) // the offsets of more peers may correct the time
		q.sendLocked()
	}
	return q.shift
}

// sendLocked writes the early writes to the set, with stamps of the fleet's time.
func (q *Quarantine) sendLocked() {
	for element, w := range q.early {
		at := q.stampAt(w.at).After(w.heard)
		if w.removed {
			_, _ = q.set.Remove(element, at) // if a later write was heard, that one decides
		} else {
			_, _ = q.set.Add(element, q.noteOf(w.entry), at)
		}
	}
	if len(q.early) > 0 {
		clear(q.early)
		q.tellLocked()
	}
}

// stampAt returns the fleet's time at an instant of our wall clock.
func (q *Quarantine) stampAt(wall time.Time) crdt.Stamp {
	return crdt.Stamp{Physical: uint64(max(0, wall.Add(q.shift).UnixMilli()))}
}

// Add implements [dlq.Quarantine].
func (q *Quarantine) Add(e dlq.QuarantineEntry) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.wall()
	e = e.WithDefaults(now)
	if err := e.Validate(now); err != nil {
		return err
	}
	if q.lenLocked() >= quarantine.Max || q.fullLocked() {
		q.pruneLocked(now)
	}
	element := e.Rule.String()
	if !q.hasLocked(element) && (q.lenLocked() >= quarantine.Max || q.fullLocked()) {
		return fmt.Errorf("%w: the list has %d entries and %d that ended or were removed lately, the most there may be are %d: remove some, or wait",
			dlq.ErrQuarantine, q.lenLocked(), q.countLocked()-q.lenLocked(), quarantine.Max)
	}
	delete(q.ended, element)
	heard, _, _ := q.set.At(element)
	if !q.timed {
		q.early[element] = earlyWrite{entry: e, at: now, heard: heard}
		q.tellLocked()
		return nil
	}
	return q.wroteLocked(q.set.Add(element, q.noteOf(e), q.stampAt(now).After(heard)))
}

// Remove implements [dlq.Quarantine].
func (q *Quarantine) Remove(r dlq.Rule, _ string) error {
	if err := r.Validate(); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	now, element := q.wall(), r.String()
	heard, _, known := q.set.At(element)
	if _, early := q.early[element]; !known && !early && q.fullLocked() {
		return fmt.Errorf("%w: %v is not known here, and there is no room to remember it", dlq.ErrQuarantine, r)
	}
	if !q.timed {
		q.early[element] = earlyWrite{removed: true, at: now, heard: heard}
		q.tellLocked()
		return nil
	}
	delete(q.ended, element)
	return q.wroteLocked(q.set.Remove(element, q.stampAt(now).After(heard)))
}

// hasLocked tells whether an element is on the list. lenLocked counts the elements on the list,
// countLocked those, the ended and the removed ones. An early write counts beside one that was
// heard.
func (q *Quarantine) hasLocked(element string) bool {
	if w, ok := q.early[element]; ok {
		return !w.removed
	}
	_, ended := q.ended[element]
	return !ended && q.set.Has(element)
}

func (q *Quarantine) lenLocked() int {
	n := q.set.Len() - len(q.ended)
	for _, w := range q.early {
		if !w.removed {
			n++
		}
	}
	return n
}

func (q *Quarantine) countLocked() int { return q.set.Len() + q.set.Tombstones() + len(q.early) }

func (q *Quarantine) fullLocked() bool { return q.countLocked() >= maxElements }

func (q *Quarantine) wroteLocked(wrote bool, err error) error {
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", dlq.ErrQuarantine, err)
	case !wrote:
		return fmt.Errorf("%w: the write before is at the end of time: a clock of the fleet is broken", dlq.ErrQuarantine)
	}
	q.tellLocked()
	return nil
}

// Entries returns the entries in force, the oldest first.
func (q *Quarantine) Entries() []dlq.QuarantineEntry {
	q.mu.Lock()
	defer q.mu.Unlock()
	return quarantine.InForce(q.wall(), func(yield func(dlq.QuarantineEntry) bool) {
		for _, w := range q.early {
			if !w.removed && !yield(w.entry) {
				return
			}
		}
		for element, note := range q.set.All() {
			if _, early := q.early[element]; early {
				continue
			}
			e, ok := entryOf(element, note)
			e.At, e.Until = e.At.Add(-q.shift), e.Until.Add(-q.shift)
			if ok && !yield(e) {
				return
			}
		}
	})
}

// pruneLocked forgets entries that ended or were removed, once their write is so old that it
// overrules no entry that a process may still have in force. Until then an entry that has ended
// stays as it is: its write is the same in all processes, and overrules earlier ones as a removal
// would. A removal in its place would be a new write, and one process with a wrong clock would end
// an entry for all.
//
// Before the fleet's time is known it cannot judge entries that were heard. An early entry that has
// ended goes, too, unless it overrules another.
func (q *Quarantine) pruneLocked(now time.Time) {
	q.pruneAt = now.Add(pruneEvery)
	maps.DeleteFunc(q.early, func(element string, w earlyWrite) bool {
		return now.Sub(w.at) > removedFor || !w.removed && !now.Before(w.entry.Until) && !q.set.Has(element)
	})
	if !q.timed {
		return
	}
	var ended []string // the oldest change first
	fleet := now.Add(q.shift)
	for element, note := range q.set.All() {
		e, ok := entryOf(element, note)
		if ok && fleet.Sub(e.Until) <= voidAfter {
			continue
		}
		if at, _, _ := q.set.At(element); ok && fleet.Sub(at.Time()) <= removedFor {
			ended = append(ended, element)
		} else {
			q.set.Drop(element)
		}
	}
	_, _ = q.set.Prune(q.stampAt(now), removedFor) // the age is in the allowed range
	room := max(0, maxElements/2-(q.countLocked()-len(ended)))
	clear(q.ended)
	for i, element := range ended {
		if len(ended)-i > room {
			q.set.Drop(element)
		} else {
			q.ended[element] = struct{}{}
		}
	}
}

// Refused counts the packets that were refused for lack of room.
func (q *Quarantine) Refused() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.refused
}

// Delta appends the changes that a peer has not acknowledged, in at most room bytes. Without news
// it appends nothing.
func (q *Quarantine) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if now := q.wall(); !now.Before(q.pruneAt) {
		q.pruneLocked(now)
	}
	return q.set.Delta(b, since, room)
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent. The errors are
// [ErrMalformed], [ErrSelf] and [ErrBusy], and then nothing was taken in.
func (q *Quarantine) Merge(c crdt.Contact, b []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if c.From == q.self {
		return ErrSelf
	}
	if len(b) == 0 {
		return nil
	}
	if q.fullLocked() {
		q.refused++
		return fmt.Errorf("%w: the quarantine has %d elements", ErrBusy, maxElements)
	}
	return q.mergeLocked(b)
}

// noteOf encodes the entry's times, in milliseconds of the fleet's time, then By and Why.
func (q *Quarantine) noteOf(e dlq.QuarantineEntry) string {
	b := binary.AppendUvarint(nil, uint64(max(0, e.At.Add(q.shift).UnixMilli())))
	b = binary.AppendUvarint(b, uint64(max(0, e.Until.Add(q.shift).UnixMilli())))
	return string(wire.AppendText(wire.AppendText(b, e.By), e.Why))
}

// entryOf decodes an element; false if it is not one of this version.
func entryOf(element, note string) (e dlq.QuarantineEntry, ok bool) {
	rule, err := dlq.ParseRule(element)
	if err != nil {
		return e, false
	}
	r := read([]byte(note))
	const end = 1 << 52 // the latest time, in milliseconds
	at, until := r.Uint("at", 0, end), r.Uint("until", 0, end)
	e = dlq.QuarantineEntry{Rule: rule, At: time.UnixMilli(int64(at)), Until: time.UnixMilli(int64(until))}
	e.By, e.Why = r.Text("by", 0, crdt.MaxNote), r.Text("why", 0, crdt.MaxNote)
	return e, r.Fault() == nil && r.Len() == 0
}
