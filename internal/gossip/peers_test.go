// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

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
	if out := a.departures(now+departureKeep, nil, 1000); len(out) != 0 || len(a.left) != 0 {
		t.Errorf("%x after a minute", out)
	}
	before := a.refused(Introduction)
	a.take(now, b, departed(""))
	if a.refused(Introduction) != before+1 {
		t.Error("an empty name is taken")
	}
}
