// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func TestIncarnations(t *testing.T) {
	at := time.Unix(1.8e9, 0)
	a := NewIncarnation(at, math.MaxUint64)
	if b := NewIncarnation(at.Add(time.Millisecond), 0); b <= a {
		t.Errorf("%d a millisecond after %d", b, a)
	}
	if NewIncarnation(at, 1) == NewIncarnation(at, 2) {
		t.Error("two that start at once are one")
	}
	for _, wall := range []time.Time{{}, time.Unix(math.MinInt32, 0), time.Unix(1<<40, 0)} {
		if i := NewIncarnation(wall, 0); i == 0 || i >= 1<<63 {
			t.Errorf("%v: %d", wall, i)
		}
	}
	if a <= uint64(at.UnixNano()) {
		t.Error("below what earlier versions took")
	}
}

// forge is the header of a packet that somebody makes up.
func forge(h header, from string) []byte {
	h.cluster = hash32("c")
	return h.append(nil, from)
}

// One packet of the own name with a higher incarnation ends nothing, nor does a refusal
// that does not name this incarnation; it is asked for proof, with little.
func TestForgedPacketEndsNothing(t *testing.T) {
	for _, inc := range []uint64{2, 1 << 62, math.MaxUint64} {
		a, b := met(t)
		stranger := newEnd(t, "x", 1, 9)
		packet := forge(header{fromInc: inc, sent: 1}, "a")
		asked := one(t, a.take(30*ms, stranger, packet))
		if a.over != nil || len(asked) > 2*len(packet) {
			t.Fatalf("incarnation %d: out %+v, %d bytes are answered with %d", inc, a.over, len(packet), len(asked))
		}
		if got := a.take(31*ms, stranger, packet); len(got) != 0 {
			t.Errorf("asked twice within 10ms")
		}
		blind := append(forge(header{flags: flagRefusal, fromInc: inc, toInc: 99, toName: hash32("a"), seq: 1}, "a"), 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF)
		if a.take(50*ms, stranger, blind); a.over != nil {
			t.Fatalf("incarnation %d: out by a refusal to another", inc)
		}
		a.led.mark++
		if got := b.take(61*ms, a, one(t, a.wake(60*ms))); got == nil && !b.led.got[1] {
			t.Error("a goes on no more")
		}
	}
}

// One that runs proves it.
func TestTwinProvesItself(t *testing.T) {
	a, twin := newEnd(t, "a", 1, 1), newEnd(t, "a", 2, 2)
	hello := one(t, twin.join(ms, a))
	asked := one(t, a.take(2*ms, twin, hello))
	proof := one(t, twin.take(3*ms, a, asked))
	if a.take(4*ms, twin, proof); a.over == nil || a.over.By.Incarnation != 2 || twin.over != nil {
		t.Errorf("out: %+v, %+v", a.over, twin.over)
	}
}

// rejoiner is a ledger that goes on under a higher incarnation.
type rejoiner struct {
	*ledger

	now []crdt.Replica
}

func (r *rejoiner) Rejoin(_ time.Duration, self crdt.Replica) { r.now = append(r.now, self) }

// A process whose earlier incarnation was higher takes the next above it, once asked
// it says everything again, and after a second it ends like any other.
func TestRejoin(t *testing.T) {
	led := &rejoiner{ledger: &ledger{mark: 3}}
	low := newEnd(t, "a", 1<<idBits, 1)
	low.sections[0].Section, low.canRejoin = led, true
	b := newEnd(t, "b", 1, 2)
	earlier := newEnd(t, "a", 9<<idBits|5, 1)
	shake(t, earlier, b)

	refusal := one(t, b.take(30*ms, low, one(t, low.join(ms, b))))
	low.take(2*ms, b, refusal)
	want := crdt.Replica{Name: "a", Incarnation: 10<<idBits | 1<<(idBits-1)}
	if low.over != nil || low.Self() != want || len(led.now) != 1 || led.now[0] != want {
		t.Fatalf("out %+v, now %v, sections %v", low.over, low.Self(), led.now)
	}
	toLow := one(t, b.take(200*ms, low, one(t, low.wake(150*ms))))
	low.take(151*ms, b, toLow)
	b.take(202*ms, low, one(t, low.wake(low.Wake())))
	if !b.led.got[3] || len(b.led.gone) != 1 || b.led.gone[0] != earlier.Self() {
		t.Errorf("b has %v, gone %v", b.led.got, b.led.gone)
	}
	// The same refusal again is not for this incarnation.
	if low.take(160*ms, b, refusal); low.over != nil || len(led.now) != 1 {
		t.Error("an old refusal counts")
	}
	// Somebody who starts later, above it: the known one ends.
	again := newEnd(t, "a", 20<<idBits, 1)
	b.take(5*time.Second, again, one(t, again.join(ms, b)))
	told := b.take(5001*ms, low, one(t, low.wake(4*time.Second)))
	low.take(4001*ms, b, one(t, told))
	if low.over == nil {
		t.Error("a known one goes above its successor")
	}
}

// There is no next one above the highest.
func TestRejoinEnds(t *testing.T) {
	low := newEnd(t, "a", 1, 1)
	low.canRejoin = true
	for above, want := range map[uint64]bool{1: true, 1 << 62: true, 1<<63 - 1: false, math.MaxUint64: false} {
		if low.rejoins(0, above) != want {
			t.Errorf("above %d", above)
		}
	}
	low.rejoined = maxRejoins
	if low.rejoins(0, 1) {
		t.Error("it rejoins for ever")
	}
}

// Nobody makes up incarnations faster than a fleet restarts, whether of one name, of
// many, or with departures in between; and later there is room again.
func TestForgedIncarnations(t *testing.T) {
	for name, names := range map[string]int{"one name": 1, "many names": 1 << 20} {
		a := newEndWith(t, Config{Cluster: "c", Self: crdt.Replica{Name: "a", Incarnation: 1}, MaxPeers: 50}, 1)
		x := newEnd(t, "x", 1, 9)
		for i := range 5000 {
			from := fmt.Sprint("x", i%names)
			now := time.Duration(i) * ms
			a.take(now, x, forge(header{fromInc: uint64(i + 1), sent: time.Duration(i + 1)}, from))
			a.take(now, x, forge(header{flags: flagLeave, fromInc: uint64(i + 1), toInc: 1, toName: hash32("a"), seq: 1}, from))
		}
		if n := len(a.led.gone); n > 2*50+5 || n < 50 || a.refused(Full) == 0 {
			t.Errorf("%s: %d are gone", name, n)
		}
		b := newEnd(t, "b", 1, 2)
		if got := b.take(2*time.Minute, a, one(t, a.take(2*time.Minute, b, one(t, b.join(ms, a))))); got == nil {
			t.Errorf("%s: no room later", name)
		}
	}
}

func TestApart(t *testing.T) {
	for _, c := range []struct {
		a, b int64
		want time.Duration
	}{
		{5, 3, 2}, {3, 5, -2}, {math.MaxInt64, math.MinInt64, maxOffset}, {math.MinInt64, math.MaxInt64, -maxOffset},
		{int64(time.Hour), 0, time.Hour}, {int64(25 * time.Hour), 0, maxOffset},
	} {
		if got := apart(c.a, c.b); got != c.want {
			t.Errorf("%d, %d: %v", c.a, c.b, got)
		}
	}
}
