// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// saw returns how many nodes saw an incarnation go, once each.
func (f *fleet) saw(t *testing.T, incarnation crdt.Replica) (n int) {
	t.Helper()
	for node := range f.Len() {
		m := f.member(node)
		if m == nil || m.board.self == incarnation {
			continue
		}
		switch c := len(slices.DeleteFunc(slices.Clone(m.board.gone), func(r crdt.Replica) bool { return r != incarnation })); c {
		case 0:
		case 1:
			n++
		default:
			t.Errorf("node %d was told %d times that %v is gone", node, c, incarnation)
		}
	}
	return n
}

// All who are heard know at once, whatever is lost, and the leaving session says
// so; then it is quiet, and its name can come back.
func TestLeave(t *testing.T) {
	t.Parallel()
	for _, loss := range []float64{0, 0.35} {
		f := newFleet(t, 3, lossy(lan, loss))
		f.start(9)
		f.meet(t)
		f.leave(4)
		m := f.member(4)
		incarnation := m.board.self
		limit := 30 * ms
		if loss > 0 {
			limit = 500 * ms
		}
		begin := f.Now()
		if !f.RunUntil(begin+limit, func() bool { return m.over != nil }) {
			t.Fatalf("loss %v: not over after %v, %d know", loss, limit, f.saw(t, incarnation))
		}
		if m.over.Kind != gossip.Left {
			t.Errorf("loss %v: over with %v", loss, m.over.Kind)
		}
		if n := f.saw(t, incarnation); n != 8 {
			t.Errorf("loss %v: %d of 8 know", loss, n)
		}
		if m.Wake() != gossip.Never {
			t.Errorf("loss %v: it still wakes", loss)
		}
		f.Run(f.Now() + 20*time.Second) // nobody brings the old incarnation back
		if f.fresh(0) != 7 {
			t.Errorf("loss %v: node 0 hears %d", loss, f.fresh(0))
		}
		f.Crash(4)
		f.Restart(4)
		f.Run(f.Now() + 10*time.Second)
		if f.fresh(0) != 8 || f.fresh(4) != 8 {
			t.Errorf("loss %v: after its return node 0 hears %d, node 4 hears %d", loss, f.fresh(0), f.fresh(4))
		}
		if n := f.saw(t, incarnation); n != 8 {
			t.Errorf("loss %v: %d of 8 know at the end", loss, n)
		}
		f.sound(t)
	}
}

// Who cannot be reached by the one who leaves learns of it from the others.
func TestLeaveIsPassedOn(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 4, lan)
	f.start(5)
	f.meet(t)
	f.Cut(4, 0)
	f.Run(f.Now() + 1500*ms) // 0 is silent for 4 by now: not waited for
	f.Cut(0, 4)
	f.Run(f.Now() + 1500*ms)
	incarnation := f.member(4).board.self
	f.leave(4)
	m := f.member(4)
	if !f.RunUntil(f.Now()+50*ms, func() bool { return m.over != nil }) {
		t.Fatal("it waits for one that it does not hear")
	}
	if !f.RunUntil(f.Now()+3*time.Second, func() bool { return f.saw(t, incarnation) == 4 }) {
		t.Errorf("%d of 4 know after 3s", f.saw(t, incarnation))
	}
	f.Run(f.Now() + 2*time.Minute) // and it ends: nobody says so for ever
	if f.saw(t, incarnation) != 4 {
		t.Errorf("%d of 4 know", f.saw(t, incarnation))
	}
}

// A session that nobody hears is over at once, and one whose peers fall silent
// while it leaves waits no longer than for their silence.
func TestLeaveAlone(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 5, lan)
	f.start(2)
	f.meet(t)
	f.Crash(1)
	f.leave(0)
	m := f.member(0)
	if f.RunUntil(f.Now()+800*ms, func() bool { return m.over != nil }) {
		t.Error("it did not wait for one who was just heard")
	}
	if !f.RunUntil(f.Now()+500*ms, func() bool { return m.over != nil }) {
		t.Error("it waits for one who is silent")
	}

	f = newFleet(t, 6, lan)
	f.start(1)
	f.Run(100 * ms)
	f.leave(0)
	if m := f.member(0); m.over == nil || m.over.Kind != gossip.Left {
		t.Errorf("alone: %v", m.over)
	}
}

// All leave at once: nobody waits for one who has gone.
func TestAllLeaveAtOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 7, lossy(lan, 0.1))
	f.start(6)
	f.meet(t)
	for node := range 6 {
		f.leave(node)
	}
	over := func() bool {
		for node := range 6 {
			if f.member(node).over == nil {
				return false
			}
		}
		return true
	}
	if !f.RunUntil(f.Now()+1500*ms, over) {
		t.Error("not all are over")
	}
}

// Nobody goes on looking for one who left, or a fleet whose processes come and go
// would say hello to all addresses that it ever had.
func TestWhoLeftIsNotLookedFor(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 8, lan)
	f.start(3)
	f.meet(t)
	f.leave(2)
	f.Run(f.Now() + 5*time.Second)
	now, _ := f.Clock(1)
	before := f.member(1).Stats(now).Hellos
	f.Run(f.Now() + 30*time.Second)
	now, _ = f.Clock(1)
	if n := f.member(1).Stats(now).Hellos - before; n != 0 {
		t.Errorf("%d hellos", n)
	}
}
