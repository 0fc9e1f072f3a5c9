// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Who is heard counts while it hears us, too, and a packet that comes again or
// late keeps nobody alive.
func TestHeardBothWays(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a, b := l.start("a", 1), l.start("b", 1)
	p, _ := b.Delta(l.now, nil, a.self, 0, 1<<16)
	for _, c := range []struct {
		what            string
		now, sent, echo time.Duration
		heard           int
	}{
		{"it has not heard us", 100 * sec, 1 * sec, 0, 1},
		{"it has", 101 * sec, 2 * sec, 100 * sec, 2},
		{"it no longer does", 107 * sec, 8 * sec, 100 * sec, 1},
		{"it does again", 108 * sec, 9 * sec, 107 * sec, 2},
		{"the same again, later", 114 * sec, 9 * sec, 113 * sec, 1},
		{"an older one", 114 * sec, 3 * sec, 113 * sec, 1},
	} {
		if err := a.Merge(crdt.Contact{From: b.self, Now: c.now, Sent: c.sent, Echo: c.echo}, p); err != nil {
			t.Fatal(err)
		}
		a.Tick(c.now)
		if s := a.Status(c.now, "x"); s.Heard != c.heard || s.Connected != (c.heard == 2) {
			t.Errorf("%s: %d are heard, want %d", c.what, s.Heard, c.heard)
		}
	}
}

// What does not fit goes with the next packet, oldest change first, and a mark
// never promises what was not said.
func TestDeltaInPieces(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	for i := range 40 {
		name := fmt.Sprintf("scope-%02d", i)
		l.adopt(b, name)
		b.Observe(l.now, name, trip(2, 3))
	}
	l.tell(b, a) // a has them second-hand for c
	for _, from := range []*Verdicts{b, a} {
		to := newLab(t, Config{}, "a", "b", "c").start("c", 2)
		var since uint64
		packets := 0
		for since < from.Mark(to.self) {
			p, upto := from.Delta(l.now, nil, to.self, since, 500)
			if len(p) > 500 || upto <= since {
				t.Fatalf("%d bytes, complete from %d to %d", len(p), since, upto)
			}
			m, err := readMessage(p, from.self)
			if err != nil {
				t.Fatal(err)
			}
			if m.complete && upto < from.Mark(to.self) {
				t.Fatal("not all, and yet complete")
			}
			if err := to.Merge(crdt.Contact{From: from.self, Now: l.now, Sent: l.now, Echo: l.now}, p); err != nil {
				t.Fatal(err)
			}
			if known := len(to.Scopes()); upto < from.Mark(to.self) && to.book(fmt.Sprintf("scope-%02d", known-1)) == nil {
				t.Fatalf("of %d scopes not the first", known)
			}
			since = upto
			packets++
		}
		if n := len(to.Scopes()); n != 40 || packets < 3 {
			t.Errorf("%s told of %d scopes in %d packets", from.self, n, packets)
		}
	}
	if p, upto := b.Delta(l.now, nil, c.self, 3, maxHeader-1); len(p) != 0 || upto != 3 {
		t.Errorf("%d bytes without room for a header", len(p))
	}
}

// What was complete for an earlier incarnation is not for a later one: its votes are
// taken in when they come.
func TestCompleteForWhom(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a := l.start("a", 1)
	l.adopt(a, "p")
	l.now += 2 * sec
	a.Tick(l.now) // alone, it is half-open
	a.Observe(l.now, "p", trip(2, 3))
	first := crdt.Replica{Name: "b", Incarnation: 1}
	all, upto := a.Delta(l.now, nil, first, 0, 1<<16)
	rest, _ := a.Delta(l.now, nil, first, upto, 1<<16)
	b := l.start("b", 2)
	for _, p := range [][]byte{rest, all} {
		l.now += ms
		if err := b.Merge(crdt.Contact{From: a.self, Now: l.now, Sent: l.now, Echo: l.now}, p); err != nil {
			t.Fatal(err)
		}
	}
	if s := b.Status(l.now, "p"); len(s.Votes) != 1 {
		t.Errorf("%d votes", len(s.Votes))
	}
}

// Second-hand, what is older than Keep is not taken in.
func TestTooOld(t *testing.T) {
	l := newLab(t, Config{Keep: 10 * sec}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.adopt(a, "p")
	l.now += 2 * sec
	a.Tick(l.now) // alone, it is half-open
	a.Observe(l.now, "p", trip(2, 3))
	l.tell(a, b)
	if s := b.Status(l.now, "p"); len(s.Votes) != 1 {
		t.Fatal("b was not told")
	}
	l.now += 11 * sec
	l.tell(b, c)
	if s := c.Status(l.now, "p"); len(s.Votes) != 0 {
		t.Error("taken in")
	}
}

// Of two snapshots that overtook each other the later stays.
func TestStormOvertaken(t *testing.T) {
	s, err := NewStorms(StormConfig{}, crdt.Replica{Name: "x", Incarnation: 1})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range []*snapshot{{key: "k", num: 2, Report: calm}, {key: "k", num: 1, Report: inStorm}} {
		at := time.Duration(i+1) * sec
		if err := s.Merge(crdt.Contact{From: crdt.Replica{Name: "y"}, Now: at, Sent: at, Echo: at}, appendSnapshot([]byte{wireVersion}, r)); err != nil {
			t.Fatal(err)
		}
	}
	if s.Storm(2*sec, "k").Active {
		t.Error("the earlier")
	}
}

// A storm that is told by a process which does not hear us is not counted yet.
func TestStormOneWay(t *testing.T) {
	s, err := NewStorms(StormConfig{}, crdt.Replica{Name: "x", Incarnation: 1})
	if err != nil {
		t.Fatal(err)
	}
	b := appendSnapshot([]byte{wireVersion}, &snapshot{key: "k", num: 1, Report: inStorm})
	for i, heard := range []int{0, 1} {
		at := time.Duration(i+1) * sec
		if err := s.Merge(crdt.Contact{From: crdt.Replica{Name: "y"}, Now: at, Sent: at, Echo: time.Duration(heard) * at}, b); err != nil {
			t.Fatal(err)
		}
		if got := s.Storm(at, "k"); got.Reporters != heard {
			t.Errorf("%d report, want %d", got.Reporters, heard)
		}
	}
}

func TestMalformed(t *testing.T) {
	good := appendHeader(nil, 1, 2, true)
	whole := appendComplete(good, 7, 1)
	from := crdt.Replica{Name: "a", Incarnation: 1}
	if _, err := readMessage(whole, from); err != nil {
		t.Fatal(err)
	}
	for what, b := range map[string][]byte{
		"empty":                 {},
		"another version":       append([]byte{wireVersion + 1}, good[1:]...),
		"a short header":        good[:len(good)-1],
		"informed twice":        append(slices.Clip(good[:len(good)-1]), 2),
		"an unknown kind":       append(slices.Clip(good), 9),
		"something after":       append(slices.Clip(whole), recordComplete, 1, 1),
		"a closed with a level": appendRecord(slices.Clip(good), &record{kind: recordState, name: "s", state: State{BackoffLevel: 1}}),
		"no scope":              appendRecord(slices.Clip(good), &record{kind: recordState, state: State{Position: Position{Gen: 1}}}),
		"an unknown phase":      appendRecord(slices.Clip(good), &record{kind: recordOwn, vote: Vote{Scope: "s", Version: 1, Phase: phases}}),
		"a vote never written":  appendRecord(slices.Clip(good), &record{kind: recordOwn, vote: Vote{Scope: "s"}}),
		"a level out of reach":  appendRecord(slices.Clip(good), &record{kind: recordOwn, vote: Vote{Scope: "s", Version: 1, BackoffLevel: maxBackoffLevel + 1}}),
		"a vote of nobody":      appendRecord(slices.Clip(good), &record{kind: recordOther, vote: Vote{Scope: "s", Version: 1}}),
	} {
		if _, err := readMessage(b, from); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
