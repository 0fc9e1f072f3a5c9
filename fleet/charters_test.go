// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

func proposeRate(t testing.TB, n *citizen, rate float64) uint64 {
	t.Helper()
	ticket, err := n.c.Propose(n.clock(), Change{Limit: &limiter.Limit{Rate: rate, Burst: 1_000_000}})
	if err != nil {
		t.Fatal(err)
	}
	n.poke()
	return ticket
}

// A rate change, a join, a leave and an eviction in a whole network.
func TestCharterChanges(t *testing.T) {
	for _, nodes := range []int{1, 2, 3, 9, 50} {
		if raceEnabled && nodes > 9 {
			continue // one goroutine; the figures run without the race detector
		}
		w := newCountry(t, 1, nodes, nodes+1, CharterConfig{}, terrain{lag: 5 * ms})
		w.founded(nodes)
		start := w.now
		took := func(what string, number uint64, limit time.Duration) {
			t.Helper()
			if !w.runUntil(start+limit, func() bool { return w.agreed(number) }) {
				t.Fatalf("%d nodes: %s: not after %v; newest is %d", nodes, what, limit, w.newest)
			}
			t.Logf("%3d nodes: %s: known and complete everywhere after %v", nodes, what, w.now-start)
			start = w.now
		}
		ticket := proposeRate(t, w.nodes[nodes/2], 500)
		took("rate", 2, sec)
		if n, ok := w.nodes[nodes/2].c.Outcome(ticket); n != 2 || !ok {
			t.Fatalf("outcome %d, %v", n, ok)
		}
		joiner := w.nodes[nodes]
		joiner.start()
		if err := joiner.c.Join(joiner.clock(), 1); err != nil {
			t.Fatal(err)
		}
		took("join", 3, 2*sec)
		if got, want := joiner.books.using(), 500/float64(nodes+1); got != want {
			t.Fatalf("the newcomer uses %v, not %v", got, want)
		}
		if err := w.nodes[0].c.Leave(w.nodes[0].clock(), w.nodes[0].clock()+5*sec); err != nil {
			t.Fatal(err)
		}
		w.nodes[0].poke()
		took("leave", 4, 2*sec)
		if !w.runUntil(w.now+100*ms, w.nodes[0].left(t)) || w.nodes[0].books.using() != 0 {
			t.Fatalf("it has not left, or uses %v", w.nodes[0].books.using())
		}
		w.nodes[0].stop()
		if nodes < 3 {
			continue // of two, nobody can evict the other
		}
		w.nodes[1].stop()
		w.run(w.now + 100*ms)
		start = w.now
		if _, err := w.nodes[2].c.Evict(w.nodes[2].clock(), w.nodes[1].name); err != nil {
			t.Fatal(err)
		}
		w.nodes[2].poke()
		took("evict", 5, 2*sec)
		if got, want := joiner.books.using(), 500/float64(nodes-1); got != want {
			t.Fatalf("the newcomer uses %v, not %v", got, want)
		}
	}
}

// figures are how long changes take in fleets of several sizes.
func TestCharterFigures(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	sizes := []int{3, 9, 50}
	if full() {
		sizes = append(sizes, 500)
	} else {
		t.Log("STORMGUARD_FULL=1 adds 500 nodes")
	}
	for _, nodes := range sizes {
		o := terrain{lag: 5 * ms, rarely: true}
		if nodes > 100 {
			o.keep = 200 * ms
		}
		w := newCountry(t, 7, nodes, nodes+1, CharterConfig{}, o)
		w.founded(nodes)
		t.Logf("%d nodes: founded after %v", nodes, w.now)
		took := func(what string, number uint64) {
			t.Helper()
			start, packets, bytes, chosen := w.now, w.packets, w.bytes, time.Duration(0)
			ok := w.runUntil(start+3*sec, func() bool {
				if chosen == 0 && w.newest >= number {
					chosen = w.now - start
				}
				return w.agreed(number)
			})
			if !ok || chosen > sec {
				t.Fatalf("%d nodes: %s: chosen after %v, complete: %v", nodes, what, chosen, ok)
			}
			t.Logf("%d nodes: %s: chosen after %v, known and complete everywhere after %v; %d packets, %d bytes", nodes, what, chosen.Round(ms), (w.now - start).Round(ms), w.packets-packets, w.bytes-bytes)
		}
		proposeRate(t, w.nodes[nodes/2], 500)
		took("rate", 2)
		joiner := w.nodes[nodes]
		joiner.start()
		w.run(w.now + 300*ms)
		if err := joiner.c.Join(joiner.clock(), 1); err != nil {
			t.Fatal(err)
		}
		joiner.poke()
		took("join", 3)
		if err := joiner.c.Leave(joiner.clock(), joiner.clock()+5*sec); err != nil {
			t.Fatal(err)
		}
		joiner.poke()
		took("leave", 4)
		joiner.stop()
		w.nodes[0].stop()
		w.run(w.now + 100*ms)
		if _, err := w.nodes[1].c.Evict(w.nodes[1].clock(), w.nodes[0].name); err != nil {
			t.Fatal(err)
		}
		w.nodes[1].poke()
		took("evict", 5)
	}
}

// Many processes ask for a share within a second, of three founders.
func TestCharterJoinStorm(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	joiners := 50
	if full() {
		joiners = 500
	} else {
		t.Log("STORMGUARD_FULL=1 has 500 join")
	}
	o := terrain{lag: 5 * ms, rarely: true}
	if joiners > 100 {
		o.keep = 200 * ms
	}
	w := newCountry(t, 3, 3, 3+joiners, CharterConfig{}, o)
	w.founded(3)
	begin := w.now
	for _, n := range w.nodes[3:] {
		n.rejoin = true
		w.at(begin+time.Duration(w.rng.Int64N(int64(sec))), n.start)
	}
	w.run(begin + sec)
	if !w.runUntil(begin+5*sec, func() bool {
		return w.newest > 1 && len(w.chosen[w.newest].Roster.Members) == 3+joiners && w.agreed(w.newest)
	}) {
		for _, n := range w.nodes[:5] {
			s := n.c.Status(n.clock())
			t.Logf("%s knows %d complete %d members %d votes %v lacking %d", n.name, s.Charter.Number, s.Complete, len(s.Members), s.Votes, len(s.Lacking))
		}
		t.Fatalf("%d charters, the newest with %d members, after 5 s", w.newest, len(w.chosen[w.newest].Roster.Members))
	}
	t.Logf("%d joined in %d charters; all minted %v after the first began, %v after the last; %d packets, %d MB", joiners, w.newest-1, (w.now - begin).Round(ms), (w.now - begin - sec).Round(ms), w.packets, w.bytes>>20)
	if most := uint64(joiners/10 + 8); w.newest-1 > most {
		t.Errorf("%d charters for %d joiners", w.newest-1, joiners)
	}
}

// One side of a split has no majority: it changes nothing, and its requests are
// served when it is back. The other side changes on; who has not applied a cut of
// the rate is named, and until it has, nobody uses what was freed.
func TestCharterSplit(t *testing.T) {
	w := newCountry(t, 1, 5, 6, CharterConfig{}, terrain{})
	w.founded(5)
	w.nodes[5].start()
	w.cut = islands(0, 0, 0, 1, 1, 1)
	lone := proposeRate(t, w.nodes[3], 2000)
	w.nodes[5].rejoin = true
	w.run(w.now + 3*sec)
	if w.newest != 1 {
		t.Fatalf("a minority chose charter %d", w.newest)
	}
	ticket := proposeRate(t, w.nodes[0], 500)
	w.run(w.now + sec)
	if n, ok := w.nodes[0].c.Outcome(ticket); n != 2 || !ok {
		t.Fatalf("the majority has not chosen: %d, %v", n, ok)
	}
	s := w.nodes[1].c.Status(w.nodes[1].clock())
	if s.Charter.Limit.Rate != 500 || s.Complete != 1 || !slices.Equal(s.Lacking, []string{"n003", "n004"}) {
		t.Fatalf("rate %v, complete %d, lacking %v", s.Charter.Limit.Rate, s.Complete, s.Lacking)
	}
	if got := s.Members[0].Applied; got != 2 {
		t.Fatalf("n000 has applied %d", got)
	}
	if got := w.nodes[3].books.using(); got != 200 {
		t.Fatalf("who is cut off uses %v", got)
	}
	w.cut = whole
	if !w.runUntil(w.now+3*sec, func() bool { return w.newest >= 3 && w.agreed(w.newest) && w.nodes[5].books.using() > 0 }) {
		t.Fatalf("not served after the split: newest %d", w.newest)
	}
	if n, ok := w.nodes[3].c.Outcome(lone); !ok || n < 3 || w.chosen[n].Limit.Rate != 2000 {
		t.Fatalf("the lone request: %d, %v", n, ok)
	}
}

// With Majority who is silent is evicted after its lease has run out, and
// what it had is used. Back, it stops, and its next life may join.
func TestCharterEvictsTheSilent(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{OnSilence: limiter.Majority}, terrain{drift: 500e-6})
	w.founded(3)
	w.run(w.now + sec)
	cut := w.now
	w.cut = islands(0, 0, 1)
	var stopped, used time.Duration
	w.runUntil(cut+3*sec, func() bool {
		if stopped == 0 && w.nodes[2].books.using() == 0 {
			stopped = w.now - cut
		}
		if used == 0 && w.nodes[0].books.using() > 400 && w.nodes[1].books.using() > 400 {
			used = w.now - cut
		}
		return false
	})
	t.Logf("cut off, it stopped after %v; the others use its share after %v", stopped.Round(ms), used.Round(ms))
	if stopped < 300*ms || stopped > 410*ms || used < stopped || used > 1500*ms {
		t.Errorf("stopped after %v, used after %v", stopped, used)
	}
	w.cut = whole
	w.run(w.now + 200*ms)
	n := w.nodes[2]
	if s := n.c.Status(n.clock()); !s.Evicted || s.Member || n.books.using() != 0 {
		t.Fatalf("evicted %v, member %v, uses %v", s.Evicted, s.Member, n.books.using())
	}
	if err := n.c.Join(n.clock(), 1); !errors.Is(err, ErrEvicted) {
		t.Fatalf("an evicted life joins: %v", err)
	}
	n.stop()
	n.start()
	n.rejoin = true
	began := w.now
	if !w.runUntil(w.now+3*sec, func() bool { return n.books.using() > 0 && w.agreed(w.newest) }) {
		t.Fatalf("its next life did not join: %+v", n.c.Status(n.clock()))
	}
	t.Logf("its next life mints after %v", (w.now - began).Round(ms))
}

// A member that starts again mints once it knows that its charter is the newest,
// and votes from the charter after the next on.
func TestCharterRestart(t *testing.T) {
	for _, founders := range []int{2, 3, 5} {
		w := newCountry(t, 1, founders, founders, CharterConfig{}, terrain{})
		w.founded(founders)
		proposeRate(t, w.nodes[0], 900)
		w.runUntil(w.now+sec, func() bool { return w.agreed(2) })
		for _, n := range w.nodes { // one after the other, as a deployment does
			n.stop()
			w.run(w.now + 10*ms)
			n.start()
			if n.books.using() != 0 {
				t.Fatal("it mints at once")
			}
			began := w.now
			if !w.runUntil(w.now+2*sec, func() bool { return n.c.votesNow() && w.agreed(w.newest) && n.books.using() > 0 }) {
				t.Fatalf("%d founders: %s does not take part again: %+v", founders, n.name, n.c.Status(n.clock()))
			}
			t.Logf("%d founders: %s mints and votes again after %v", founders, n.name, (w.now - began).Round(ms))
		}
		proposeRate(t, w.nodes[0], 800)
		if !w.runUntil(w.now+sec, func() bool { return w.chosen[w.newest].Limit.Rate == 800 && w.agreed(w.newest) }) {
			t.Fatal("no charter is chosen after all have started again")
		}
	}
}

// Of three, two that lost their memory at once decide nothing, and do not mint by a
// charter that may be an old one, until they hear the third, who remembers.
func TestCharterMajorityLosesItsMemory(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	w.founded(3)
	proposeRate(t, w.nodes[0], 900)
	w.runUntil(w.now+sec, func() bool { return w.agreed(2) })
	w.cut = islands(0, 0, 1)
	for _, n := range w.nodes[:2] {
		n.stop()
		n.start()
	}
	proposeRate(t, w.nodes[2], 100)
	w.run(w.now + 900*ms) // within which it would be founded anew
	if w.newest != 2 || w.nodes[0].books.using() != 0 || w.nodes[1].books.using() != 0 || w.nodes[2].books.using() != 300 {
		t.Fatalf("newest %d, in use %v, %v, %v", w.newest, w.nodes[0].books.using(), w.nodes[1].books.using(), w.nodes[2].books.using())
	}
	if s := w.nodes[0].c.Status(w.nodes[0].clock()); s.Settled || s.Votes {
		t.Fatalf("settled %v, votes %v", s.Settled, s.Votes)
	}
	w.cut = islands(0, 0, 0)
	if !w.runUntil(w.now+sec, func() bool {
		return w.newest > 2 && w.agreed(w.newest) && w.chosen[w.newest].Limit.Rate == 100 && w.nodes[0].books.using() > 0 && w.nodes[1].books.using() > 0
	}) {
		t.Fatalf("newest %d: %+v", w.newest, w.nodes[0].c.Status(w.nodes[0].clock()))
	}
}

// Of three, one is dead and one has started again, remembering nothing. The third
// can decide nothing by itself, and nothing with the other, until an operator says
// that the first does not run.
func TestCharterOperatorsWord(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	w.founded(3)
	proposeRate(t, w.nodes[0], 900)
	w.runUntil(w.now+sec, func() bool { return w.agreed(2) })
	w.nodes[0].stop()
	w.nodes[2].stop()
	w.run(w.now + 10*ms)
	w.nodes[2].start()
	b := w.nodes[1]
	proposeRate(t, b, 600)
	w.run(w.now + 5*sec)
	if s := w.nodes[2].c.Status(w.nodes[2].clock()); w.newest != 2 || s.Votes || s.Settled {
		t.Fatalf("newest %d, %+v: nobody said that the first is dead", w.newest, s)
	}
	ticket, err := b.c.Evict(b.clock(), w.nodes[0].name)
	if err != nil {
		t.Fatal(err)
	}
	b.poke()
	if !w.runUntil(w.now+sec, func() bool { _, done := b.c.Outcome(ticket); return done && w.nodes[2].books.using() > 0 }) {
		t.Fatalf("newest %d: %+v", w.newest, b.c.Status(b.clock()))
	}
	if d := w.chosen[w.newest]; len(d.Roster.Members) != 2 || d.Limit.Rate != 600 {
		t.Fatalf("%+v", d.Charter)
	}
}

// left asks whether a leaver may end.
func (n *citizen) left(t testing.TB) func() bool {
	return func() bool {
		done, err := n.c.Left(n.clock())
		if err != nil {
			t.Fatal(err)
		}
		return done
	}
}

// Of many who leave at once each ends as soon as it may. Those who stay have all
// shares then, though some of them never heard that one of the others had applied the
// charter.
func TestCharterLeaveStorm(t *testing.T) {
	t.Parallel()
	const nodes, stay = 25, 5
	for seed := range uint64(8) {
		w := newCountry(t, seed, nodes, nodes, CharterConfig{}, terrain{lag: 60 * ms, loss: 0.35, rarely: true})
		w.founded(nodes)
		leavers := w.nodes[stay:]
		for _, n := range leavers {
			if err := n.c.Leave(n.clock(), n.clock()+5*sec); err != nil {
				t.Fatal(err)
			}
			n.poke()
		}
		gone := 0
		w.runUntil(w.now+4*sec, func() bool {
			for _, n := range leavers {
				if n.alive && n.left(t)() {
					n.stop()
					gone++
				}
			}
			return gone == len(leavers)
		})
		w.run(w.now + 200*ms)
		if gone < len(leavers) || !w.agreed(2) {
			t.Fatalf("seed %d: %d of %d have left; newest is %d, complete %d: %+v", seed, gone, len(leavers), w.newest, w.complete, w.nodes[0].c.Status(w.nodes[0].clock()).Lacking)
		}
		sum := 0.0
		for _, n := range w.nodes[:stay] {
			sum += n.books.using()
		}
		if sum < 999 {
			t.Errorf("seed %d: %v of 1000 is in use by those who stay", seed, sum)
		}
	}
}

// Nobody gets a share that it may not mint yet: it would be taken from the others.
func TestCharterJoinWaitsForBooks(t *testing.T) {
	t.Parallel()
	w := newCountry(t, 1, 3, 4, CharterConfig{}, terrain{})
	w.founded(3)
	joiner := w.nodes[3]
	joiner.young = w.now + sec
	joiner.start()
	if err := joiner.c.Join(joiner.clock(), 1); err != nil {
		t.Fatal(err)
	}
	w.run(joiner.young)
	if w.newest != 1 {
		t.Fatalf("it is in charter %d, and its books are not ready", w.newest)
	}
	if !w.runUntil(joiner.young+200*ms, func() bool { return w.agreed(2) }) {
		t.Fatalf("newest is %d 200 ms after its books were ready", w.newest)
	}
}

// A leaver that nobody answers may end at its deadline, and is told so.
func TestCharterLeaveDeadline(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	w.founded(3)
	n := w.nodes[0]
	w.cut = islands(0, 1, 1)
	if err := n.c.Leave(n.clock(), n.clock()+sec); err != nil {
		t.Fatal(err)
	}
	w.run(w.now + 900*ms)
	if done, err := n.c.Left(n.clock()); done || err != nil {
		t.Fatalf("before the deadline: %v, %v", done, err)
	}
	w.run(w.now + 200*ms)
	if done, err := n.c.Left(n.clock()); !done || !errors.Is(err, ErrBusy) {
		t.Fatalf("after the deadline: %v, %v", done, err)
	}
}

// Whatever is under way is bounded: behind a member that does not apply anything,
// only evictions go on.
func TestCharterPendingBound(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	w.founded(3)
	w.cut = islands(0, 0, 1)
	for k := range 100 {
		proposeRate(t, w.nodes[0], float64(900-k))
		w.run(w.now + 100*ms)
		if len(w.nodes[0].c.requests) > 0 {
			break
		}
	}
	if got := w.nodes[0].c.pendingLocked(); got != fewPending {
		t.Fatalf("%d charters wait, not %d", got, fewPending)
	}
	w.nodes[2].stop()
	if _, err := w.nodes[1].c.Evict(w.nodes[1].clock(), "n002"); err != nil {
		t.Fatal(err)
	}
	w.nodes[1].poke()
	if !w.runUntil(w.now+2*sec, func() bool { return w.agreed(w.newest) && len(w.nodes[0].c.requests) == 0 }) {
		t.Fatalf("the eviction does not free what waits: %d", w.nodes[0].c.pendingLocked())
	}
}

func TestCharterRefuses(t *testing.T) {
	of := func(name string, cfg CharterConfig) *Charters {
		t.Helper()
		def(&cfg.Fleet, "f")
		if cfg.Founding.Roster.Members == nil {
			cfg.Founding = nation(3)
		}
		c, err := NewCharters(crdt.Replica{Name: name, Incarnation: 1}, cfg, &notes{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	one, peer := of("n000", CharterConfig{}), crdt.Replica{Name: "n001", Incarnation: 1}
	say := func(other *Charters) error {
		b, _ := other.Delta(sec, nil, one.self, 0, 1300)
		return one.Merge(crdt.Contact{From: peer, Now: sec, Sent: sec}, b)
	}
	for _, cfg := range []CharterConfig{{Fleet: "g"}, {OnSilence: limiter.Majority}} {
		if err := say(of("n001", cfg)); !errors.Is(err, ErrFleet) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	var differs *CharterError
	if err := say(of("n001", CharterConfig{Founding: nation(4)})); !errors.Is(err, ErrCharter) || !errors.As(err, &differs) || differs.Number != 1 || differs.Peer != peer {
		t.Errorf("another founding charter: %v", err)
	}
	if s := one.Status(sec); s.Foreign != 2 || s.Differing != 1 || s.Differs != differs || s.Members[1].Heard != -1 {
		t.Errorf("%+v", s)
	}
	if err := one.Merge(crdt.Contact{From: one.self}, nil); !errors.Is(err, ErrSelf) {
		t.Errorf("own packet: %v", err)
	}
	if _, err := one.Evict(0, "n000"); !errors.Is(err, ErrMember) {
		t.Errorf("evicts itself: %v", err)
	}
	if _, err := one.Propose(0, Change{Limit: &limiter.Limit{}, Weights: map[string]int{"x": 1}}); !errors.Is(err, ErrConfig) || !errors.Is(err, ErrMember) {
		t.Errorf("a change that cannot be: %v", err)
	}
	if err := one.Join(0, 1); err != nil {
		t.Errorf("one that does not know yet whether it is a member asks to be one: %v", err)
	}
	alone := of("n000", CharterConfig{Founding: nation(1)})
	if alone.Tick(foundAfter - 1); alone.Status(0).Settled {
		t.Error("the only member has waited for nobody")
	}
	if alone.Tick(foundAfter); !alone.Status(0).Settled {
		t.Error("the only member waits for ever")
	}
	if err := alone.Join(foundAfter, 1); !errors.Is(err, ErrMember) {
		t.Errorf("a member joins: %v", err)
	}
	if err := of("n000", CharterConfig{Founding: nation(1)}).Leave(0, sec); !errors.Is(err, ErrMember) {
		t.Errorf("the last one leaves: %v", err)
	}
	if _, err := NewCharters(crdt.Replica{}, CharterConfig{
		Founding:      limiter.Charter{Number: 2},
		OnSilence:     limiter.Hold,
		UnstableNames: true,
		Lease:         sec, Silent: ms, Gather: -1, Patience: -1,
	}, &notes{}, 0); err == nil {
		t.Error("accepted")
	} else {
		for _, field := range []string{"self", "Fleet", "OnSilence", "Silent", "Gather", "Patience", "Founding.Number", "Roster.Members", "Limit.Rate"} {
			if !strings.Contains(err.Error(), field) {
				t.Errorf("%s is not named in %v", field, err)
			}
		}
	}
	if _, err := NewCharters(peer, CharterConfig{Fleet: "f", Founding: nation(3)}, &notes{err: errRefused}, 0); !errors.Is(err, errRefused) {
		t.Errorf("books that refuse: %v", err)
	}
}

// Books that refuse a charter later mint no more, and the member is seen to lack it.
func TestCharterBooksRefuse(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	w.founded(3)
	w.nodes[2].books.refuse = true
	proposeRate(t, w.nodes[0], 500)
	w.run(w.now + sec)
	if s := w.nodes[2].c.Status(w.nodes[2].clock()); !errors.Is(s.Err, errRefused) || w.nodes[2].books.using() != 0 {
		t.Fatalf("%v, uses %v", s.Err, w.nodes[2].books.using())
	}
	if s := w.nodes[0].c.Status(w.nodes[0].clock()); !slices.Equal(s.Lacking, []string{"n002"}) || s.Complete != 1 {
		t.Fatalf("lacking %v, complete %d", s.Lacking, s.Complete)
	}
}

// A leaver is killed after the charter without it was chosen, and before it was heard
// to keep within it. With Majority its lease ends; else an operator's word does it.
func TestCharterLeaverDies(t *testing.T) {
	for _, policy := range []limiter.SilencePolicy{limiter.Majority, limiter.Hold} {
		w := newCountry(t, 1, 5, 5, CharterConfig{OnSilence: policy, UnstableNames: policy == limiter.Majority}, terrain{lag: 60 * ms})
		w.founded(5)
		x, a := w.nodes[4], w.nodes[0]
		if err := x.c.Leave(x.clock(), x.clock()+5*sec); err != nil {
			t.Fatal(err)
		}
		x.poke()
		if !w.runUntil(w.now+2*sec, func() bool { return w.newest == 2 }) {
			t.Fatal("nothing is chosen")
		}
		x.stop()
		if policy == limiter.Hold {
			w.run(w.now + 5*sec)
			if _, complete := a.c.Number(); complete != 1 {
				t.Fatalf("complete %d: who is not heard keeps its share", complete)
			}
			ticket, err := a.c.Evict(a.clock(), x.name)
			if err != nil {
				t.Fatal(err)
			}
			a.poke()
			if !w.runUntil(w.now+5*sec, func() bool { _, done := a.c.Outcome(ticket); return done }) {
				t.Fatal("it is not evicted")
			}
			if number, _ := a.c.Outcome(ticket); number != 3 {
				t.Errorf("evicted by charter %d", number)
			}
		}
		if !w.runUntil(w.now+5*sec, func() bool { return w.agreed(w.newest) && w.complete == w.newest }) {
			s := a.c.Status(a.clock())
			t.Errorf("%s: newest %d, complete %d, lacking %v", policy, s.Charter.Number, s.Complete, s.Lacking)
		}
		if _, err := a.c.Evict(a.clock(), x.name); !errors.Is(err, ErrMember) {
			t.Errorf("%s: nothing waits for it: %v", policy, err)
		}
	}
}

// A life that does not vote yet leaves: it stays until all know that it has gone.
func TestCharterUnsettledLeaves(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{lag: 60 * ms})
	w.founded(3)
	x := w.nodes[2]
	x.stop()
	w.run(w.now + 100*ms)
	w.cut = func(a, b int) bool { return a+b == 1+2 && a*b != 0 }
	x.young = w.now + 1011*ms
	x.start()
	w.run(w.now + 300*ms)
	if s := x.c.Status(x.clock()); s.Settled || !s.Member {
		t.Fatalf("%+v", s)
	}
	if err := x.c.Leave(x.clock(), x.clock()+30*sec); err != nil {
		t.Fatal(err)
	}
	x.poke()
	left := func() bool {
		done, err := x.c.Left(x.clock())
		if err != nil {
			t.Error(err)
		}
		return done
	}
	if w.runUntil(w.now+3*sec, left) && w.complete < 2 {
		t.Error("it has left, and others wait for its word")
	}
	w.cut = whole
	if !w.runUntil(w.now+10*sec, left) {
		t.Fatal("it never leaves")
	}
	x.stop()
	if !w.runUntil(w.now+10*sec, func() bool { return w.complete == 2 && w.newest == 2 }) {
		t.Errorf("complete %d of %d", w.complete, w.newest)
	}
}
