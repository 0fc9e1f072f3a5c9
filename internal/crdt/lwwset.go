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
	// MaxElement is how many bytes an element of an [LWWSet] may have.
	MaxElement = 384
	// MaxNote is how many bytes a note on an element may have.
	MaxNote = 256

	// MinTombstoneAge is the least age at which [LWWSet.Prune] drops tombstones.
	MinTombstoneAge = 10 * time.Minute
)

// An LWWSet is a set in which the last write to an element wins: the add or
// remove with the highest stamp. Equal stamps are decided by the higher
// [Replica]; where the replica is the same too, add wins, and of two adds the greater
// note. It is the
// LWW-Element-Set of Shapiro et al., "A comprehensive study of Convergent and
// Commutative Replicated Data Types" (INRIA 7506, 2011), which keeps of each
// element only the write that wins. An add has a note: what is said of the element.
//
// A removed element stays as a tombstone, or an add that is still on its way
// would bring it back; [LWWSet.Prune] drops tombstones by age. Whoever adds
// bounds the set: [LWWSet.Len] and [LWWSet.Tombstones] say how large it is. It
// is not safe for concurrent use. The zero value is not usable; see [NewLWWSet].
type LWWSet struct {
	self    Replica
	rows    *table[string, write]
	live    int
	horizon uint64 // Physical; unknown tombstones from before are not taken in
}

type write struct {
	at      Stamp
	by      Replica
	removed bool
	note    string
}

// beats is a total order: no two writes tie unless they are the same.
func (w write) beats(o write) bool {
	c := cmp.Or(w.at.Compare(o.at), w.by.Compare(o.by))
	if c == 0 && w.removed == o.removed {
		return w.note > o.note
	}
	return c > 0 || c == 0 && o.removed
}

// NewLWWSet makes an empty set that self writes to. It fails with an error
// when the name is empty or too long.
func NewLWWSet(self Replica) (*LWWSet, error) {
	if err := self.Validate(); err != nil {
		return nil, err
	}
	return &LWWSet{self: self, rows: newTable[string, write]()}, nil
}

// Add writes that the element is in the set, with a note, at [Clock.Now]. It reports
// false when a higher stamp is there already, which then still decides. It fails with
// an error when the element has more than [MaxElement] bytes, or the note more than
// [MaxNote].
func (s *LWWSet) Add(element, note string, at Stamp) (bool, error) {
	if len(note) > MaxNote {
		return false, argument("length of note", len(note), fmt.Sprintf("0 to %d bytes", MaxNote))
	}
	return s.write(element, write{at: at, by: s.self, note: note})
}

// Remove writes that the element is not in the set, whether or not it is: its
// add may be on its way. What it returns is as for [LWWSet.Add].
func (s *LWWSet) Remove(element string, at Stamp) (bool, error) {
	return s.write(element, write{at: at, by: s.self, removed: true})
}

func (s *LWWSet) write(element string, w write) (bool, error) {
	if len(element) > MaxElement {
		return false, argument("length of element", len(element), fmt.Sprintf("0 to %d bytes", MaxElement))
	}
	return s.join(element, w), nil
}

// Has says whether the element is in the set.
func (s *LWWSet) Has(element string) bool {
	e := s.rows.at[element]
	return e != nil && !e.Of.val.removed
}

// At is the stamp of the write that decides about an element, and whose it is;
// false if there is none.
func (s *LWWSet) At(element string) (at Stamp, by Replica, ok bool) {
	w := s.rows.get(element)
	return w.at, w.by, w.by != Replica{}
}

// All yields the elements in the set and their notes, that of the latest change last.
// What is yielded may be dropped.
func (s *LWWSet) All() iter.Seq2[string, string] {
	return func(yield func(element, note string) bool) {
		for element, w := range s.rows.all() {
			if !w.removed && !yield(element, w.note) {
				return
			}
		}
	}
}

// Drop forgets an element that is in the set, without a tombstone: peers do not hear of
// it, and whoever still has it may bring it back. It is for elements that everybody
// takes for void, such as by a time in their notes.
func (s *LWWSet) Drop(element string) {
	if s.Has(element) {
		s.rows.drop(element)
		s.live--
	}
}

// Len is how many elements are in the set.
func (s *LWWSet) Len() int { return s.live }

// Tombstones is how many removed elements are remembered.
func (s *LWWSet) Tombstones() int { return len(s.rows.at) - s.live }

// Prune drops the tombstones whose stamp is more than age before now, and
// returns how many. It fails with an error when age is below
// [MinTombstoneAge]. It walks the whole set, so once a minute is enough.
//
// It assumes that nobody still brings an add from before: that whoever was cut
// off for longer than age comes back as a new incarnation with an empty set. Otherwise
// an element it still has is in the set again, everywhere. A tombstone with a
// stamp in the future is dropped age after that time.
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

// Mark is the number of the latest change here. See the package comment.
func (s *LWWSet) Mark() uint64 { return s.rows.changes.Mark() }

// Delta appends the elements that changed after since, as [GCounter.Delta] does.
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

// Merge takes in what a Delta appended. It fails with [ErrMalformed], and then
// nothing was changed. Stamps are taken as they are, however far ahead. A
// tombstone of an unknown element from before what was pruned here is left out.
// It keeps nothing of b.
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
