// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

const ms = time.Millisecond

// ledger is a section of numbered entries, eight bytes each. Its mark is the
// number of the latest; it keeps what it is told.
type ledger struct {
	mark   uint64
	large  bool // ignore the room
	silent bool // append nothing, though there are changes
	fail   error
	got    map[uint64]bool
	from   []crdt.Contact
	gone   []crdt.Replica
	sinces []uint64
	rooms  []int
}

func (l *ledger) Mark(crdt.Replica) uint64 { return l.mark }

func (l *ledger) Delta(_ time.Duration, b []byte, _ crdt.Replica, since uint64, room int) ([]byte, uint64) {
	l.sinces = append(l.sinces, since)
	l.rooms = append(l.rooms, room)
	if l.large {
		return append(b, make([]byte, room+1)...), l.mark
	}
	if l.silent {
		return b, l.mark
	}
	upto := since
	for upto < l.mark && room >= 8 {
		upto++
		room -= 8
		b = binary.LittleEndian.AppendUint64(b, upto)
	}
	return b, upto
}

func (l *ledger) Merge(c crdt.Contact, b []byte) error {
	if l.fail != nil {
		return l.fail
	}
	if l.got == nil {
		l.got = map[uint64]bool{}
	}
	l.from = append(l.from, c)
	for ; len(b) >= 8; b = b[8:] {
		l.got[binary.LittleEndian.Uint64(b)] = true
	}
	return nil
}

func (l *ledger) Gone(_ time.Duration, p crdt.Replica) { l.gone = append(l.gone, p) }

// end is one process of a pair that a test moves packets between by hand.
type end struct {
	*Session
	t    *testing.T
	addr netip.AddrPort
	led  *ledger
	over *Action
}

func newEnd(t *testing.T, name string, inc uint64, port uint16, opts ...Option) *end {
	return newEndWith(t, Config{Cluster: "c", Self: crdt.Replica{Name: name, Incarnation: inc}}, port, opts...)
}

func newEndWith(t *testing.T, cfg Config, port uint16, opts ...Option) *end {
	t.Helper()
	e := &end{t: t, led: &ledger{}, addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)}
	s, err := New(cfg, append([]Option{WithSection("led", e.led), WithRand(func() float64 { return 0.5 })}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	e.Session = s
	return e
}

// sends turns actions into copies of what is sent.
func (e *end) sends(actions []Action) (out []Action) {
	for _, a := range actions {
		if a.Kind == Displaced {
			e.over = &a
			continue
		}
		a.Packet = bytes.Clone(a.Packet)
		out = append(out, a)
	}
	return out
}

func (e *end) wake(now time.Duration) []Action {
	return e.sends(e.Step(now, Event{Kind: Wake}, nil))
}

func (e *end) join(now time.Duration, to *end) []Action {
	return e.sends(e.Step(now, Event{Kind: Join, Addr: to.addr}, nil))
}

func (e *end) take(now time.Duration, from *end, packet []byte) []Action {
	return e.sends(e.Step(now, Event{Kind: Packet, Addr: from.addr, Packet: packet}, nil))
}

func (e *end) refused(r Reason) uint64 { return e.Stats(e.Session.now).Refused[r] }

// one fails unless there is exactly one packet.
func one(t *testing.T, actions []Action) []byte {
	t.Helper()
	if len(actions) != 1 {
		t.Fatalf("%d packets, want 1", len(actions))
	}
	return actions[0].Packet
}

func parse(t *testing.T, packet []byte) (h header, body []byte) {
	t.Helper()
	body, err := h.parse(packet)
	if err != nil {
		t.Fatal(err)
	}
	return h, body
}

// met returns two processes that have heard each other, at 10 ms.
func met(t *testing.T) (a, b *end) {
	t.Helper()
	a, b = newEnd(t, "a", 1, 1), newEnd(t, "b", 1, 2)
	shake(t, a, b)
	return a, b
}

func shake(t *testing.T, a, b *end) {
	t.Helper()
	hello := one(t, a.join(1*ms, b))
	toA := one(t, b.take(2*ms, a, hello))
	toB := a.take(3*ms, b, toA)
	if len(toB) == 0 {
		toB = a.wake(a.Wake())
	}
	b.take(10*ms, a, one(t, toB))
	if pa, pb := a.Peers(10*ms, nil), b.Peers(10*ms, nil); len(pa) != 1 || len(pb) != 1 || !pb[0].HearsUs {
		t.Fatalf("they did not meet: %+v %+v", pa, pb)
	}
	// The tries that were planned before find nobody to look for.
	a.book.next, b.book.next = Never, Never
	a.plan()
	b.plan()
}

func TestHelloCarriesNoSection(t *testing.T) {
	a, b := newEnd(t, "a", 7, 1), newEnd(t, "b", 9, 2)
	a.led.mark = 3
	h, body := parse(t, one(t, a.join(5*ms, b)))
	if h.toInc != 0 || h.seq != 0 || string(h.from) != "a" || h.fromInc != 7 || h.sent != 5*ms {
		t.Errorf("header %+v", h)
	}
	id, _, rest, err := nextBlock(body)
	if err != nil || id != blockIntro || len(rest) != 0 {
		t.Errorf("the body is not an introduction alone")
	}
	if len(a.led.sinces) != 0 {
		t.Error("a section was asked for a stranger")
	}
}

func TestChangeIsSentUntilAcknowledged(t *testing.T) {
	a, b := met(t)
	a.led.mark = 1
	first := one(t, a.wake(20*ms))
	if got := a.wake(21 * ms); len(got) != 0 {
		t.Error("sent again below the floor")
	}
	if got := a.Wake(); got != 22*ms {
		t.Errorf("wakes at %v, want 22ms", got)
	}
	again := one(t, a.wake(22*ms))
	if st := a.Stats(22 * ms); st.Resent != 1 || st.Unacked != 1 || st.UnackedAge != 2*ms {
		t.Errorf("resent %d, unacked %d for %v", st.Resent, st.Unacked, st.UnackedAge)
	}
	ack := one(t, b.take(23*ms, a, again))
	if !b.led.got[1] {
		t.Error("not merged")
	}
	if h, _ := parse(t, ack); h.flags&flagElicits != 0 {
		t.Error("an acknowledgement asks to be acknowledged")
	}
	if got := a.take(24*ms, b, ack); len(got) != 0 {
		t.Error("an acknowledgement was answered")
	}
	if st := a.Stats(24 * ms); st.Unacked != 0 || st.Delay.Count != 1 || st.Delay.Max != 4*ms || st.UnackedAge != 0 {
		t.Errorf("unacked %d, delay %+v, age %v", st.Unacked, st.Delay, st.UnackedAge)
	}
	if got := a.Wake(); got != 72*ms {
		t.Errorf("wakes at %v, want the keep-alive at 72ms", got)
	}
	if got := b.take(25*ms, a, first); len(got) != 1 && b.Wake() > 27*ms {
		t.Error("the overtaken packet was neither answered nor is to be")
	}
	if p := a.Peers(24*ms, nil)[0]; p.Delay != 4*ms || p.DelayMax != 4*ms || p.RTT != 2*ms {
		t.Errorf("delay %v, max %v, rtt %v", p.Delay, p.DelayMax, p.RTT)
	}
}

func TestKeepAliveWhenIdle(t *testing.T) {
	a, b := met(t)
	_ = b
	last := a.peers[0].sentAt
	if got := a.Wake(); got != last+50*ms {
		t.Fatalf("wakes at %v, want %v", got, last+50*ms)
	}
	if got := a.wake(last + 50*ms - 1); len(got) != 0 {
		t.Error("a keep-alive left early")
	}
	h, _ := parse(t, one(t, a.wake(last+50*ms)))
	if h.flags&flagElicits != 0 {
		t.Error("a keep-alive asks to be acknowledged")
	}
	if n := len(a.led.sinces); n != 2 {
		t.Errorf("Delta was called %d times, want at the answer and the keep-alive", n)
	}
}

// A packet makes complete what it carries and no more, also when an earlier one
// carried more.
func TestAckGivesThePacketsOwnMark(t *testing.T) {
	a, b := met(t)
	a.led.mark = 400
	first := one(t, a.wake(20*ms))
	n := uint64(len(b.led.got))
	ack := one(t, b.take(21*ms, a, first))
	n = uint64(len(b.led.got)) - n
	if n < 100 || n > 170 {
		t.Fatalf("%d entries in one packet", n)
	}
	a.take(22*ms, b, ack)
	if got := a.peers[0].acked[0]; got != n {
		t.Errorf("acknowledged %d, want %d", got, n)
	}
	if len(first) > MaxPacket || len(first) < MaxPacket-8 {
		t.Errorf("a full packet has %d bytes", len(first))
	}
}

func TestAckBitmap(t *testing.T) {
	a, b := met(t)
	var sent [][]byte
	for i := range 5 {
		a.led.mark++
		sent = append(sent, one(t, a.wake(20*ms+time.Duration(i)*2*ms)))
	}
	// Only the middle one and the last but one arrive, in the wrong order, and
	// only the later acknowledgement is lost.
	one(t, b.take(40*ms, a, sent[3]))
	b.take(41*ms, a, sent[1])
	ack := one(t, b.wake(42*ms))
	h, _ := parse(t, ack)
	seq := a.peers[0].seq
	if h.ack != seq-1 || h.bits&0b1111 != 0b0101 {
		t.Errorf("ack %d of %d, bits %b", h.ack, seq, h.bits)
	}
	a.take(43*ms, b, ack)
	if got := a.peers[0].acked[0]; got != 4 {
		t.Errorf("acknowledged %d, want 4", got)
	}
}

// The reordered acknowledgement of an earlier packet counts too.
func TestOvertakenAck(t *testing.T) {
	p := &peer{}
	p.reset(0, crdt.Replica{Name: "b", Incarnation: 1}, 1)
	secs := []section{{name: "x", id: sectionID("x")}}
	for seq := uint64(1); seq <= 70; seq++ {
		p.seq = seq
		p.ring[seq%window] = seq
		p.upto[seq%window] = seq * 10
	}
	p.acks(&header{ack: 60, bits: 1}, secs)
	if p.acked[0] != 600 {
		t.Fatalf("acknowledged %d, want 600", p.acked[0])
	}
	p.upto[58%window] = 610
	p.acks(&header{ack: 59, bits: 0b11}, secs) // 59 and 58, overtaken
	if p.acked[0] != 610 {
		t.Errorf("acknowledged %d, want 610", p.acked[0])
	}
	p.acks(&header{ack: 5, bits: 1}, secs) // packet 5 is out of the ring: 69 stands in its place
	if p.acked[0] != 610 {
		t.Errorf("acknowledged %d by a packet that the ring forgot", p.acked[0])
	}
	p.acks(&header{ack: 60, bits: 1}, secs)
	if p.acked[0] != 610 {
		t.Errorf("acknowledged %d by a repetition", p.acked[0])
	}
}

func TestSectionThatRefusesIsNotAcknowledged(t *testing.T) {
	other := [2]*ledger{{}, {}}
	a := newEnd(t, "a", 1, 1, WithSection("other", other[0]))
	b := newEnd(t, "b", 1, 2, WithSection("other", other[1]))
	shake(t, a, b)
	b.led.fail = errors.New("ledger is closed")
	a.led.mark, other[0].mark = 1, 1
	ack := one(t, b.take(21*ms, a, one(t, a.wake(20*ms))))
	a.take(22*ms, b, ack)
	p := a.peers[0]
	if p.acked[0] != 0 || p.acked[1] != 1 {
		t.Errorf("acknowledged %v, want [0 1]", p.acked)
	}
	if st := b.Stats(22 * ms); st.Sections[0].Refused != 1 || st.Sections[0].LastError != b.led.fail || st.Sections[1].Merged != 1 {
		t.Errorf("counts %+v", st.Sections)
	}
	if got := a.Wake(); got != 70*ms {
		t.Errorf("wakes at %v: what is refused should go with keep-alives", got)
	}
	b.led.fail = nil
	keep := one(t, a.wake(70*ms))
	ack = one(t, b.take(71*ms, a, keep))
	a.take(72*ms, b, ack)
	if p.acked[0] != 1 || p.refused[0] || !b.led.got[1] {
		t.Errorf("acknowledged %v after the section took it in, refused %v", p.acked, p.refused)
	}
}

func TestPeerWithoutTheSectionAcknowledges(t *testing.T) {
	extra := &ledger{}
	a := newEnd(t, "a", 1, 1, WithSection("extra", extra))
	b := newEnd(t, "b", 1, 2)
	shake(t, a, b)
	extra.mark = 1
	a.take(22*ms, b, one(t, b.take(21*ms, a, one(t, a.wake(20*ms)))))
	if got := a.peers[0].acked; !slices.Equal(got, []uint64{0, 1}) {
		t.Errorf("acknowledged %v, want [0 1]", got)
	}
	if got := b.Stats(22 * ms).Unknown; got != 1 {
		t.Errorf("%d unknown sections, want 1", got)
	}
}

// Sections take turns, so that one that always fills its room starves nobody.
func TestSectionsTakeTurns(t *testing.T) {
	other := [2]*ledger{{}, {}}
	a := newEnd(t, "a", 1, 1, WithSection("other", other[0]))
	b := newEnd(t, "b", 1, 2, WithSection("other", other[1]))
	shake(t, a, b)
	a.led.mark, other[0].mark = 1e6, 1
	for i := range 2 {
		now := time.Duration(20+2*i) * ms
		b.take(now+ms, a, one(t, a.wake(now)))
	}
	if !other[1].got[1] {
		t.Error("the second section starves")
	}
}

func TestOversizeDeltaIsNotSent(t *testing.T) {
	a, b := met(t)
	a.led.mark, a.led.large = 1, true
	packet := one(t, a.wake(20*ms))
	if len(packet) > MaxPacket {
		t.Errorf("%d bytes", len(packet))
	}
	if h, body := parse(t, packet); h.flags&flagElicits != 0 || len(body) != 0 {
		t.Errorf("flags %b and %d bytes of body", h.flags, len(body))
	}
	b.take(21*ms, a, packet)
	if got := a.Stats(21 * ms).Sections[0].Oversize; got != 1 {
		t.Errorf("oversize %d, want 1", got)
	}
}

// A change that does not concern the peer has a mark and no bytes.
func TestMarkWithoutBytes(t *testing.T) {
	a, b := met(t)
	a.led.mark, a.led.silent = 5, true
	a.take(22*ms, b, one(t, b.take(21*ms, a, one(t, a.wake(20*ms)))))
	if got := a.peers[0].acked[0]; got != 5 {
		t.Errorf("acknowledged %d, want 5", got)
	}
	if len(b.led.from) != 0 {
		t.Error("nothing was merged as something")
	}
}

// A change below the floor waits for the floor, and not for the keep-alive.
func TestPokeBelowTheFloor(t *testing.T) {
	a, b := met(t)
	a.led.mark = 1
	a.take(21*ms, b, one(t, b.take(21*ms, a, one(t, a.wake(20*ms)))))
	if got := a.Wake(); got != 70*ms {
		t.Fatalf("wakes at %v, want 70ms", got)
	}
	a.led.mark = 2
	if got := a.wake(21 * ms); len(got) != 0 || a.Wake() != 22*ms {
		t.Errorf("%d packets; wakes at %v, want 22ms", len(got), a.Wake())
	}
	one(t, a.wake(22*ms))
}

// What one peer brings may be news for another, whom nobody wakes the session for.
func TestMergeWakesForOthers(t *testing.T) {
	a, b := met(t)
	c := newEnd(t, "c", 1, 3)
	c.take(12*ms, b, one(t, b.take(11*ms, c, one(t, c.join(1*ms, b)))))
	b.wake(14 * ms)
	a.led.mark = 1
	b.led.mark = 1 // as if merging had done it
	b.take(21*ms, a, one(t, a.wake(20*ms)))
	if got := b.Wake(); got > 21*ms {
		t.Fatalf("wakes at %v, want at once", got)
	}
	if got := b.wake(21 * ms); !slices.ContainsFunc(got, func(s Action) bool { return s.Addr == c.addr }) {
		t.Errorf("c was not served: %v", got)
	}
}

func TestInvalidSeedIsIgnored(t *testing.T) {
	a := newEnd(t, "a", 1, 1)
	if got := a.join(1*ms, &end{}); len(got) != 0 || len(a.book.list) != 0 {
		t.Errorf("%v was sent", got)
	}
}

// Nobody may rest for longer than the largest fleet would have it.
func TestRestIsBounded(t *testing.T) {
	a, b := met(t)
	p := b.byName["a"]
	h := header{flags: flagRests, rest: 1000 * time.Hour, sent: 30 * ms, toInc: b.cfg.Self.Incarnation, toName: b.selfName}
	b.heard(31*ms, 0, p, &h, a.addr)
	if most := time.Duration(b.cfg.MaxPeers) * b.cfg.KeepAlive; p.rest != most {
		t.Errorf("it rests for %v, want %v", p.rest, most)
	}
}

func TestContact(t *testing.T) {
	a, b := met(t)
	a.led.mark = 1
	b.take(31*ms, a, one(t, a.wake(20*ms)))
	got := b.led.from[len(b.led.from)-1]
	want := crdt.Contact{From: a.cfg.Self, Now: 31 * ms, Sent: 20 * ms, Echo: 2 * ms, Hears: 2 * ms}
	if got != want {
		t.Errorf("contact %+v, want %+v", got, want)
	}
}

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

func TestStates(t *testing.T) {
	a, b := met(t)
	_ = b
	heard := a.peers[0].heardAt
	sent := 0
	var tries []time.Duration
	a.led.mark = 1
	now := a.Wake()
	for now = max(now, heard); now < heard+60*time.Second; now = a.Wake() {
		for _, s := range a.wake(now) {
			if h, _ := parse(t, s.Packet); h.toInc == 0 {
				tries = append(tries, now)
			} else {
				sent++
			}
		}
		want := Fresh
		switch age := now - heard; {
		case age >= 10*time.Second:
			want = Lost
		case age >= time.Second:
			want = Silent
		}
		if got := a.Peers(now, nil)[0].State; got != want {
			t.Fatalf("%v after %v, want %v", got, now-heard, want)
		}
	}
	// A second of floors, nine of keep-alives.
	if sent < 480+175 || sent > 510+190 {
		t.Errorf("%d packets to a peer that is gone", sent)
	}
	if len(tries) < 14 || len(tries) > 20 {
		t.Errorf("%d tries in 50 s", len(tries))
	}
	for i := 1; i < len(tries); i++ {
		if d := tries[i] - tries[i-1]; d < time.Second || d > 5*time.Second {
			t.Errorf("a try after %v", d)
		}
	}
	if st := a.Stats(now); st.Lost != 1 || st.Fresh+st.Silent != 0 {
		t.Errorf("counts %+v", st)
	}
}

// An address is tried more rarely after an hour of silence; a seed is not.
func TestColdAddresses(t *testing.T) {
	for _, seed := range []bool{true, false} {
		a := newEnd(t, "a", 1, 1)
		addr := netip.MustParseAddrPort("10.0.0.1:1")
		if seed {
			a.Step(1*ms, Event{Kind: Join, Addr: addr}, nil)
		} else {
			a.book.learn(1*ms, addr)
			a.plan()
		}
		minute, tries := 0, 0
		for now := a.Wake(); now < 2*time.Hour; now = a.Wake() {
			n := len(a.wake(now))
			if now < time.Minute {
				minute += n
			}
			if now >= time.Hour+5*time.Second {
				tries += n
			}
		}
		// Six at 0.1, 0.3, 0.7, 1.5, 3.1 and 6.3 s, then one in 3 s.
		if minute < 22 || minute > 26 {
			t.Errorf("seed %v: %d tries in the first minute, want about 24", seed, minute)
		}
		if want := map[bool]int{true: 1198, false: 120}[seed]; tries < want-5 || tries > want+5 {
			t.Errorf("seed %v: %d tries in the second hour, want about %d", seed, tries, want)
		}
	}
}

// The budget serves those nearby first, and those who would starve before them.
func TestBurstServesNearFirst(t *testing.T) {
	c := Config{Cluster: "c", Self: crdt.Replica{Name: "me", Incarnation: 1}, Zone: "z1", Region: "r", Burst: 2}
	me := newEndWith(t, c, 1)
	places := []struct{ name, zone, region string }{
		{"far1", "z1", "other"}, {"near1", "z1", "r"}, {"mid1", "z2", "r"}, {"near2", "z1", "r"}, {"far2", "z9", "other"},
	}
	addrs := map[netip.AddrPort]string{}
	for i, p := range places {
		e := newEndWith(t, Config{Cluster: "c", Self: crdt.Replica{Name: p.name, Incarnation: 1}, Zone: p.zone, Region: p.region}, uint16(10+i))
		addrs[e.addr] = p.name
		e.take(2*ms, me, one(t, me.take(1*ms, e, one(t, e.join(1*ms, me)))))
	}
	names := func(actions []Action) (out []string) {
		for _, a := range actions {
			out = append(out, addrs[a.Addr])
		}
		return out
	}
	var order []string
	for _, p := range me.Peers(2*ms, nil) {
		order = append(order, p.Name)
	}
	if want := []string{"near1", "near2", "mid1", "far1", "far2"}; !slices.Equal(order, want) {
		t.Fatalf("order %v, want %v", order, want)
	}
	me.led.mark = 1
	var got []string
	for range 3 {
		got = append(got, names(me.wake(20*ms))...)
		if len(got) < 5 && me.Wake() > 20*ms {
			t.Error("what was left over is not due at once")
		}
	}
	if want := []string{"near1", "near2", "mid1", "far1", "far2"}; !slices.Equal(got, want) {
		t.Errorf("served %v, want %v", got, want)
	}
	// Nothing is acknowledged, so all are due at each floor; with a budget of two
	// a floor, those far away wait until they are later than a keep-alive.
	starved := map[string]time.Duration{}
	for now := 22 * ms; now < 500*ms; now += 2 * ms {
		for _, n := range names(me.wake(now)) {
			if gap := now - starved[n]; starved[n] != 0 && gap > 2*(50*ms+2*ms) {
				t.Errorf("%s waited %v", n, gap)
			}
			starved[n] = now
		}
	}
	if len(starved) != 5 {
		t.Errorf("served only %v", starved)
	}
}

func TestFullTableRefusesNewcomers(t *testing.T) {
	a := newEndWith(t, Config{Cluster: "c", Self: crdt.Replica{Name: "a", Incarnation: 1}, MaxPeers: 2}, 1)
	var others []*end
	for i := range 3 {
		others = append(others, newEnd(t, fmt.Sprintf("p%d", i), 1, uint16(10+i)))
	}
	for _, o := range others {
		a.take(2*ms, o, one(t, o.join(1*ms, a)))
	}
	if a.refused(Full) != 1 || len(a.Peers(0, nil)) != 2 {
		t.Errorf("full %d, peers %d", a.refused(Full), len(a.Peers(0, nil)))
	}
	for now := a.Wake(); now < 2*ms+10*time.Minute; now = a.Wake() {
		a.wake(now)
	}
	hello := newEnd(t, "p2", 1, 12)
	packet := one(t, hello.join(5*ms, a))
	a.take(2*ms+10*time.Minute-1, hello, packet)
	if a.refused(Full) != 2 {
		t.Error("one that was lost for less than ten minutes made room")
	}
	a.take(2*ms+10*time.Minute, hello, packet)
	if got := a.Peers(0, nil); len(got) != 2 || got[1].Name != "p2" || len(a.led.gone) != 1 {
		t.Errorf("peers %v, gone %v", got, a.led.gone)
	}
}

func TestBookForgetsTheOldest(t *testing.T) {
	a := newEndWith(t, Config{Cluster: "c", Self: crdt.Replica{Name: "a", Incarnation: 1}, MaxPeers: 1}, 1)
	b := newEnd(t, "b", 1, 2)
	shake(t, a, b) // a seed, and heard
	at := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 1)
	}
	for i := range 5 {
		a.book.learn(time.Duration(20+i)*ms, at(i))
	}
	var have []bool
	for i := range 5 {
		have = append(have, a.book.byAddr[at(i)] != nil)
	}
	if !slices.Equal(have, []bool{false, false, true, true, true}) || a.book.byAddr[b.addr] == nil || len(a.book.list) != 4 {
		t.Errorf("kept %v of %d", have, len(a.book.list))
	}
}

func TestIntroductionPassesOnWhoIsHeard(t *testing.T) {
	a, b := met(t)
	c := newEnd(t, "c", 1, 3)
	toC := one(t, b.take(20*ms, c, one(t, c.join(1*ms, b))))
	got := c.take(2*ms, b, toC)
	got = append(got, c.wake(2*ms)...)
	if !slices.ContainsFunc(got, func(s Action) bool { return s.Addr == a.addr }) {
		t.Errorf("c did not ask a: %v", got)
	}
	// a is silent: nobody is told of it any more.
	d := newEnd(t, "d", 1, 4)
	toD := one(t, b.take(2*time.Second, d, one(t, d.join(1*ms, b))))
	d.take(2*ms, b, toD)
	if d.book.byAddr[a.addr] != nil {
		t.Error("the address of a silent peer was passed on")
	}
}

func TestMalformedIntroduction(t *testing.T) {
	a, b := met(t)
	for _, block := range [][]byte{{}, {200}, {0, 0}, {0, 0, 3, 4, 1, 2}, {0, 0, 1, 5, 0, 0, 0, 0, 0, 0}, append([]byte{65}, make([]byte, 70)...), append([]byte{0, 0, 33}, make([]byte, 300)...)} {
		was := a.refused(Introduction)
		a.meet(20*ms, a.peers[0], block)
		if a.refused(Introduction) != was+1 {
			t.Errorf("%v was taken for an introduction", block)
		}
	}
	n := len(a.book.list)
	a.meet(20*ms, a.peers[0], appendAddr([]byte{0, 0, 1}, netip.MustParseAddrPort("0.0.0.0:1")))
	a.meet(20*ms, a.peers[0], appendAddr([]byte{0, 0, 1}, netip.MustParseAddrPort("[ff02::1]:1")))
	a.meet(20*ms, a.peers[0], appendAddr([]byte{0, 0, 1}, netip.MustParseAddrPort("10.0.0.1:0")))
	if len(a.book.list) != n {
		t.Error("an address that nobody can have was learned")
	}
	a.meet(20*ms, a.peers[0], appendAddr([]byte{0, 0, 1}, netip.MustParseAddrPort("[fd00::1]:9")))
	if len(a.book.list) != n+1 {
		t.Error("an IPv6 address was not learned")
	}
	_ = b
}

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

func TestReasonsHaveNames(t *testing.T) {
	for r := range reasons {
		if r.String() == "" || strings.Contains(r.String(), "(") {
			t.Errorf("reason %d has no name", r)
		}
	}
	if got := reasons.String(); got != "Reason(15)" {
		t.Errorf("%s", got)
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	a, b := met(t)
	a.led.sinces, b.led.sinces = nil, nil
	quiet := func(e *end) {
		e.led.sinces, e.led.rooms, e.led.from = e.led.sinces[:0], e.led.rooms[:0], e.led.from[:0]
	}
	actions := make([]Action, 0, 16)
	reply := make([]Action, 0, 16)
	now := 20 * ms
	round := func() {
		quiet(a)
		quiet(b)
		now += 2 * ms
		a.led.mark++
		actions = a.Step(now, Event{Kind: Wake}, actions[:0])
		for _, s := range actions {
			reply = b.Step(now, Event{Kind: Packet, Addr: a.addr, Packet: s.Packet}, reply[:0])
			for _, r := range reply {
				a.Step(now, Event{Kind: Packet, Addr: b.addr, Packet: r.Packet}, nil)
			}
		}
		delete(b.led.got, a.led.mark)
	}
	for range 1000 {
		round()
	}
	if n := testing.AllocsPerRun(1000, round); n > 0 {
		t.Errorf("%v allocations a round", n)
	}
}

// Who was told of a departure passes it on, and what is malformed in that is left
// out; one's own incarnation and the sender's end by nobody else's word.
func TestDepartures(t *testing.T) {
	a, b := met(t)
	c := newEnd(t, "c", 7, 3)
	a.take(11*ms, c, one(t, c.join(11*ms, a)))
	now := a.Session.now + ms
	departed := func(names ...string) []byte {
		h := b.begin(now, 0)
		p := b.byName["a"]
		p.seq++
		h.toInc, h.toName, h.seq = p.incarnation.Incarnation, p.toName, p.seq
		packet := h.append(nil, "b")
		start := len(packet)
		packet = openBlock(packet, blockLeft)
		for _, n := range names {
			packet = appendString(packet, n)
			packet = binary.LittleEndian.AppendUint64(packet, 7)
		}
		return closeBlock(packet, start+blockHeader)
	}
	a.take(now, b, departed("a", "b", "nobody"))
	if len(a.peers) != 2 || a.Session.over {
		t.Fatalf("%d peers, over %v", len(a.peers), a.Session.over)
	}
	a.take(now, b, departed("c"))
	if len(a.peers) != 1 || a.retired["c"] != 7 || len(a.left) != 1 {
		t.Errorf("%d peers, retired %v, left %v", len(a.peers), a.retired, a.left)
	}
	a.take(now, b, departed("c"))
	if len(a.left) != 1 {
		t.Errorf("said %d times", len(a.left))
	}
	if out := a.departures(now+mournFor, nil, 1000); len(out) != 0 || len(a.left) != 0 {
		t.Errorf("%x after a minute", out)
	}
	before := a.refused(Introduction)
	a.take(now, b, departed(""))
	if a.refused(Introduction) != before+1 {
		t.Error("an empty name is taken")
	}
}
