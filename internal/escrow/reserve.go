// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"fmt"
	"time"
)

// A Reservation is an admission at a certain time: whoever has it does its work
// when Delay has passed, and asks nobody any more. It is safe for concurrent use.
type Reservation struct {
	set     *Set
	booking *booking
}

// A booking is a reservation in a row's books.
type booking struct {
	amount    int64
	due       time.Duration
	cancelled bool
}

// Reserve admits n as soon as this node has minted them, and says when that is. It
// never counts on loans: what is reserved, lent and not yet due is together at most
// this node's share of the burst, and anything more is [ErrShare], as is everything
// while the node may not mint, where others wait already, and where the key's owner
// is elsewhere, and with [Pooled]. n <= 0 is admitted at once.
//
// A limit that is cut or a fence that comes afterwards does not take a reservation
// back: at most a share of the burst is admitted for it that was not minted by then.
func (l *Handle) Reserve(n int) (Reservation, error) {
	if l.pooled != nil {
		return Reservation{}, fmt.Errorf("%w: %d, with Strategy pooled", ErrShare, n)
	}
	s := l.set
	s.lock()
	defer s.unlock()
	r, amount := l.attach(), amountOf(n)
	switch {
	case s.closed:
		return Reservation{}, ErrClosed
	case r == nil:
		return Reservation{}, ErrTooManyKeys
	case amount > r.burst:
		return Reservation{}, tooMuch(amount, r.burst)
	}
	r.update(s.node.now, s.node.mintAt)
	r.reclaim()
	if l.first != nil || s.node.now < s.node.mintAt || r.drawing || r.lent+r.reserved+amount > r.cap {
		return Reservation{}, fmt.Errorf("%w: %d, with %d lent and %d reserved of %d", ErrShare, n, r.lent/micro, r.reserved/micro, r.cap/micro)
	}
	b := r.book(s.node.now, amount)
	r.forecast.asked += amount
	s.node.stir(r)
	return Reservation{s, b}, nil
}

// Delay is how long there is to wait; 0 when it is time.
func (r Reservation) Delay() time.Duration {
	if r.set == nil {
		return 0
	}
	return max(0, r.booking.due-r.set.clock())
}

// Cancel gives the tokens back, at the time when they were due; those who have
// reserved since are not served sooner. Later than that it does nothing.
func (r Reservation) Cancel() {
	if r.set == nil {
		return
	}
	r.set.lock()
	defer r.set.unlock()
	if r.set.node.now < r.booking.due {
		r.booking.cancelled = true
	}
}

// book takes what is there, and owes the rest to itself. The level and what is
// reserved are within the cap, and the pool is empty.
func (r *row) book(now time.Duration, amount int64) *booking {
	there := min(amount, r.level)
	r.level -= there
	r.prepaid += there
	r.owing += amount - there
	r.reserved += amount
	r.granted = min(r.granted, r.level)
	b := &booking{amount: amount, due: after(now, r.until(r.level+r.owing))}
	r.bookings = append(r.bookings, b)
	r.spentAt = now
	return b
}

// pay uses what was minted for reservations: those that are overdue first.
func (r *row) pay(minted int64) (rest int64) {
	x := min(minted, r.overdue)
	r.overdue -= x
	r.sum.Own = plus(r.sum.Own, x)
	y := min(minted-x, r.owing)
	r.owing -= y
	r.prepaid += y
	r.sum.Minted = plus(r.sum.Minted, x+y)
	return minted - x - y
}

// redeem ends reservations that are due. What a cancelled one gives back behind a
// fence is void, as all that is the node's own.
func (r *row) redeem(now time.Duration, fenced bool) {
	for len(r.bookings) > 0 && r.bookings[0].due <= now {
		b := r.bookings[0]
		r.bookings = r.bookings[1:]
		paid := min(r.prepaid, b.amount)
		short := b.amount - paid // the rate was cut since
		r.prepaid -= paid
		r.owing -= short
		r.reserved -= b.amount
		switch {
		case b.cancelled && fenced:
			r.sum.Trimmed = plus(r.sum.Trimmed, paid)
			continue
		case b.cancelled:
			r.level += paid
			continue
		}
		r.sum.Own = plus(r.sum.Own, paid)
		r.overdue += short
	}
}
