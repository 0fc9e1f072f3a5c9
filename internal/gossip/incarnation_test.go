// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func TestRefusals(t *testing.T) {
	a, b := met(t)
	a.led.mark = 1
	good := one(t, a.wake(20*ms))
	mutate := func(f func(h *header)) []byte {
		h, body := parse(t, good)
		from := string(h.from)
		f(&h)
		return append(h.append(nil, from), body...)
	}
	before := b.Stats(20 * ms)
	for _, c := range []struct {
		reason Reason
		packet []byte
	}{
		{Malformed, nil},
		{Malformed, []byte("GET / HTTP/1.1\r\n")},
		{Malformed, good[:len(good)-1]},
		{Malformed, good[:20]},
		{Malformed, mutate(func(h *header) { h.ack = 1000; h.bits = 1 })},
		{Malformed, mutate(func(h *header) { h.echo = 10 * time.Second })},
		{Malformed, mutate(func(h *header) { h.bits &^= 1 })},
		{Malformed, mutate(func(h *header) { h.fromInc = 0 })},
		{Malformed, mutate(func(h *header) { h.flags = 0x80 })},
		{Malformed, mutate(func(h *header) { h.seq = 0 })},
		{Version, append([]byte{magic + 1}, good[1:]...)},
		{Cluster, mutate(func(h *header) { h.cluster++ })},
	} {
		was := b.refused(c.reason)
		if got := b.take(20*ms, a, c.packet); len(got) != 0 {
			t.Errorf("%v: answered", c.reason)
		}
		if b.refused(c.reason) != was+1 {
			t.Errorf("%x is not counted as %v: %v", c.packet, c.reason, b.Stats(20*ms).Refused)
		}
	}
	if b.led.got[1] {
		t.Error("something was merged")
	}
	after := b.Stats(20 * ms)
	if after.Refused[Accepted] != before.Refused[Accepted] || after.Fresh != 1 {
		t.Errorf("accepted %d, fresh %d", after.Refused[Accepted], after.Fresh)
	}
	b.take(21*ms, a, good)
	b.take(22*ms, a, good)
	if b.refused(Duplicate) != 1 || len(b.led.from) != 1 {
		t.Errorf("duplicates %d, merged %d times", b.refused(Duplicate), len(b.led.from))
	}
	b.take(23*ms, a, mutate(func(h *header) { h.seq += 100 }))
	b.take(24*ms, a, mutate(func(h *header) { h.seq += 36 }))
	if b.refused(Stale) != 1 {
		t.Errorf("stale %d, want 1", b.refused(Stale))
	}
	if b.take(25*ms, a, mutate(func(h *header) { h.seq += 37 })); b.refused(Stale) != 1 {
		t.Error("a packet at the window's end is stale")
	}
}

func TestLaterIncarnationReplacesEarlier(t *testing.T) {
	a, b := met(t)
	a.led.mark = 1
	late := one(t, a.wake(20*ms))
	b.led.mark = 3

	again := newEnd(t, "a", 2, 1)
	toAgain := one(t, b.take(30*ms, again, one(t, again.join(1*ms, b))))
	if want := (crdt.Replica{Name: "a", Incarnation: 1}); !slices.Equal(b.led.gone, []crdt.Replica{want}) {
		t.Errorf("gone: %v, want %v", b.led.gone, want)
	}
	again.take(2*ms, b, toAgain)
	if !again.led.got[3] {
		t.Error("the new incarnation did not get all from the start")
	}
	told := one(t, b.take(31*ms, a, late))
	if b.led.got[1] || b.refused(Superseded) != 1 {
		t.Error("the earlier incarnation's packet was taken in")
	}
	if got := b.take(32*ms, a, late); len(got) != 0 {
		t.Error("told twice within 10ms")
	}
	a.take(40*ms, b, told)
	if a.over == nil || a.over.By.Incarnation != 2 || a.over.By.Name != "a" {
		t.Errorf("displaced: %+v", a.over)
	}
	a.led.mark = 9
	if got := a.wake(time.Second); len(got) != 0 || a.Wake() != Never {
		t.Error("a displaced session goes on")
	}
	if len(again.led.gone) != 0 || again.take(41*ms, b, told) != nil || again.over != nil {
		t.Error("the later incarnation took the refusal for its own")
	}
}

func TestOwnNameAtWork(t *testing.T) {
	one1, two := newEnd(t, "a", 1, 1), newEnd(t, "a", 2, 2)
	told := one(t, two.take(5*ms, one1, one(t, one1.join(1*ms, two))))
	one1.take(6*ms, two, told)
	if one1.over == nil || one1.over.By.Incarnation != 2 {
		t.Errorf("the earlier incarnation was not told: %+v", one1.over)
	}
	three := newEnd(t, "a", 3, 3)
	asked := one(t, two.take(20*ms, three, one(t, three.join(1*ms, two))))
	if two.over != nil {
		t.Error("a packet ends the earlier incarnation without proof")
	}
	two.take(21*ms, three, one(t, three.take(2*ms, two, asked)))
	if two.over == nil || two.over.By.Incarnation != 3 {
		t.Errorf("the earlier incarnation did not see it: %+v", two.over)
	}
}

// A packet of ours that somebody sends back neither fills the book nor hides who is
// known at an address.
func TestOwnPacketSentBack(t *testing.T) {
	a, b, stranger := newEnd(t, "a", 1, 1), newEnd(t, "b", 1, 2), newEnd(t, "x", 1, 3)
	hello := one(t, a.join(1*ms, b))
	a.take(2*ms, b, one(t, b.take(2*ms, a, hello)))
	known := len(a.book.byAddr)
	a.take(3*ms, stranger, hello)
	a.take(3*ms, b, hello)
	if len(a.book.byAddr) != known {
		t.Errorf("%d addresses, %d before", len(a.book.byAddr), known)
	}
	for addr, at := range a.book.byAddr {
		if at.own {
			t.Errorf("%v is taken for its own", addr)
		}
	}
}

func TestOwnAddressIsNotAsked(t *testing.T) {
	a := newEnd(t, "a", 1, 1)
	hello := one(t, a.join(1*ms, a))
	if got := a.take(2*ms, a, hello); len(got) != 0 {
		t.Error("it answers itself")
	}
	if a.refused(Self) != 1 {
		t.Error("not counted")
	}
	for now := 2 * ms; now < 10*time.Second; now += 100 * ms {
		if len(a.wake(now)) != 0 {
			t.Fatal("it goes on asking itself")
		}
	}
	if len(a.Peers(0, nil)) != 0 {
		t.Error("it is its own peer")
	}
}

// A peer that was not told of a restart writes to the old incarnation. The new one
// takes nothing in, and answers so that the peer learns of it, whatever its own
// clock reads.
func TestPacketToOlderIncarnation(t *testing.T) {
	a, b := newEnd(t, "a", 1, 1), newEnd(t, "b", 1, 2)
	a.Step(time.Hour, Event{}, nil)
	b.take(2*ms, a, one(t, a.join(time.Hour, b)))
	toA := one(t, b.wake(52*ms))
	a.take(time.Hour+ms, b, toA)
	b.led.mark = 1
	toA = one(t, b.wake(60*ms))

	again := newEnd(t, "a", 2, 1)
	again.Step(1*ms, Event{}, nil)
	answer := one(t, again.take(2*ms, b, toA))
	if again.refused(OtherIncarnation) != 1 || again.led.got[1] {
		t.Error("it took in what was for its predecessor")
	}
	if h, _ := parse(t, answer); h.toInc != 1 || h.toName != b.selfName || h.ack != 0 {
		t.Errorf("answer %+v", h)
	}
	toA = one(t, b.take(70*ms, again, answer))
	again.take(5*ms, b, toA)
	if !again.led.got[1] {
		t.Error("the new incarnation did not get the change")
	}

	elsewhere := newEnd(t, "z", 1, 1)
	if elsewhere.take(2*ms, b, toA); elsewhere.refused(OtherName) != 1 || elsewhere.led.got[1] {
		t.Error("a process at an inherited address took it in")
	}
}

// written is the last packet to an end.
func written(actions []Action, to *end) (packet []byte) {
	for _, s := range actions {
		if s.Addr == to.addr {
			packet = s.Packet
		}
	}
	return packet
}

// A packet that was meant for another, or for anybody, and is passed on by a third,
// does not move its sender while he hears us where he is.
func TestRelayedPacketMovesNobody(t *testing.T) {
	a, b := met(t)
	c, relay := newEnd(t, "c", 1, 3), newEnd(t, "relay", 1, 4)
	at := func() netip.AddrPort { return a.Peers(20*ms, nil)[0].Addr }

	hello := written(b.join(12*ms, c), c)
	answer := written(c.take(14*ms, b, hello), b)
	b.take(15*ms, c, answer)
	toC := written(b.wake(b.Wake()), c)
	a.take(16*ms, relay, hello)
	a.take(17*ms, relay, toC)
	if at() != b.addr {
		t.Errorf("b is at %v for a packet to c", at())
	}
	b.led.mark = 1
	toA := written(b.wake(b.Wake()), a)
	if a.take(18*ms, relay, toA); at() != relay.addr {
		t.Errorf("b is at %v, and writes to us from %v", at(), relay.addr)
	}

	// He who hears nothing more where he was may be elsewhere.
	hello = written(b.join(10*time.Second, c), c)
	if a.take(10*time.Second, b, hello); at() != b.addr {
		t.Errorf("b is at %v, and introduces himself from %v", at(), b.addr)
	}
}

// An incarnation that a peer gave up to make room ends when it is told; a later one of its name
// is let in.
func TestGivenUp(t *testing.T) {
	a, b := met(t)
	a.led.mark = 1
	packet := one(t, a.wake(20*ms))
	b.retire(21*ms, b.byName["a"])
	if len(b.led.gone) != 1 || len(b.Peers(0, nil)) != 0 {
		t.Errorf("gone %v, peers %v", b.led.gone, b.Peers(0, nil))
	}
	told := one(t, b.take(22*ms, a, packet))
	a.take(23*ms, b, told)
	if a.over == nil || a.over.By != a.cfg.Self {
		t.Errorf("the incarnation goes on: %+v", a.over)
	}
	again := newEnd(t, "a", 2, 1)
	b.take(30*ms, again, one(t, again.join(1*ms, b)))
	if got := b.Peers(30*ms, nil); len(got) != 1 || got[0].Incarnation != 2 {
		t.Errorf("a later incarnation of the name is not let in: %v", got)
	}
}

func TestForgedRefusalIsIgnored(t *testing.T) {
	a, b := met(t)
	for _, inc := range []uint64{0, 1} {
		h := header{flags: flagRefusal, cluster: a.cluster, fromInc: 1, toInc: 1, toName: a.selfName, seq: 1}
		body := binary.LittleEndian.AppendUint64(nil, inc)
		if inc == 1 {
			h.toInc = 5
		}
		a.take(20*ms, b, append(h.append(nil, "b"), body...))
		if a.over != nil {
			t.Fatalf("ended by a refusal of incarnation %d by %d", h.toInc, inc)
		}
	}
	if a.refused(Refusal) != 2 {
		t.Errorf("%d counted", a.refused(Refusal))
	}
}
