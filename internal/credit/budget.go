// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit

import (
	"math"
	"strconv"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Class says why a delivery is to be dead-lettered. Each class has credits of
// its own. A value other than the two below makes a method of [Budget] panic.
type Class uint8

const (
	// Exhausted is a delivery whose attempts are used up, and nothing else is known.
	// In an outage that is every delivery, so its balance is small.
	Exhausted Class = iota
	// Permanent is a delivery that is shown to be poison: its handler or its error
	// called it hopeless, or it failed where others succeeded. An outage shows
	// that of nobody; a deploy with a bug or a producer gone wrong may show it of
	// every delivery.
	Permanent

	classes = iota
)

// String returns "exhausted" or "permanent".
func (c Class) String() string {
	switch c {
	case Exhausted:
		return "exhausted"
	case Permanent:
		return "permanent"
	}
	return "Class(" + strconv.Itoa(int(c)) + ")"
}

// credits are counted in millionths, so that ten times 0.1 is 1.
type credits uint64

const credit credits = 1e6

func toCredits(n float64) credits { return credits(math.Round(n * float64(credit))) }

// Budget bounds what one source may dead-letter: successes earn credits up to
// a small balance, and a dead letter costs one. From a full balance and without
// a success or a grant, a class spends at most Balance + t/FreeEvery in a time
// t, whatever the detector and the breaker have seen.
//
// What is refused is not lost: it stays unsettled and waits for a success, the
// instant that [Budget.Next] gives, or an operator's [Budget.Grant].
//
// Instants are monotonic durations since an origin of the caller's choice. No
// method allocates or takes more than a few nanoseconds, and a Budget starts
// no goroutine. Its methods must not be called concurrently: the source calls
// them under its own lock.
type Budget struct {
	off     bool
	every   time.Duration
	pools   [classes]pool
	gift    credits // granted; for any class
	total   uint64  // the success counter as last read
	ignored uint64
	spent   uint64
	refused uint64
}

type pool struct {
	has, most, earn credits
	free            time.Duration // the next free credit, while spent
}

// New returns a budget with full balances. The error is that of
// [dlq.BudgetConfig.Validate].
func New(c dlq.BudgetConfig, stormRate float64) (*Budget, error) {
	if err := c.Validate(stormRate); err != nil {
		return nil, err
	}
	c = c.WithDefaults()
	b := &Budget{off: c.Off, every: c.FreeEvery}
	for class, p := range [classes]pool{
		Exhausted: {most: toCredits(c.Balance), earn: toCredits(c.Earn)},
		Permanent: {most: toCredits(c.PermanentBalance), earn: toCredits(c.PermanentEarn)},
	} {
		p.has = p.most
		b.pools[class] = p
	}
	return b, nil
}

// Successes takes the number of deliveries handled with success, retried ones
// included, counted elsewhere since the budget was made. Those since the last
// call earn, for both classes and up to their balances.
//
// A total smaller than the last is ignored, and counted by [Budget.Ignored]:
// nothing is earned until it is past the last. So neither a stale read nor a
// counter that restarts or wraps around can earn twice.
func (b *Budget) Successes(total uint64) {
	if total <= b.total {
		if total < b.total {
			b.ignored++
		}
		return
	}
	n := total - b.total
	b.total = total
	for i := range b.pools {
		p := &b.pools[i]
		room := p.most - p.has
		if n > uint64(room/p.earn) {
			p.has = p.most
		} else {
			p.has += credits(n) * p.earn
		}
	}
}

// Paid is a credit that was spent, and knows where it came from. The zero value
// is none.
type Paid struct {
	class     Class
	own, gift credits // a free one counts as its class's own
}

// Spend takes one credit of the class and reports whether it had one. Its own
// balance is used first, then what was granted, then the free credit if that is
// due. False means that the delivery must not be dead-lettered now.
//
// Spend before the dead letter is written. If the write fails, retry it under
// the same credit. For a decision that may not be carried out use [Budget.Pay].
func (b *Budget) Spend(now time.Duration, class Class) bool {
	_, ok := b.Pay(now, class)
	return ok
}

// Pay is Spend, for a caller that may have to give the credit back: by
// [Budget.Refund].
func (b *Budget) Pay(now time.Duration, class Class) (Paid, bool) {
	p := &b.pools[class]
	paid := Paid{class: class, own: credit}
	switch {
	case b.off:
	case p.has+b.gift >= credit:
		before := b.gift
		paid.own = min(p.has, credit)
		paid.gift = credit - paid.own
		p.has -= paid.own
		b.gift -= paid.gift
		for i := range b.pools {
			q := &b.pools[i]
			if q.has+b.gift < credit && (q == p || q.has+before >= credit) {
				q.free = now + b.every
			}
		}
	case now >= p.free:
		p.free = now + b.every
	default:
		b.refused++
		return Paid{}, false
	}
	b.spent++
	return paid, true
}

// Refund gives back, once, a credit that Pay took for a dead letter that was then
// not written, to where it came from: what was granted is granted again. It cannot
// raise the balance over its maximum, so what successes have earned meanwhile takes
// the place of what was earned before, and none is ever minted.
func (b *Budget) Refund(paid Paid) {
	if paid == (Paid{}) {
		return
	}
	b.spent--
	if p := &b.pools[paid.class]; !b.off {
		p.has = min(p.has+paid.own, p.most)
		b.gift += paid.gift
	}
}

// Next tells a class that is spent when its next free credit comes; a success
// may come sooner. It reports false, and now, if Spend would be granted now.
func (b *Budget) Next(now time.Duration, class Class) (at time.Duration, wait bool) {
	p := &b.pools[class]
	if b.off || p.has+b.gift >= credit || now >= p.free {
		return now, false
	}
	return p.free, true
}

// mostGift bounds what is granted and not spent.
const mostGift = 1e12

// Grant adds n credits, an operator's gift, to be spent by whichever class runs
// out first. They lie beside the balances, so they are not cut at the maximum
// and do not expire: a grant of 1000 lets exactly 1000 more through. A grant
// that is not a number above zero does nothing, and the gift as a whole is cut
// at 1e12 credits.
func (b *Budget) Grant(n float64) {
	if n > 0 {
		b.gift = min(b.gift+toCredits(min(n, mostGift)), toCredits(mostGift))
	}
}

// Balance is what the class could spend now, granted credits included and a
// free one not. A budget that is off keeps its starting balance.
func (b *Budget) Balance(class Class) float64 {
	return float64(b.pools[class].has+b.gift) / float64(credit)
}

// Continue returns a copy for the caller's next counter of successes, which
// starts at 0: what a source had left when it ended is what it begins with when
// it comes back. b must not be used any more.
func (b *Budget) Continue() *Budget {
	next := *b
	next.total = 0
	return &next
}

// Spent is the number of credits taken and not given back, over both classes.
func (b *Budget) Spent() uint64 { return b.spent }

// Refused is the number of times that there was no credit, over both classes.
// A caller that asks again for a waiting delivery is counted again.
func (b *Budget) Refused() uint64 { return b.refused }

// Ignored is the number of totals that [Budget.Successes] ignored because they
// were smaller than an earlier one. More than zero is a fault of the caller's
// counter.
func (b *Budget) Ignored() uint64 { return b.ignored }
