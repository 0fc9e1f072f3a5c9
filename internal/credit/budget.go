// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit

import (
	"math"
	"strconv"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Class says why a delivery is dead-lettered. Each class has its own credits. Any value other
// than the two below makes a method of [Budget] panic.
type Class uint8

const (
	// Exhausted is a delivery whose attempts are used up, without a proof that it is poison.
	// In an outage every delivery is Exhausted, so the balance is small.
	Exhausted Class = iota
	// Permanent is a delivery that is proven to be poison: its handler or its error called it
	// hopeless, or it failed where others succeeded. An outage makes no delivery Permanent. A
	// deploy with a bug or a faulty producer may make every delivery Permanent.
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

// credits counts millionths of a credit, so that ten times 0.1 is 1.
type credits uint64

const credit credits = 1e6

func toCredits(n float64) credits { return credits(math.Round(n * float64(credit))) }

// Budget bounds the dead letters of one source. Successes earn credits up to a small balance,
// and a dead letter costs one credit. Without a success or a grant, a class with a full
// balance spends at most Balance + t/FreeEvery in a time t. The detector and the breaker do
// not change that bound.
//
// A refused delivery is not lost. It stays unsettled and waits for a success, for the instant
// that [Budget.Next] returns, or for an operator's [Budget.Grant].
//
// Instants are monotonic durations since an origin that the caller chooses. No method
// allocates or takes more than a few nanoseconds, and a Budget starts no goroutine. Its
// methods must not be called concurrently: the source calls them under its own lock.
type Budget struct {
	off     bool
	every   time.Duration // between two free credits
	pools   [classes]pool
	gift    credits // granted and not spent, for any class
	total   uint64  // the highest success counter so far
	ignored uint64
	spent   uint64
	refused uint64
}

// A pool is the balance of one class.
type pool struct {
	has, most, earn credits       // present balance, largest balance, credits per success
	free            time.Duration // when the next free credit comes, while the balance is spent
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

// Successes takes the caller's counter of deliveries that were handled with success since the
// budget was made, retried ones included. Successes since the last call earn credits for both
// classes, up to their balances.
//
// A total smaller than the highest one so far is ignored, and counted by [Budget.Ignored].
// Nothing is earned until a total is above the highest one. So neither a stale read nor a
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

// Paid is a spent credit that remembers where it came from. The zero value is no credit.
type Paid struct {
	class     Class
	own, gift credits // parts from the class's balance and from the gift; a free credit is own
}

// Spend takes one credit of the class and returns whether it had one. It uses the class's
// balance first, then granted credits, then the free credit if that is due. False means that
// the delivery must not be dead-lettered now.
//
// Spend before the dead letter is written. If the write fails, retry it under the same
// credit. For a decision that may be dropped use [Budget.Pay].
func (b *Budget) Spend(now time.Duration, class Class) bool {
	_, ok := b.Pay(now, class)
	return ok
}

// Pay is Spend for a caller that may have to give the credit back with [Budget.Refund].
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

// Refund gives back a credit that Pay took for a dead letter that was then not written. Call
// it once for each credit. The credit goes to where it came from: a granted one is granted
// again. Refund cannot raise a balance over its maximum: if successes have filled the balance
// meanwhile, the credit is lost. So it never creates credits.
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

// Next returns when the next free credit of a spent class comes; a success may earn one
// sooner. It returns now and false if Spend would take a credit now.
func (b *Budget) Next(now time.Duration, class Class) (at time.Duration, wait bool) {
	p := &b.pools[class]
	if b.off || p.has+b.gift >= credit || now >= p.free {
		return now, false
	}
	return p.free, true
}

// mostGift bounds the credits that are granted and not spent.
const mostGift = 1e12

// Grant adds n credits, an operator's gift. The class that runs out first spends them. They
// are separate from the balances, so they are not cut at a maximum balance and do not expire:
// a grant of 1000 allows exactly 1000 more dead letters. If n is not a number above zero,
// Grant does nothing. The gift in total is cut at 1e12 credits.
func (b *Budget) Grant(n float64) {
	if n > 0 {
		b.gift = min(b.gift+toCredits(min(n, mostGift)), toCredits(mostGift))
	}
}

// Balance returns how many credits the class could spend now, with granted credits and
// without a free one. A budget that is off keeps its first balance.
func (b *Budget) Balance(class Class) float64 {
	return float64(b.pools[class].has+b.gift) / float64(credit)
}

// Continue returns a copy for a new counter of successes, which starts at 0. So a source that
// comes back begins with the credits that it had left. b must not be used any more.
func (b *Budget) Continue() *Budget {
	next := *b
	next.total = 0
	return &next
}

// Spent returns the number of credits taken and not given back, over both classes.
func (b *Budget) Spent() uint64 { return b.spent }

// Refused returns how often there was no credit, over both classes. A caller that asks again
// for a waiting delivery is counted again.
func (b *Budget) Refused() uint64 { return b.refused }

// Ignored returns how many totals [Budget.Successes] ignored because they were smaller than
// an earlier one. More than zero is a fault of the caller's counter.
func (b *Budget) Ignored() uint64 { return b.ignored }
