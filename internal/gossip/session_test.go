// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"encoding/binary"
	"errors"
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
