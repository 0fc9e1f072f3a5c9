// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
	"github.com/stormguard-mq/stormguard/internal/quarantine"
)

// A Quarantine is the fleet's list of rules about messages that no process is to handle:
// a [dlq.Quarantine] that all processes share. It is a [crdt.LWWSet]: of two writes about
// one rule the later one wins, by the stamps of hybrid logical clocks, and a write that is
// made here about what is known here is always the later one, however wrong a clock is.
// So a rule that is taken off during a split is off when the split has healed.
//
// What travels is the fleet's time, the wall clock put right by the median of the peers'
// offsets ([Quarantine.Offset]); what a process gives out is its own wall clock's. So a
// clock that is an hour off ends no entry an hour early or late.
//
// Memory is bounded: [quarantine.Max] entries that are set by this process, and four
// times as many with those that peers bring and those that were removed. Beyond that a
// peer's packet is refused and counted. What was removed is remembered for as long as an
// entry may last, so that no process can bring it back.
//
// It is a section of its own for the gossip session, and safe for concurrent use.
type Quarantine struct {
	clock *crdt.Clock
	wall  func() time.Time

	*board

	shift   time.Duration // of our wall clock, to the fleet's time
	pruneAt time.Time
	refused uint64
}

const (
	pruneEvery  = time.Minute
	voidAfter   = time.Hour // an entry is dropped so long after its time, for peers whose clock is behind
	maxElements = 4 * quarantine.Max
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
	return &Quarantine{clock: crdt.NewClock(wall), wall: wall, board: b}, nil
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
	return q.shift
}

// stampLocked is above the write that decides about an element.
func (q *Quarantine) stampLocked(element string) crdt.Stamp {
	at := q.clock.Now()
	if last, _, ok := q.set.At(element); ok && at.Compare(last) <= 0 {
		at = last
		if at.Logical++; at.Logical == 0 {
			at.Physical++
		}
	}
	return at
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
	if q.set.Len() >= quarantine.Max || q.fullLocked() {
		q.pruneLocked(now)
	}
	e.At, e.Until = e.At.Add(q.shift), e.Until.Add(q.shift)
	element := e.Rule.String()
	if !q.set.Has(element) && (q.set.Len() >= quarantine.Max || q.fullLocked()) {
		return fmt.Errorf("%w: the list has %d entries and %d that were removed lately, the most there may be are %d: remove some, or wait",
			dlq.ErrQuarantine, q.set.Len(), q.set.Tombstones(), quarantine.Max)
	}
	return q.wroteLocked(q.set.Add(element, noteOf(e), q.stampLocked(element)))
}

// Remove is that of [dlq.Quarantine].
func (q *Quarantine) Remove(r dlq.Rule, _ string) error {
	if err := r.Validate(); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	element := r.String()
	if _, _, known := q.set.At(element); !known && q.fullLocked() {
		return fmt.Errorf("%w: %v is not known here, and there is no room to remember it", dlq.ErrQuarantine, r)
	}
	return q.wroteLocked(q.set.Remove(element, q.stampLocked(element)))
}

func (q *Quarantine) fullLocked() bool { return q.set.Len()+q.set.Tombstones() >= maxElements }

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
		for element, note := range q.set.All() {
			e, ok := entryOf(element, note)
			e.At, e.Until = e.At.Add(-q.shift), e.Until.Add(-q.shift)
			if ok && !yield(e) {
				return
			}
		}
	})
}

// pruneLocked forgets entries whose time is long over, and what was removed so long ago
// that nobody can have it in force any more.
func (q *Quarantine) pruneLocked(now time.Time) {
	q.pruneAt = now.Add(pruneEvery)
	for element, note := range q.set.All() {
		if e, ok := entryOf(element, note); !ok || now.Add(q.shift).Sub(e.Until) > voidAfter {
			q.set.Drop(element)
		}
	}
	_, _ = q.set.Prune(q.clock.Now(), dlq.MaxQuarantineFor+2*voidAfter) // the age is allowed
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

// A note is the wall times of the entry in milliseconds, who, and why.
func noteOf(e dlq.QuarantineEntry) string {
	b := binary.AppendUvarint(nil, uint64(max(0, e.At.UnixMilli())))
	b = binary.AppendUvarint(b, uint64(max(0, e.Until.UnixMilli())))
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
