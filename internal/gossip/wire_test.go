// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func drawHeader(t *rapid.T) header {
	instant := rapid.Custom(func(t *rapid.T) time.Duration {
		return time.Duration(rapid.Uint64Range(0, 1<<62-1).Draw(t, "ns"))
	})
	h := header{
		flags:   byte(rapid.IntRange(0, flagsKnown).Draw(t, "flags")),
		cluster: rapid.Uint32().Draw(t, "cluster"),
		from:    []byte(rapid.StringN(1, 16, maxName).Draw(t, "from")),
		fromInc: rapid.Uint64Range(1, 1<<63).Draw(t, "fromInc"),
		toInc:   rapid.Uint64().Draw(t, "toInc"),
		toName:  rapid.Uint32().Draw(t, "toName"),
		sent:    instant.Draw(t, "sent"),
	}
	if h.toInc != 0 {
		h.seq = rapid.Uint64Range(1, 1<<63).Draw(t, "seq")
		h.ack = rapid.Uint64().Draw(t, "ack")
		h.echo = instant.Draw(t, "echo")
	}
	if h.ack != 0 {
		h.bits = rapid.Uint64().Draw(t, "bits") | 1
		if h.ack < 64 {
			h.bits &= 1<<h.ack - 1
		}
	}
	if h.echo != 0 {
		h.held = instant.Draw(t, "held")
	}
	if h.flags&flagWall != 0 {
		h.wall = rapid.Int64().Draw(t, "wall")
	}
	if h.flags&flagRests != 0 {
		h.rest = time.Duration(rapid.Uint64Range(1, maxRest).Draw(t, "rest")) * time.Millisecond
	}
	h.nrefusals = rapid.IntRange(0, maxSections).Draw(t, "refusals")
	for i := range h.nrefusals {
		h.refusals[i] = refusal{rapid.Uint32().Draw(t, "id"), rapid.Uint64().Draw(t, "refused")}
	}
	return h
}

func TestHeaderRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawHeader(t)
		packet := append(want.append(nil, string(want.from)), "body"...)
		var got header
		body, err := got.parse(packet)
		if err != nil || string(body) != "body" {
			t.Fatalf("body %q, error %v", body, err)
		}
		if !bytes.Equal(got.from, want.from) {
			t.Fatalf("from %q, want %q", got.from, want.from)
		}
		got.from, want.from = nil, nil
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v, want %+v", got, want)
		}
		for n := range len(packet) - len("body") {
			if _, err := got.parse(packet[:n]); err == nil {
				t.Fatalf("%d of %d bytes are a header", n, len(packet)-4)
			}
		}
	})
}

// The layout that stands at header.
func TestLayout(t *testing.T) {
	t.Parallel()
	h := header{
		flags: flagElicits | flagWall, cluster: 0x04030201, fromInc: 0x11, toInc: 0x22, toName: 0x0d0c0b0a,
		seq: 300, ack: 5, bits: 0b11101, sent: 1000, echo: 2000, held: 3, wall: 0x44, nrefusals: 1,
	}
	h.refusals[0] = refusal{id: 0x99, bits: 0b100}
	got := hex.EncodeToString(h.append(nil, "ab"))
	want := "c1" + "05" + "01020304" + "02" + "6162" + "1100000000000000" + "2200000000000000" + "0a0b0c0d" +
		"ac02" + "05" + "e2ffffffffffffffff01" + "e807" + "d00f" + "03" + "4400000000000000" +
		"01" + "99000000" + "0400000000000000"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	b := closeBlock(append(openBlock(nil, 7), "xyz"...), 6)
	if got := hex.EncodeToString(b); got != "07000000"+"0300"+"78797a" {
		t.Errorf("block %s", got)
	}
	if got := hex.EncodeToString(appendAddr(nil, netip.MustParseAddrPort("[::ffff:1.2.3.4]:258"))); got != "04010203040201" {
		t.Errorf("address %s", got)
	}
}

func TestSectionIDIsNeverReserved(t *testing.T) {
	t.Parallel()
	seen := map[uint32]bool{}
	for _, name := range []string{"limiter", "breaker", "storm", "demo", ""} {
		id := sectionID(name)
		if id < blockReserved || seen[id] {
			t.Errorf("%q has id %d", name, id)
		}
		seen[id] = true
	}
}

// fuzzed is a session with a peer that it has sent something to, and everything
// that an attacker who knows the cluster would know.
func fuzzed(led *ledger) (*Session, netip.AddrPort) {
	s, err := New(Config{Cluster: "c", Self: crdt.Replica{Name: "b", Incarnation: 1}, MaxPeers: 4},
		WithSection("led", led), WithRand(func() float64 { return 0.5 }))
	if err != nil {
		panic(err)
	}
	addr := netip.MustParseAddrPort("127.0.0.1:1")
	h := header{cluster: s.cluster, fromInc: 5, sent: 1}
	s.Step(1*ms, Event{Kind: Packet, Addr: addr, Packet: h.append(nil, "a")}, nil)
	return s, addr
}

// A packet is whatever comes in: no panic, no packet too large, nothing
// acknowledged that was not sent, every packet counted once, memory bounded.
func FuzzStep(f *testing.F) {
	for _, seed := range seeds() {
		f.Add(seed, false)
	}
	f.Add([]byte{1, 0, 0, 0, 3, 0, 0, 0, 0}, true)
	f.Fuzz(func(t *testing.T, data []byte, wrap bool) {
		led := &ledger{mark: 3}
		s, addr := fuzzed(led)
		packet := data
		if wrap {
			h := header{flags: flagElicits, cluster: s.cluster, fromInc: 5, toInc: 1, toName: s.selfName, seq: 1, ack: 1, bits: 1, sent: 5, echo: 1}
			packet = append(h.append(nil, "a"), data...)
		}
		was := bytes.Clone(packet)
		var actions []Action
		for i := range 3 {
			actions = s.Step(time.Duration(2+i)*ms, Event{Kind: Packet, Addr: addr, Packet: packet}, actions[:0])
			for _, a := range actions {
				if len(a.Packet) > MaxPacket {
					t.Fatalf("a packet of %d bytes", len(a.Packet))
				}
			}
		}
		if !bytes.Equal(packet, was) {
			t.Fatal("the packet was changed")
		}
		for _, ev := range []Event{{Kind: Wake}, {Kind: Leave}, {Kind: Packet, Addr: addr, Packet: packet}} {
			actions = s.Step(100*ms, ev, actions[:0])
			for _, a := range actions {
				var h header
				if len(a.Packet) > MaxPacket {
					t.Fatalf("a packet of %d bytes", len(a.Packet))
				}
				if a.Kind != Send {
					continue
				}
				if _, err := h.parse(a.Packet); err != nil {
					t.Fatalf("sent what it would not take: %v", err)
				}
			}
		}
		st := s.Stats(100 * ms)
		sum := uint64(0)
		for r, n := range st.Refused {
			if Reason(r) != Introduction {
				sum += n
			}
		}
		if sum != st.PacketsIn {
			t.Fatalf("%d of %d packets are accounted for", sum, st.PacketsIn)
		}
		if len(s.peers) > 4 || len(s.book.list) > 16 {
			t.Fatalf("%d peers, %d addresses", len(s.peers), len(s.book.list))
		}
		for _, p := range s.peers {
			if p.acked[0] > led.mark || p.seq == 0 && p.acked[0] != 0 {
				t.Fatalf("acknowledged %d of %d", p.acked[0], led.mark)
			}
		}
	})
}

// seeds are packets of every kind, and broken ones.
func seeds() [][]byte {
	cluster, name := hash32("c"), hash32("b")
	base := header{flags: flagElicits, cluster: cluster, fromInc: 5, toInc: 1, toName: name, seq: 1, ack: 1, bits: 1, sent: 9, echo: 1}
	make1 := func(from string, body []byte, f func(h *header)) []byte {
		h := base
		f(&h)
		return append(h.append(nil, from), body...)
	}
	block := func(id uint32, content string) []byte {
		return closeBlock(append(openBlock(nil, id), content...), blockHeader)
	}
	intro := "\x01z\x01r\x02\x04\x0a\x00\x00\x01\x01\x00\x06" + "\xfd000000000000001" + "\x01\x00"
	led := sectionID("led")
	good := make1("a", slices.Concat(block(blockIntro, intro), block(led, "12345678")), func(*header) {})
	return [][]byte{
		nil,
		good,
		good[:len(good)/2],
		good[:len(good)-1],
		make1("a", block(led, ""), func(h *header) { h.fromInc = 6 }),
		make1("a", block(led, ""), func(h *header) { h.fromInc = 4 }),
		make1("b", nil, func(h *header) { h.fromInc = 1 }),
		make1("b", nil, func(h *header) { h.fromInc = 2 }),
		make1("z", nil, func(h *header) { h.toInc = 9; h.seq = 1 << 62 }),
		make1("a", nil, func(h *header) { *h = header{cluster: cluster, fromInc: 5, sent: 10, flags: flagWall, wall: -1} }),
		make1("a", []byte("\x01\x00\x00\x00\x00\x00\x00\x00"), func(h *header) { h.flags = flagRefusal }),
		make1("a", nil, func(h *header) { h.flags = flagLeave }),
		make1("x", nil, func(h *header) { h.flags = flagLeave; h.fromInc = 1<<64 - 1 }),
		make1("a", block(blockLeft, "\x01x\x01\x00\x00\x00\x00\x00\x00\x00\x01a\x09\x00\x00\x00\x00\x00\x00\x00"), func(*header) {}),
		make1("a", block(blockLeft, "\x01b\x01\x00\x00\x00\x00\x00\x00\x00\xffx"), func(*header) {}),
		make1("a", nil, func(h *header) { h.seq = 1<<64 - 1 }),
		make1("a", nil, func(h *header) { h.ack = 1 << 63 }),
		make1("a", block(3, "from later versions"), func(*header) {}),
		make1("a", []byte("\x00\x00\x00\x00\xff\xff"), func(*header) {}),
		make1("a", nil, func(h *header) { h.nrefusals = 16; h.refusals[0] = refusal{led, ^uint64(0)} }),
		bytes.Repeat([]byte{0xff}, 1400),
		append([]byte{magic, 0, 1, 2, 3, 4, 64}, bytes.Repeat([]byte{0x80}, 200)...),
	}
}

// A flood of packets that claim to be something costs what the tables hold and
// not what the packets say.
func TestFloodIsBounded(t *testing.T) {
	led := &ledger{}
	s, addr := fuzzed(led)
	packets := seeds()
	rng := rapid.Uint64()
	now, bytesIn := 10*ms, 0
	var before, after runtime.MemStats
	actions := make([]Action, 0, 64)
	step := func(i int) {
		p := slices.Clone(packets[i%len(packets)])
		for range 3 {
			if len(p) > 0 {
				p[int(rng.Example(i)%uint64(len(p)))] ^= byte(i)
			}
		}
		bytesIn += len(p)
		now += time.Microsecond
		s.over = false // go on after each forged refusal
		actions = s.Step(now, Event{Kind: Packet, Addr: netip.AddrPortFrom(addr.Addr(), uint16(i)), Packet: p}, actions[:0])
	}
	for i := range 2000 {
		step(i)
	}
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 2000 {
		step(i)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 1<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	if len(s.peers) > 4 || len(s.book.list) > 16 || len(s.retired) > retiredIncarnations {
		t.Errorf("%d peers, %d addresses, %d retired", len(s.peers), len(s.book.list), len(s.retired))
	}
}
