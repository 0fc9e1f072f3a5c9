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

// Orders carries an operator's orders from the process that was asked to all others, and their
// answers back. The console decides what orders say. Both are elements of one [crdt.LWWSet]. They
// are added and never removed.
//
// An order counts until its time, and is forgotten an hour later. An order that is over overrules
// nothing. So the process that gives an order makes it last as long as those before it. When room
// is short, orders that are over make room, the earliest first.
//
// Each process answers each order. An answer is only asked for within some seconds. It is forgotten
// after two minutes, or earlier if there is no room for an order, the oldest first.
//
// Times travel as the fleet's time, as in a [Quarantine]. A process that has just started does not
// know that time yet: by a clock that is behind, an order that is over would be in force. So before
// the first call of [Orders.Offset] it has only its own orders. These are sent afterwards: by a
// wrong clock they could be over for the others, or last too long.
//
// Orders have one sequence in all processes, that of their stamps. A process that hears two orders
// late carries them out in the same sequence as all others. A stamp is the fleet's time, but later
// than the stamps of all orders that its process had heard, whatever the clocks say.
//
// Memory is bounded: 1024 orders in force, beyond which [Orders.Give] refuses one, and 8192
// elements. It is its own section of the gossip session, and safe for concurrent use.
type Orders struct {
	clock *crdt.Clock
	wall  func() time.Time

	*board

	shift   time.Duration // the fleet's time minus our wall clock
	timed   bool          // shift is known
	own     []Order       // orders given here before timed, with times of our clock, not sent yet
	pruneAt time.Time
}

const (
	maxOrders        = 1024
	maxOrderElements = 8192
	answersFor       = 2 * time.Minute
	maxOrderID       = 32
	// MaxOrder is the most bytes of an order.
	MaxOrder = crdt.MaxElement - maxOrderID - 2
	// MaxAnswer is how many bytes of an answer are kept.
	MaxAnswer = crdt.MaxNote - 8

	orderMark, answerMark = 'o', 'a' // the first byte of an element
)

// NewOrders returns the empty board of self. The error is [ErrConfig].
func NewOrders(self crdt.Replica, wall func() time.Time) (*Orders, error) {
	b, err := newBoard(self)
	if err != nil {
		return nil, err
	}
	return &Orders{clock: crdt.NewClock(wall), wall: wall, board: b}, nil
}

// Offset takes how far the fleet's time is ahead of our wall clock. It must not be called before the
// offset of a peer is known.
func (o *Orders) Offset(shift time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shift = shift
	if !o.timed {
		o.timed, o.pruneAt = true, o.wall().Add(pruneEvery) // the offsets of more peers may correct the time
		o.watchedLocked()                                   // from now on the orders of others count
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

// stampAt returns the fleet's time at an instant of our wall clock.
func (o *Orders) stampAt(wall time.Time) crdt.Stamp {
	return crdt.Stamp{Physical: uint64(max(0, wall.Add(o.shift).UnixMilli()))}
}

// Give adds an order until its time. The error says what is wrong with the order, or is [ErrBusy].
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
	var heard crdt.Stamp // the latest stamp that is known here
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

// Answer adds this process's answer to an order.
func (o *Orders) Answer(id, text string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.addLocked(answerMark, id+"|"+o.self.Name, text[:min(len(text), MaxAnswer)], o.wall().Add(o.shift), o.clock.Now())
}

// addLocked writes an element. Its time comes first in the note.
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

// roomLocked makes room for an element: it forgets the oldest answers, or, if that is not enough,
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

// each visits the elements of a kind. rest is the text behind the bar.
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

// An Order has an ID of its own, and ends at Until.
type Order struct {
	ID, Text string
	Until    time.Time

	stamp crdt.Stamp

	// These are set in an order that was given before the fleet's time was known: the time at which
	// it was given, by our clock, and the latest stamp that was known then.
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

// InForce returns the orders whose time is not over, in their sequence.
func (o *Orders) InForce() []Order {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.inForceLocked(o.wall())
}

// Answers returns the answers to one order, by process.
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

// pruneLocked forgets orders that ended long ago, and answers that are no longer asked for.
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

// Delta appends the changes that a peer has not acknowledged, in at most room bytes.
func (o *Orders) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := o.wall(); o.timed && !now.Before(o.pruneAt) {
		o.pruneLocked(now)
	}
	return o.set.Delta(b, since, room)
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent. The errors are
// [ErrMalformed], [ErrSelf] and [ErrBusy], and then nothing was taken in.
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
