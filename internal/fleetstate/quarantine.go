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

// A Quarantine is the fleet's list of rules about messages that no process is to handle:
// a [dlq.Quarantine] that all processes share. It is a [crdt.LWWSet]: of two writes about
// one rule the later one wins. Stamps are the fleet's time, and a write that is made here about
// what is known here is always the later one, however wrong a clock is. So a rule that is taken
// off during a split is off when the split has healed.
//
// What travels is the fleet's time, the wall clock put right by the median of the peers'
// offsets ([Quarantine.Offset]); what a process gives out is its own wall clock's. So a
// clock that is an hour off ends no entry an hour early or late. What is written before that
// time is known counts here at once. It is sent afterwards, with the time at which it was written.
//
// Memory is bounded: [quarantine.Max] entries that are set by this process, and four
// times as many with those that peers bring and those that were removed. Beyond that a
// peer's packet is refused and counted. What was removed is remembered for as long as an
// entry may last, so that no process can bring it back.
//
// It is a section of its own for the gossip session, and safe for concurrent use.
type Quarantine struct {
	wall func() time.Time

	*board

	shift   time.Duration         // of our wall clock, to the fleet's time
	timed   bool                  // that is known
	early   map[string]earlyWrite // what was written here before, by element
	pruneAt time.Time
	refused uint64
}

// earlyWrite is a write that was made before the fleet's time was known.
type earlyWrite struct {
	removed bool
	entry   dlq.QuarantineEntry // by our clock
	at      time.Time           // likewise
	heard   crdt.Stamp          // of the write that decided before
}

const (
	pruneEvery  = time.Minute
	voidAfter   = time.Hour // an entry is dropped so long after its time, for peers whose clock is behind
	maxElements = 4 * quarantine.Max

	// removedFor is for how long a write overrules those before it: longer than any of them lasts.
	removedFor = dlq.MaxQuarantineFor + 2*voidAfter
)

// NewQuarantine returns the empty list of self. wall is the wall clock, [time.Now] or a
// test's. The error is [ErrConfig].
func NewQuarantine(self crdt.Replica, wall func() time.Time) (*Quarantine, error) {
	if wall == nil {
		return nil, fmt.Errorf("%w: wall: nil is not a clock", ErrConfig)
	}
	b, err := newBoard(self)
	if err != nil {
		return nil, err
	}
	return &Quarantine{wall: wall, board: b, early: make(map[string]earlyWrite)}, nil
}

// Offset takes how far the wall clocks of the peers are ahead of ours, of those of which
// it is known. It returns how far the fleet's time is.
func (q *Quarantine) Offset(peers []time.Duration) time.Duration {
	all := append(slices.Clone(peers), 0)
	slices.Sort(all)
	q.mu.Lock()
	defer q.mu.Unlock()
	was := q.shift
	if q.shift = all[len(all)/2]; (q.shift - was).Abs() >= time.Second {
		q.watchedLocked() // what it was told of times is wrong
	}
	if len(peers) > 0 && !q.timed {
		q.timed, q.pruneAt = true, q.wall().Add(pruneEvery) // more peers may put the time right
		q.sendLocked()
	}
	return q.shift
}

// sendLocked makes what was written before the fleet's time was known the writes that they are.
func (q *Quarantine) sendLocked() {
	for element, w := range q.early {
		at := q.stampAt(w.at).After(w.heard)
		if w.removed {
			_, _ = q.set.Remove(element, at) // a later write that was heard decides
		} else {
			_, _ = q.set.Add(element, q.noteOf(w.entry), at)
		}
	}
	if len(q.early) > 0 {
		clear(q.early)
		q.tellLocked()
	}
}

// stampAt is the fleet's time at an instant of our wall clock.
func (q *Quarantine) stampAt(wall time.Time) crdt.Stamp {
	return crdt.Stamp{Physical: uint64(max(0, wall.Add(q.shift).UnixMilli()))}
}

// Add is that of [dlq.Quarantine].
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
		return fmt.Errorf("%w: the list has %d entries and %d that were removed lately, the most there may be are %d: remove some, or wait",
			dlq.ErrQuarantine, q.lenLocked(), q.countLocked()-q.lenLocked(), quarantine.Max)
	}
	heard, _, _ := q.set.At(element)
	if !q.timed {
		q.early[element] = earlyWrite{entry: e, at: now, heard: heard}
		q.tellLocked()
		return nil
	}
	return q.wroteLocked(q.set.Add(element, q.noteOf(e), q.stampAt(now).After(heard)))
}

// Remove is that of [dlq.Quarantine].
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
	return q.wroteLocked(q.set.Remove(element, q.stampAt(now).After(heard)))
}

// hasLocked tells whether an element is on the list; lenLocked and countLocked are how many
// are, and how many with those that were removed. An early write counts beside one that was heard.
func (q *Quarantine) hasLocked(element string) bool {
	if w, ok := q.early[element]; ok {
		return !w.removed
	}
	return q.set.Has(element)
}

func (q *Quarantine) lenLocked() int {
	n := q.set.Len()
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

// Entries are those in force, the oldest first.
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

// pruneLocked forgets entries whose time is long over, and what was removed so long ago
// that nobody can have it in force any more. Before the fleet's time is known it cannot tell
// that of what was heard. An early entry whose time is over goes too, unless it overrules one.
func (q *Quarantine) pruneLocked(now time.Time) {
	q.pruneAt = now.Add(pruneEvery)
	maps.DeleteFunc(q.early, func(element string, w earlyWrite) bool {
		return now.Sub(w.at) > removedFor || !w.removed && !now.Before(w.entry.Until) && !q.set.Has(element)
	})
	if !q.timed {
		return
	}
	for element, note := range q.set.All() {
		if e, ok := entryOf(element, note); !ok || now.Add(q.shift).Sub(e.Until) > voidAfter {
			q.set.Drop(element)
		}
	}
	_, _ = q.set.Prune(q.stampAt(now), removedFor) // the age is allowed
}

// Refused is how many packets were refused for want of room.
func (q *Quarantine) Refused() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.refused
}

// Delta appends what a peer has not acknowledged, in at most room bytes. Without news it
// appends nothing.
func (q *Quarantine) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if now := q.wall(); !now.Before(q.pruneAt) {
		q.pruneLocked(now)
	}
	return q.set.Delta(b, since, room)
}

// Merge takes in what a peer's Delta appended. It is commutative and idempotent. The
// errors are [ErrMalformed], [ErrSelf] and [ErrBusy], and then nothing was taken in.
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

// noteOf has the times of the entry in milliseconds, which are the fleet's, who, and why.
func (q *Quarantine) noteOf(e dlq.QuarantineEntry) string {
	b := binary.AppendUvarint(nil, uint64(max(0, e.At.Add(q.shift).UnixMilli())))
	b = binary.AppendUvarint(b, uint64(max(0, e.Until.Add(q.shift).UnixMilli())))
	return string(wire.AppendText(wire.AppendText(b, e.By), e.Why))
}

// entryOf reads an element; false if it is none of this version.
func entryOf(element, note string) (e dlq.QuarantineEntry, ok bool) {
	rule, err := dlq.ParseRule(element)
	if err != nil {
		return e, false
	}
	r := read([]byte(note))
	const end = 1 << 52 // no time is later, in milliseconds
	at, until := r.Uint("at", 0, end), r.Uint("until", 0, end)
	e = dlq.QuarantineEntry{Rule: rule, At: time.UnixMilli(int64(at)), Until: time.UnixMilli(int64(until))}
	e.By, e.Why = r.Text("by", 0, crdt.MaxNote), r.Text("why", 0, crdt.MaxNote)
	return e, r.Fault() == nil && r.Len() == 0
}
