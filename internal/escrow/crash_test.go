// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"testing"
	"time"
)

// A borrower that is told to hoard gathers for a burst, is cut off, and spends all at
// once when the lender has died eight times. stormguard simulate has the others that
// die each second.
func TestHoarder(t *testing.T) {
	const burst = 500
	f := newFleet(t, 3, Limit{Rate: 100, Burst: burst}, 1)
	f.pass(10 * time.Second) // all are full
	s := f.nodes[1]
	s.demand(f.key(s), burst*micro) // and never served
	cut := false
	f.down = func(_ time.Duration, a, b int) bool { return cut && (a == 1 || b == 1) }
	for round := range 8 {
		cut = false
		f.settleNode(1)
		f.pass(f.now + 300*ms)
		if r := f.key(s); r.held < 10*micro {
			t.Fatalf("round %d: the borrower has %d", round, r.held)
		}
		cut = true
		f.crash(0)
		f.start(0)
		f.pass(f.now + 300*ms)
		total := int64(0)
		for _, s := range f.nodes {
			r := f.key(s)
			s.advance(s.clock(f.now))
			r.mint(s.Node.now, s.mintAt)
			total += r.level
			for _, e := range r.entries {
				if e != nil && s.leased(e.peer) {
					total += e.held()
				}
			}
		}
		if total > burst*micro {
			t.Fatalf("round %d: %d tokens can be spent, of %d", round, total/micro, burst)
		}
	}
	if f.over > 1e-6 {
		t.Errorf("%v over", f.over)
	}
}

// What was lent to a node that is cut off fills its lender's cap until the lease
// has ended, and no longer; then a new epoch begins.
func TestCutFreesTheCap(t *testing.T) {
	f := newFleet(t, 2, Limit{Rate: 10_000, Burst: 500}, 1)
	f.run(2*time.Second, 12_000, func(time.Duration) int { return 1 })
	s := f.nodes[0]
	f.down = func(time.Duration, int, int) bool { return true }
	f.run(2500*ms, 12_000, func(time.Duration) int { return 1 })
	p := s.Node.peers["n01"]
	lent := f.key(s).lent
	if lent == 0 || p.epoch != 0 {
		t.Fatalf("%d lent, epoch %d", lent, p.epoch)
	}
	f.run(2900*ms, 12_000, func(time.Duration) int { return 1 })
	if r := f.key(s); r.lent != lent {
		t.Errorf("written off while it could be spent: %d lent, was %d", r.lent, lent)
	}
	f.run(3200*ms, 12_000, func(time.Duration) int { return 1 })
	if r := f.key(s); r.lent != 0 || r.sum.Written != lent || p.epoch != 1 {
		t.Errorf("after the lease: %d lent, %d written off of %d, epoch %d", r.lent, r.sum.Written, lent, p.epoch)
	}
	if r := f.key(f.nodes[1]); r.held != 0 {
		t.Errorf("the borrower still holds %d", r.held)
	}
}

// What an incarnation had borrowed stays out until its lease has ended, although its
// successor is there: it may be alive still, and spend.
func TestAnIncarnationThatIsOverKeepsItsLoans(t *testing.T) {
	f := newFleet(t, 2, Limit{Rate: 10_000, Burst: 500}, 1)
	f.run(2*time.Second, 12_000, func(time.Duration) int { return 1 })
	s := f.nodes[0]
	lent := f.key(s).lent
	f.crash(1)
	f.start(1)
	f.pass(2500 * ms)
	if len(s.ending) != 1 || lent == 0 || s.ending[0].lent.value() < lent {
		t.Fatalf("%d incarnations that are over have something of %d", len(s.ending), lent)
	}
	f.pass(3200 * ms)
	if len(s.ending) != 0 || f.key(s).lent != 0 {
		t.Errorf("after the lease %d incarnations have something, %d lent", len(s.ending), f.key(s).lent)
	}
}

// Packets that turn up when all they speak of is forgotten lend nothing again.
func TestOldPacketsAfterAll(t *testing.T) {
	f := newFleet(t, 2, Limit{Rate: 10_000, Burst: 500}, 1)
	var old []*event
	f.keep = func(e *event) { old = append(old, e) }
	f.run(2*time.Second, 12_000, func(time.Duration) int { return 1 })
	f.keep = nil
	f.pass(20 * time.Second)
	s := f.nodes[1]
	if s.Keys() != 0 || s.Node.peers["n00"].floor == 0 {
		t.Fatalf("%d keys are known", s.Keys())
	}
	for _, e := range old {
		again := *e
		again.at, again.data = f.now, append([]byte(nil), e.data...)
		f.post(&again)
	}
	f.pass(f.now + ms)
	if r := s.rows["k"]; r != nil && r.sum.Got > 0 {
		t.Errorf("%d micro-tokens came from packets that had come before", r.sum.Got)
	}
}

// A lease ends on the instant, not when somebody looks after it.
func TestLeaseEndsOnTheInstant(t *testing.T) {
	for late, want := range map[time.Duration]bool{-1: true, 0: false} {
		f := newFleet(t, 2, Limit{Rate: 1000, Burst: 500}, 1)
		f.pass(3 * time.Second)
		s := f.nodes[1]
		s.demand(f.key(s), 400*micro)
		f.settleNode(1)
		f.pass(f.now + 200*ms)
		r := f.key(s)
		if r.held < 100*micro {
			t.Fatalf("%d held", r.held)
		}
		s.expire(r) // it was looked at while the lease was on
		s.advance(s.Node.peers["n00"].lease + lease + late)
		r.mint(s.Node.now, s.mintAt)
		if got := s.take(r, r.level+micro); got != want {
			t.Errorf("%v after its end a loan was spent: %v, want %v", late, got, want)
		}
	}
}
