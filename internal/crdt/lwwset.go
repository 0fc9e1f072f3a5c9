// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

const (
	// MaxElement is the longest element of an [LWWSet], in bytes.
	MaxElement = 384
	// MaxNote is the longest note of an element, in bytes.
	MaxNote = 256

	// MinTombstoneAge is the lowest age at which [LWWSet.Prune] drops tombstones.
	MinTombstoneAge = 10 * time.Minute
)

// An LWWSet is a set in which the last write to an element wins: the add or remove with the
// highest stamp. If stamps are equal, the higher [Replica] wins. If the replicas are equal
// too, an add wins over a remove, and the greater note wins between two adds. It is the
// LWW-Element-Set of Shapiro et al., "A comprehensive study of Convergent and Commutative
// Replicated Data Types" (INRIA 7506, 2011), which keeps only the winning write of each
// element. An add has a note, a text about the element.
//
// A removed element stays as a tombstone. Without one, an add that is still on its way would
// bring the element back. [LWWSet.Prune] drops tombstones by age. The caller must bound the
// set: [LWWSet.Len] and [LWWSet.Tombstones] return its size. It is not safe for concurrent
// use. The zero value is not usable; see [NewLWWSet].
type LWWSet struct {
	self    Replica
	rows    *table[string, write]
	live    int    // elements that are in the set
	horizon uint64 // Stamp.Physical; Merge ignores unknown tombstones before it
}

type write struct {
	at      Stamp
	by      Replica
	removed bool
	note    string
}

// beats tells whether w wins against o. It is a total order: only equal writes tie.
func (w write) beats(o write) bool {
	c := cmp.Or(w.at.Compare(o.at), w.by.Compare(o.by))
	if c == 0 && w.removed == o.removed {
		return w.note > o.note
	}
	return c > 0 || c == 0 && o.removed
}

// NewLWWSet makes an empty set to which self writes. It returns an error if the name of self
// is empty or too long.
func NewLWWSet(self Replica) (*LWWSet, error) {
	if err := self.Validate(); err != nil {
		return nil, err
	}
	return &LWWSet{self: self, rows: newTable[string, write]()}, nil
}

// Add writes that the element is in the set, with a note. at should be [Clock.Now]. It
// returns false if the set already has a write with a higher stamp, which still decides. It
// returns an error if the element has more than [MaxElement] bytes, or the note more than
// [MaxNote].
func (s *LWWSet) Add(element, note string, at Stamp) (bool, error) {
	if len(note) > MaxNote {
		return false, argument("length of note", len(note), fmt.Sprintf("0 to %d bytes", MaxNote))
	}
	return s.write(element, write{at: at, by: s.self, note: note})
}

// Remove writes that the element is not in the set, even if the element is not known: its add
// may be on its way. The results are those of [LWWSet.Add].
func (s *LWWSet) Remove(element string, at Stamp) (bool, error) {
	return s.write(element, write{at: at, by: s.self, removed: true})
}

func (s *LWWSet) write(element string, w write) (bool, error) {
	if len(element) > MaxElement {
		return false, argument("length of element", len(element), fmt.Sprintf("0 to %d bytes", MaxElement))
	}
	return s.join(element, w), nil
}

// Has tells whether the element is in the set.
func (s *LWWSet) Has(element string) bool {
	e := s.rows.at[element]
	return e != nil && !e.Of.val.removed
}

// At returns the stamp and the replica of the write that decides about an element; false if
// there is none.
func (s *LWWSet) At(element string) (at Stamp, by Replica, ok bool) {
	w := s.rows.get(element)
	return w.at, w.by, w.by != Replica{}
}

// All yields the elements in the set and their notes, in the order of their changes, the
// latest last. The caller may drop the yielded element.
func (s *LWWSet) All() iter.Seq2[string, string] {
	return func(yield func(element, note string) bool) {
		for element, w := range s.rows.all() {
			if !w.removed && !yield(element, w.note) {
				return
			}
		}
	}
}

// Drop forgets an element that is in the set, without a tombstone. Peers are not told, and a
// peer that still has the element may bring it back. It is for elements that all replicas
// take for void, for example because of a time in their notes.
func (s *LWWSet) Drop(element string) {
	if s.Has(element) {
		s.rows.drop(element)
		s.live--
	}
}

// Len returns how many elements are in the set.
func (s *LWWSet) Len() int { return s.live }

// Tombstones returns how many removed elements are remembered.
func (s *LWWSet) Tombstones() int { return len(s.rows.at) - s.live }

// Prune drops the tombstones whose stamp is more than age before now, and returns how many.
// It returns an error if age is below [MinTombstoneAge]. It walks the whole set, so once a
// minute is enough.
//
// It assumes that no replica still brings an older add: a replica that was cut off for longer
// than age must come back as a new incarnation with an empty set. Otherwise removed elements
// that it still has are in the set again, at all replicas. A tombstone with a stamp in the
// future is dropped age after that stamp.
func (s *LWWSet) Prune(now Stamp, age time.Duration) (int, error) {
	if age < MinTombstoneAge {
		return 0, argument("tombstone age", age, fmt.Sprintf("at least %v", MinTombstoneAge))
	}
	if old := uint64(age.Milliseconds()); old < now.Physical {
		s.horizon = max(s.horizon, now.Physical-old)
	}
	n := 0
	for element, w := range s.rows.all() {
		if w.removed && w.at.Physical < s.horizon {
			s.rows.drop(element)
			n++
		}
	}
	return n, nil
}

// Mark returns the number of the latest change here. See the package comment.
func (s *LWWSet) Mark() uint64 { return s.rows.changes.Mark() }

// Delta appends the elements that changed after since, like [GCounter.Delta].
func (s *LWWSet) Delta(b []byte, since uint64, room int) (_ []byte, upto uint64) {
	return s.rows.delta(b, formatLWWSet, since, room, func(b []byte, element string, w write) []byte {
		b = binary.AppendUvarint(b, uint64(len(element)))
		b = append(b, element...)
		b = appendReplica(appendStamp(b, w.at), w.by)
		if w.removed {
			return append(b, 1)
		}
		return wire.AppendText(append(b, 0), w.note)
	})
}

// Merge merges a message of a Delta. The error is [ErrMalformed]; then nothing has changed. It
// takes stamps as they are, however far ahead. It ignores a tombstone of an unknown element
// that is older than the tombstones pruned here. It keeps nothing of b.
func (s *LWWSet) Merge(b []byte) error {
	if err := eachWrite(b, func(string, write) {}); err != nil {
		return err
	}
	return eachWrite(b, func(element string, w write) { s.join(element, w) })
}

func eachWrite(b []byte, row func(string, write)) error {
	m := read("LWWSet", formatLWWSet, b)
	for m.Len() > 0 {
		element := m.text("element", 0, MaxElement)
		w := write{at: m.stamp("stamp"), by: m.replica("replica"), removed: m.Bool("removed")}
		if !w.removed {
			w.note = m.text("note", 0, MaxNote)
		}
		if m.Fault() == nil {
			row(element, w)
		}
	}
	return m.err()
}

func (s *LWWSet) join(element string, w write) bool {
	e := s.rows.at[element]
	switch {
	case e != nil:
		if !w.beats(e.Of.val) {
			return false
		}
		if !e.Of.val.removed {
			s.live--
		}
		element = e.Of.key
	case w.removed && w.at.Physical < s.horizon:
		return false
	default:
		element = strings.Clone(element)
	}
	if w.by != s.self {
		w.by = w.by.kept()
	} else {
		w.by = s.self
	}
	w.note = strings.Clone(w.note)
	if !w.removed {
		s.live++
	}
	s.rows.put(element, w)
	return true
}
