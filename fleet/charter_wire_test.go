// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

const most = 1<<64 - 1

// wholeRow has every field at its limit.
func wholeRow() statement {
	top := ballot{most, maxMembers}
	s := statement{
		fleet: most, founding: most, life: most, known: most - 1, digest: most, complete: most - 1, applied: most - 1, votes: most,
		flags: flagsKnown &^ (flagPiece | flagChosen), weight: 1e6, promised: top, accepted: accepted{top, most}, ballot: top, proposed: most,
		want: want{most, most, maxDecree}, grant: 1<<63 - 1,
	}
	for i := range s.dead {
		s.dead[i] = maxMembers
	}
	return s
}

func TestCharterRowBound(t *testing.T) {
	s := wholeRow()
	if n := len(appendStatement(nil, &s)); n > maxRow {
		t.Errorf("a row takes %d bytes, the bound is %d", n, maxRow)
	}
	if front := len(appendPiece(nil, &piece{most, most, maxDecree, maxDecree, true, nil})); front > pieceFront {
		t.Errorf("a piece begins with %d bytes, the bound is %d", front, pieceFront)
	}
	if maxRow+pieceFront+leastPiece > 512 {
		t.Errorf("the documented room is too small: %d", maxRow+pieceFront+leastPiece)
	}
}

func TestCharterWireRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		u := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
		at := func(name string) ballot {
			return ballot{rapid.Uint64Min(1).Draw(t, name), rapid.IntRange(1, maxMembers).Draw(t, name)}
		}
		known := rapid.Uint64Range(1, most-1).Draw(t, "known")
		in := statement{
			fleet: u("fleet"), founding: u("founding"), life: u("life"), known: known, digest: u("digest"),
			complete: rapid.Uint64Range(1, known).Draw(t, "complete"), applied: rapid.Uint64Range(0, known).Draw(t, "applied"), votes: u("votes"),
			flags: rapid.Uint64Range(0, flagsKnown).Draw(t, "flags"),
		}
		if in.flags&flagProposed != 0 {
			in.flags |= flagBallot
		}
		if in.flags&flagPiece == 0 {
			in.flags &^= flagChosen
		}
		if in.flags&flagJoining != 0 {
			in.weight = rapid.IntRange(0, 1e6).Draw(t, "weight")
		}
		if in.flags&flagPromised != 0 {
			in.promised = at("promised")
		}
		if in.flags&flagAccepted != 0 {
			in.accepted = accepted{at("accepted"), u("accepted")}
		}
		if in.flags&flagBallot != 0 {
			in.ballot = at("ballot")
		}
		if in.flags&flagProposed != 0 {
			in.proposed = u("proposed")
		}
		if in.flags&flagWant != 0 {
			in.want = want{u("want"), u("want"), rapid.IntRange(0, maxDecree).Draw(t, "offset")}
		}
		if in.flags&flagGrant != 0 {
			in.grant = time.Duration(rapid.Int64Min(0).Draw(t, "grant"))
		}
		if in.flags&flagDead != 0 {
			for i := range rapid.IntRange(1, maxDead).Draw(t, "dead") {
				in.dead[i] = rapid.IntRange(1, maxMembers).Draw(t, "seat")
			}
		}
		b := appendStatement(nil, &in)
		if in.flags&flagPiece != 0 {
			data := rapid.SliceOfN(rapid.Byte(), 1, 40).Draw(t, "data")
			in.piece = piece{u("number"), u("digest"), 100, rapid.IntRange(0, 60).Draw(t, "offset"), in.flags&flagChosen != 0, data}
			b = appendPiece(b, &in.piece)
		}
		var out statement
		if err := readStatement(b, &out); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(in, out) {
			t.Fatalf("wrote %+v\nread  %+v", in, out)
		}
		for n := range b {
			if err := readStatement(b[:n], &out); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%d of %d bytes are read: %v", n, len(b), err)
			}
		}
	})
}

// large is the largest charter there can be.
func large() limiter.Charter {
	c := limiter.Charter{Number: most, Limit: limiter.Limit{Rate: 1e9, Burst: 1e9}, Limits: map[string]limiter.Limit{}, Resets: most}
	c.Roster.Number, c.Roster.Guests = most, true
	for i := range maxMembers {
		c.Roster.Members = append(c.Roster.Members, limiter.Member{Name: fmt.Sprintf("%0*d", maxName, i), Weight: 1e6})
	}
	for i := range maxLimits {
		c.Limits[fmt.Sprintf("%0*d", limiter.MaxKey, i)] = limiter.Limit{Rate: 1, Burst: 1e9}
	}
	return c
}

func TestDecreeRoundTrip(t *testing.T) {
	evicted := make([]eviction, maxMembers)
	for i := range evicted {
		evicted[i] = eviction{fmt.Sprintf("x%0*d", maxName-1, i), i%2 == 0}
	}
	for _, d := range []*decree{newDecree(normal(nation(3)), nil), newDecree(large(), evicted)} {
		d.Number = max(d.Number, 1)
		d = newDecree(d.Charter, d.evicted)
		if len(d.bytes) > maxDecree {
			t.Errorf("%d bytes are above the bound", len(d.bytes))
		}
		back, err := readDecree(d.bytes)
		if err != nil || !reflect.DeepEqual(back, d) {
			t.Fatalf("%v: wrote %.200v\nread %.200v", err, d, back)
		}
		for _, n := range []int{0, 1, 9, len(d.bytes) / 2, len(d.bytes) - 1} {
			if _, err := readDecree(d.bytes[:n]); !errors.Is(err, ErrMalformed) {
				t.Fatalf("%d bytes: %v", n, err)
			}
		}
	}
}

func TestCharterSeeds(t *testing.T) {
	small := statement{fleet: 1, founding: 2, life: 1, known: 1, digest: 2, complete: 1, applied: 1, votes: 2}
	plain := appendStatement(nil, &small)
	seed(t, "FuzzCharters", "keepalive", plain)
	s := wholeRow()
	row := appendStatement(nil, &s)
	seed(t, "FuzzCharters", "fullest", row)
	seed(t, "FuzzCharters", "cut", row[:len(row)-1])
	seed(t, "FuzzCharters", "after-the-end", append(slices.Clone(row), 1))
	seed(t, "FuzzCharters", "version-2", append([]byte{2}, row[1:]...))
	small.flags = flagPiece | flagBallot | flagProposed | flagFresh
	small.ballot, small.proposed = ballot{1, 1}, 7
	d := newDecree(normal(nation(3)), nil)
	seed(t, "FuzzCharters", "piece", appendPiece(appendStatement(nil, &small), &piece{2, d.digest, len(d.bytes), 0, false, d.bytes}))

	seed(t, "FuzzDecree", "three", newDecree(func() limiter.Charter { c := normal(nation(3)); c.Number = 1; return c }(), nil).bytes)
	c := normal(nation(2))
	c.Number, c.Limits = 7, map[string]limiter.Limit{"k": {Rate: 1, Burst: 2}}
	rich := newDecree(c, []eviction{{"x", true}, {"y", false}}).bytes
	seed(t, "FuzzDecree", "rich", rich)
	seed(t, "FuzzDecree", "cut", rich[:len(rich)-1])
}

// FuzzCharters has a peer say anything: what is refused changes nothing, and what
// is taken in neither breaks nor has a charter chosen that nobody proposed.
func FuzzCharters(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		var was int
		books := &notes{}
		self, from := crdt.Replica{Name: "n000", Incarnation: 1}, crdt.Replica{Name: "n001", Incarnation: 1}
		c, err := NewCharters(self, CharterConfig{Fleet: "f", Founding: nation(3)}, books, sec)
		if err != nil {
			t.Fatal(err)
		}
		var s statement
		if readStatement(b, &s) == nil { // so that the fuzzer gets past the digests
			s.fleet, s.founding, s.life = c.fleet, c.founding, 1
			if s.known == 1 {
				s.digest = c.founding
			}
			p := s.piece
			b = appendStatement(nil, &s)
			if s.flags&flagPiece != 0 {
				b = appendPiece(b, &p)
			}
		}
		was = len(c.list)
		before := fmt.Sprintf("%+v", c.Status(2*sec))
		for k := range 3 {
			err := c.Merge(crdt.Contact{From: from, Now: 2*sec + time.Duration(k), Sent: sec + time.Duration(k)}, bytes.Clone(b))
			if err != nil {
				if after := fmt.Sprintf("%+v", c.Status(2*sec)); errors.Is(err, ErrMalformed) && (after != before || len(c.list) != was) {
					t.Fatalf("refused with %v, and yet\n%s\nbecame\n%s", err, before, after)
				}
				return
			}
			out, _ := c.Delta(2*sec, nil, from, 0, 512)
			if len(out) > 512 || readStatement(out, &s) != nil {
				t.Fatalf("%d bytes, %v", len(out), readStatement(out, &s))
			}
			c.Tick(2*sec + time.Duration(k)*sec)
		}
	})
}

// FuzzDecree reads anything as a charter; what is one is written as it was.
func FuzzDecree(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := readDecree(bytes.Clone(b))
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(newDecree(d.Charter, d.evicted).bytes, b) {
			t.Fatalf("%x is written as %x", b, newDecree(d.Charter, d.evicted).bytes)
		}
	})
}

// notes are books that do as they are told.
type notes struct {
	adopted  []uint64
	complete uint64
	until    time.Duration
	err      error
}

func (n *notes) Adopt(_ time.Duration, c limiter.Charter) error {
	if n.err == nil {
		n.adopted = append(n.adopted, c.Number)
	}
	return n.err
}
func (n *notes) Complete(_ time.Duration, number uint64) { n.complete = number }
func (n *notes) Applied() uint64                         { return n.adopted[len(n.adopted)-1] }
func (n *notes) Mint(until time.Duration)                { n.until = until }

// The longest charter reaches a newcomer in packets of 512 bytes.
func TestCharterSmallRoom(t *testing.T) {
	cfg := CharterConfig{Founding: nation(3)}
	cfg.Founding.Limits = map[string]limiter.Limit{}
	for i := range 1000 {
		cfg.Founding.Limits[fmt.Sprintf("%s%04d", strings.Repeat("k", 100), i)] = limiter.Limit{Rate: 1000, Burst: 1_000_000}
	}
	w := newCountry(t, 1, 3, 4, cfg, terrain{room: 512, loss: 0.1})
	w.founded(3)
	proposeRate(t, w.nodes[1], 500)
	if !w.runUntil(w.now+10*sec, func() bool { return w.agreed(2) }) {
		t.Fatal("not chosen in small packets")
	}
	w.nodes[3].start()
	began := w.now
	if !w.runUntil(w.now+10*sec, func() bool { return w.agreed(2) && w.nodes[3].c.Status(0).Settled }) {
		t.Fatal("the newcomer did not get it")
	}
	t.Logf("%d bytes in %v", len(w.nodes[3].c.top().bytes), w.now-began)
	if b, upto := w.nodes[0].c.Delta(w.now, nil, w.nodes[1].id(), 3, maxRow-1); len(b) != 0 || upto != 3 {
		t.Fatalf("without room for a row: %d bytes up to %d", len(b), upto)
	}
}
