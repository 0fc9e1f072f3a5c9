// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"testing"
	"time"
)

// The peer's wall clock is 70 ms ahead, and it keeps the stamp for 5 and 7 ms.
func TestOffset(t *testing.T) {
	a, b := newEnd(t, "a", 1, 1), newEnd(t, "b", 1, 2)
	const epoch = 1_800_000_000_000_000_000
	step := func(e *end, now time.Duration, ahead time.Duration, ev Event) []Action {
		ev.Wall = epoch + int64(now+ahead)
		return e.sends(e.Step(now, ev, nil))
	}
	hello := one(t, step(a, 1*ms, 0, Event{Kind: Join, Addr: b.addr}))
	toA := one(t, step(b, 2*ms, 70*ms, Event{Kind: Packet, Addr: a.addr, Packet: hello}))
	toB := one(t, step(a, 3*ms, 0, Event{Kind: Packet, Addr: b.addr, Packet: toA}))
	_ = step(b, 4*ms, 70*ms, Event{Kind: Packet, Addr: a.addr, Packet: toB})
	a.peers[0].rtt = rttFilter{} // the next sample alone is to be judged
	b.led.mark = 1
	toA = one(t, step(b, 9*ms, 70*ms, Event{Kind: Wake}))
	if h, _ := parse(t, toA); h.flags&flagWall != 0 {
		t.Error("a second wall stamp within 250ms")
	}
	step(a, 10*ms, 0, Event{Kind: Packet, Addr: b.addr, Packet: toA})
	if p := a.Peers(10*ms, nil)[0]; p.HasOffset || p.RTT != 2*ms {
		t.Errorf("without a wall stamp: rtt %v, offset %v (%v)", p.RTT, p.Offset, p.HasOffset)
	}
	b.peers[0].wallAt = 0
	toA = one(t, step(b, 11*ms, 70*ms, Event{Kind: Wake}))
	step(a, 12*ms, 0, Event{Kind: Packet, Addr: b.addr, Packet: toA})
	p := a.Peers(12*ms, nil)[0]
	if !p.HasOffset || p.RTT != 2*ms || p.Offset != 70*ms {
		t.Errorf("rtt %v, offset %v (%v)", p.RTT, p.Offset, p.HasOffset)
	}
}

func TestRTTFilterForgets(t *testing.T) {
	var f rttFilter
	at := func(now time.Duration, rtt time.Duration) time.Duration {
		f.add(now, rttSample{ok: true, rtt: rtt})
		return f.best().rtt
	}
	for _, c := range []struct{ now, rtt, want time.Duration }{
		{1 * time.Second, 5 * ms, 5 * ms},
		{2 * time.Second, 9 * ms, 5 * ms},
		{4500 * ms, 7 * ms, 5 * ms},
		{8600 * ms, 8 * ms, 7 * ms},
		{30 * time.Second, 20 * ms, 20 * ms},
	} {
		if got := at(c.now, c.rtt); got != c.want {
			t.Errorf("after %v at %v: %v, want %v", c.rtt, c.now, got, c.want)
		}
	}
}

func TestClockThatGoesBack(t *testing.T) {
	a, _ := met(t)
	a.led.mark = 1
	one(t, a.wake(20*ms))
	if got := a.wake(5 * ms); len(got) != 0 {
		t.Error("sent at a time before the last")
	}
	h, _ := parse(t, one(t, a.wake(22*ms)))
	if h.sent != 22*ms {
		t.Errorf("sent %v", h.sent)
	}
}
