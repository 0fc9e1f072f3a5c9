// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Orders carries what operators order from the process that was asked to all others, and
// their answers back. Both are elements of one [crdt.LWWSet], which are added and never
// removed: an order counts until its time, and an hour later it is forgotten. One that is over
// overrules nothing: whoever gives an order has it count for as long as those before it. So
// orders that are over make room for others, the earliest first. Each process
// answers each order, but nobody asks for an answer after some seconds: answers are forgotten
// after two minutes, and the oldest of them before that where there is no room for an order.
// What the orders say is the console's.
//
// Times travel as the fleet's, as those of a [Quarantine] do. A process that has just started
// does not know that time yet: by a clock that is behind, an order that is over would be in
// force. So before [Orders.Offset] was called it has no orders but its own. These are sent
// afterwards: by such a clock they would be over for the others, or last too long.
//
// Orders have one sequence in all processes, that of their stamps: whoever hears two late
// carries them out as everybody else did. A stamp is the fleet's time, and later than the stamps
// of all orders that its giver had heard of, whatever the clocks say.
//
// Memory is bounded: 1024 orders in force, beyond which [Orders.Give] refuses one, and 8192
// elements. It is a section of its own for the gossip session, and safe for concurrent use.
type Orders struct {
	clock *crdt.Clock
	wall  func() time.Time

	*board

	shift   time.Duration // of our wall clock, to the fleet's time
	timed   bool          // that is known
	own     []Order       // were given here before, by our clock, and are not sent yet
	pruneAt time.Time
}

const (
	maxOrders        = 1024
	maxOrderElements = 8192
	answersFor       = 2 * time.Minute
	maxOrderID       = 32
	// MaxOrder is how many bytes an order may have.
	MaxOrder = crdt.MaxElement - maxOrderID - 2
	// MaxAnswer is how many bytes of an answer are kept.
	MaxAnswer = crdt.MaxNote - 8

	orderMark, answerMark = 'o', 'a' // what an element is
)

// NewOrders returns the empty board of self. The error is [ErrConfig].
func NewOrders(self crdt.Replica, wall func() time.Time) (*Orders, error) {
	b, err := newBoard(self)
	if err != nil {
		return nil, err
	}
	return &Orders{clock: crdt.NewClock(wall), wall: wall, board: b}, nil
}

// Offset takes how far the fleet's time is ahead of our wall clock, once that of a peer is
// known.
func (o *Orders) Offset(shift time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shift = shift
	if !o.timed {
		o.timed, o.pruneAt = true, o.wall().Add(pruneEvery) // more peers may put the time right
		o.watchedLocked()                                   // there may be orders
	}
	now, given := o.wall(), o.own
	o.own = nil
	var last crdt.Stamp
	for _, x := range given {
		last = o.stampAt(x.at).After(x.heard).After(last)
		x.stamp = last
		if now.Before(x.Until) && o.addLocked(orderMark, x.ID+"|"+x.Text, "", x.Until.Add(shift), last) != nil {
			o.own = append(o.own, x)
		}
	}
}

// stampAt is the fleet's time at an instant of our wall clock.
func (o *Orders) stampAt(wall time.Time) crdt.Stamp {
	return crdt.Stamp{Physical: uint64(max(0, wall.Add(o.shift).UnixMilli()))}
}

// Give puts an order up until its time. The error says what is wrong with it, or is
// [ErrBusy].
func (o *Orders) Give(id, text string, until time.Time) error {
	if len(id) < 1 || len(id) > maxOrderID || strings.ContainsRune(id, '|') {
		return fmt.Errorf("%w: order: id: %.40q is not 1 to %d bytes without a bar", ErrConfig, id, maxOrderID)
	}
	if len(text) > MaxOrder {
		return fmt.Errorf("%w: order: %d bytes are more than the %d that a fleet carries", ErrConfig, len(text), MaxOrder)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := o.wall()
	if o.timed {
		o.pruneLocked(now)
	}
	if n := len(o.inForceLocked(now)); n >= maxOrders {
		return fmt.Errorf("%w: %d orders are in force", ErrBusy, n)
	}
	var heard crdt.Stamp // the last that is known here
	known := 0
	o.each(orderMark, func(_, _, _ string, _ time.Time, stamp crdt.Stamp) {
		known++
		if stamp.Compare(heard) > 0 {
			heard = stamp
		}
	})
	if !o.timed {
		o.own = slices.DeleteFunc(o.own, func(x Order) bool { return !now.Before(x.Until) })
		o.own = append(o.own, Order{ID: id, Text: text, Until: until, at: now, heard: heard})
		o.watchedLocked()
		return nil
	}
	if known >= maxOrderElements/2 {
		o.forgetLocked(now)
	}
	return o.addLocked(orderMark, id+"|"+text, "", until.Add(o.shift), o.stampAt(now).After(heard))
}

// Answer says what became of an order in this process.
func (o *Orders) Answer(id, text string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.addLocked(answerMark, id+"|"+o.self.Name, text[:min(len(text), MaxAnswer)], o.wall().Add(o.shift), o.clock.Now())
}

// addLocked writes an element; its time is in front of the note.
func (o *Orders) addLocked(mark byte, element, note string, at time.Time, stamp crdt.Stamp) error {
	element = string(mark) + element
	if !o.set.Has(element) {
		if err := o.roomLocked(); err != nil {
			return err
		}
	}
	b := binary.BigEndian.AppendUint64(nil, uint64(max(0, at.UnixMilli())))
	if _, err := o.set.Add(element, string(b)+note, stamp); err != nil {
		return fmt.Errorf("%w: order: %w", ErrConfig, err)
	}
	o.tellLocked()
	return nil
}

// roomLocked makes room for an element, by forgetting the oldest answers, and if there are none
// orders that are over.
func (o *Orders) roomLocked() error {
	if o.set.Len() < maxOrderElements {
		return nil
	}
	type answer struct {
		element string
		at      time.Time
	}
	var all []answer
	o.each(answerMark, func(id, process, _ string, at time.Time, _ crdt.Stamp) {
		all = append(all, answer{string(answerMark) + id + "|" + process, at})
	})
	slices.SortFunc(all, func(a, b answer) int { return a.at.Compare(b.at) })
	for _, a := range all[:min(len(all), maxOrderElements/4)] {
		o.set.Drop(a.element)
	}
	if o.set.Len() >= maxOrderElements && o.timed {
		o.forgetLocked(o.wall())
	}
	if n := o.set.Len(); n >= maxOrderElements {
		return fmt.Errorf("%w: %d orders are in force", ErrBusy, n)
	}
	return nil
}

// forgetLocked forgets orders that are over, the earliest first.
func (o *Orders) forgetLocked(now time.Time) {
	var over []Order
	o.each(orderMark, func(id, text, _ string, until time.Time, stamp crdt.Stamp) {
		if !now.Add(o.shift).Before(until) {
			over = append(over, Order{ID: id, Text: text, stamp: stamp})
		}
	})
	slices.SortFunc(over, inSequence)
	for _, x := range over[:min(len(over), maxOrderElements/4)] {
		o.set.Drop(string(orderMark) + x.ID + "|" + x.Text)
	}
}

// each visits the elements of a kind: what is behind the bar, the note, and the time.
func (o *Orders) each(mark byte, visit func(id, rest, note string, at time.Time, stamp crdt.Stamp)) {
	for element, note := range o.set.All() {
		if len(element) == 0 || element[0] != mark || len(note) < 8 {
			continue
		}
		if id, rest, ok := strings.Cut(element[1:], "|"); ok {
			ms := binary.BigEndian.Uint64([]byte(note[:8]))
			stamp, _, _ := o.set.At(element)
			visit(id, rest, note[8:], time.UnixMilli(int64(min(ms, math.MaxInt64>>10))), stamp)
		}
	}
}

// An Order has a name of its own, and is void after Until.
type Order struct {
	ID, Text string
	Until    time.Time

	stamp crdt.Stamp

	// Of one given before the fleet's time was known: when, by our clock, and the last stamp
	// that was known then.
	at    time.Time
	heard crdt.Stamp
}

// inSequence compares orders by their stamps.
func inSequence(a, b Order) int { return cmp.Or(a.stamp.Compare(b.stamp), cmp.Compare(a.ID, b.ID)) }

func (o *Orders) inForceLocked(now time.Time) (all []Order) {
	for _, x := range o.own {
		if now.Before(x.Until) {
			all = append(all, x)
		}
	}
	if !o.timed {
		return all // in the sequence in which they were given
	}
	o.each(orderMark, func(id, text, _ string, until time.Time, stamp crdt.Stamp) {
		if until = until.Add(-o.shift); now.Before(until) {
			all = append(all, Order{ID: id, Text: text, Until: until, stamp: stamp})
		}
	})
	slices.SortFunc(all, inSequence)
	return all
}

// InForce are the orders whose time is not over, in their sequence.
func (o *Orders) InForce() []Order {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.inForceLocked(o.wall())
}

// Answers are those to one order, by process.
func (o *Orders) Answers(id string) map[string]string {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make(map[string]string)
	o.each(answerMark, func(of, process, text string, _ time.Time, _ crdt.Stamp) {
		if of == id {
			all[process] = text
		}
	})
	return all
}

// pruneLocked forgets orders whose time is long over, and answers that nobody asks for.
func (o *Orders) pruneLocked(now time.Time) {
	o.pruneAt = now.Add(pruneEvery)
	o.each(orderMark, func(id, text, _ string, until time.Time, _ crdt.Stamp) {
		if now.Add(o.shift).Sub(until) > voidAfter {
			o.set.Drop(string(orderMark) + id + "|" + text)
		}
	})
	o.each(answerMark, func(id, process, _ string, at time.Time, _ crdt.Stamp) {
		if now.Add(o.shift).Sub(at) > answersFor {
			o.set.Drop(string(answerMark) + id + "|" + process)
		}
	})
}

// Delta appends what a peer has not acknowledged, in at most room bytes.
func (o *Orders) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := o.wall(); o.timed && !now.Before(o.pruneAt) {
		o.pruneLocked(now)
	}
	return o.set.Delta(b, since, room)
}

// Merge takes in what a peer's Delta appended. It is commutative and idempotent. The
// errors are [ErrMalformed], [ErrSelf] and [ErrBusy], and then nothing was taken in.
func (o *Orders) Merge(c crdt.Contact, b []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case c.From == o.self:
		return ErrSelf
	case len(b) == 0:
		return nil
	}
	if err := o.roomLocked(); err != nil {
		return err
	}
	return o.mergeLocked(b)
}
