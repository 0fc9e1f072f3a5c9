// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
)

func mustScopes(t testing.TB, cfg ScopesConfig) *Scopes {
	t.Helper()
	s, err := NewScopes(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func leaf(t testing.TB, s *Scopes, path ...string) *Leaf {
	t.Helper()
	l, err := s.Leaf(path...)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestParentOpensByQuorum(t *testing.T) {
	s := mustScopes(t, ScopesConfig{Breaker: breaker.Config{Successes: 1}})
	var parts []*Leaf
	for i := range 4 {
		parts = append(parts, leaf(t, s, "group", "orders", strconv.Itoa(i)))
	}
	other := leaf(t, s, "group", "refunds", "0")

	parts[0].Trip(sec, "test")
	if !parts[3].Closed() {
		t.Fatal("one of four opened the topic")
	}
	parts[1].Trip(sec, "test")
	if _, ok := parts[3].Enter(); ok || parts[3].Closed() {
		t.Fatal("two of four did not open the topic")
	}
	_, r := parts[3].Admit(sec, 1)
	if want := (Refusal{State: breaker.Open, Cause: breaker.CauseQuorum, Scope: "group/orders", Until: sec + 100*ms}); r != want {
		t.Fatalf("%+v, want %+v", r, want)
	}
	if !other.Closed() {
		t.Fatal("one topic of two opened the group")
	}

	// A child that is not closed goes by its own backoff, and its closing
	// closes the topic.
	if _, r = parts[0].Admit(sec, 1); r.Scope != "group/orders/0" {
		t.Fatalf("%+v", r)
	}
	tok, r := parts[0].Admit(2*sec, 1)
	if !r.OK() || !tok.Probe() {
		t.Fatalf("no probe under an open topic: %+v", r)
	}
	if parts[3].Closed() {
		t.Fatal("half-open counts as closed")
	}
	parts[0].Success(2*sec, tok)
	if !parts[3].Closed() || !parts[0].Closed() {
		t.Fatal("the topic did not close")
	}

	// Two topics of two open the group.
	r1 := leaf(t, s, "group", "refunds", "1")
	third := leaf(t, s, "group", "news", "0")
	for _, l := range []*Leaf{parts[0], other, r1} {
		l.Trip(3*sec, "test")
	}
	if _, r := third.Admit(3*sec, 1); r.Scope != "group" {
		t.Fatalf("%+v", r)
	}
	want := []ParentSnapshot{
		{"group", true, 3 * sec, 3, 2}, {"group/news", false, 0, 1, 0},
		{"group/orders", true, 3 * sec, 4, 2}, {"group/refunds", true, 3 * sec, 2, 2},
	}
	got := s.Parents()
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%+v, want %+v", got[i], want[i])
		}
	}
	seen := map[string]int{}
	for _, c := range s.Changes(nil) {
		seen[c.Scope]++
	}
	if seen["group"] != 1 || seen["group/orders"] != 3 || seen["group/orders/0"] != 4 {
		t.Errorf("%v", seen)
	}
	if c := s.Changes(nil); len(c) != 0 {
		t.Errorf("drained twice: %v", c)
	}
}

func TestIdleChildLosesItsVote(t *testing.T) {
	for _, half := range []bool{false, true} {
		s := mustScopes(t, ScopesConfig{})
		a, b, c := leaf(t, s, "t", "a"), leaf(t, s, "t", "b"), leaf(t, s, "t", "c")
		a.Trip(0, "test")
		b.Trip(0, "test")
		from := 100 * ms
		if half { // one probe said nothing, then nothing came
			from = sec
			for _, l := range []*Leaf{a, b} {
				tok, _ := l.Admit(sec, 1)
				l.Exclude(sec, tok)
			}
		}
		s.Tick(from + 30*sec - 1)
		if c.Closed() {
			t.Fatal("closed too early")
		}
		s.Tick(from + 30*sec)
		if !c.Closed() {
			t.Fatal("two idle children hold the topic")
		}
		// The vote comes back with the next failed probe.
		for _, l := range []*Leaf{a, b} {
			tok, r := l.Admit(40*sec, 1)
			if !r.OK() {
				t.Fatalf("%+v", r)
			}
			l.Failure(40*sec, tok, true)
		}
		if c.Closed() {
			t.Fatal("two children that probe have no vote")
		}
		// A force is no vote, and takes the one that was there.
		a.Force(50*sec, 0, "op")
		b.Force(50*sec, 0, "op")
		s.Tick(50 * sec)
		if !c.Closed() {
			t.Fatal("two children that somebody has forced hold the third")
		}
	}
}

// Who holds a leaf says from time to time that it still has reason to. Otherwise a
// hold is no vote without end, or children without traffic would keep their healthy
// siblings shut.
func TestIdleHeldChildLosesItsVote(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	a, b, c := leaf(t, s, "t", "a"), leaf(t, s, "t", "b"), leaf(t, s, "t", "c")
	held := []*Leaf{a, b}
	votesUntil := func(what string, end time.Duration) {
		t.Helper()
		s.Tick(end - 1)
		if c.Closed() {
			t.Fatalf("%s: closed too early", what)
		}
		s.Tick(end)
		if !c.Closed() {
			t.Fatalf("%s: two idle children hold the topic", what)
		}
	}
	for _, l := range held {
		l.Trip(0, "test")
		l.Hold(0, 4, "fleet") // for 800 ms
	}
	votesUntil("held", 800*ms+30*sec)
	for _, l := range held {
		l.Hold(100*sec, 5, "fleet") // another round
	}
	votesUntil("held anew", 101600*ms+30*sec)
	for _, l := range held {
		l.Permit(200 * sec)
		tok, r := l.Admit(200*sec, 1)
		if !r.OK() {
			t.Fatalf("%+v", r)
		}
		l.Success(201*sec, tok)
	}
	votesUntil("a probe passed", 231*sec)
}

// A leaf that is given back is only asked to find out: until it has, it is no reason
// to keep others shut.
func TestGivenBackChildHasNoVote(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	a, b, c := leaf(t, s, "t", "a"), leaf(t, s, "t", "b"), leaf(t, s, "t", "c")
	tokens := make(map[*Leaf]Token)
	for _, l := range []*Leaf{a, b} {
		l.Hold(sec, 0, "unknown")
		l.Unhold(sec)
		tok, r := l.Admit(sec, 1)
		if !r.OK() {
			t.Fatalf("%+v", r)
		}
		tokens[l] = tok
	}
	s.Tick(sec)
	if !c.Closed() {
		t.Fatal("two that nothing is known of shut the topic")
	}
	for l, tok := range tokens {
		l.Failure(2*sec, tok, true)
	}
	if c.Closed() {
		t.Fatal("two whose probes failed have no vote")
	}
	now := 10 * sec
	for l := range tokens { // half-open again, by itself, in its turn
		if _, r := l.Admit(now, 1); !r.OK() {
			t.Fatalf("%+v", r)
		}
		now += 5 * sec
	}
	if c.Closed() {
		t.Fatal("half-open by itself counts as closed")
	}
}

// A leaf whose probes succeed carries a part of its load: it shuts nobody else, from
// the first success until as many have failed.
func TestPassingChildHasNoVote(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	a, b, c := leaf(t, s, "t", "a"), leaf(t, s, "t", "b"), leaf(t, s, "t", "c")
	a.Trip(0, "test")
	b.Trip(0, "test")
	probe := func(settle func(time.Duration, Token)) {
		t.Helper()
		tok, r := a.Admit(sec, 0)
		if !r.OK() {
			t.Fatalf("%+v", r)
		}
		settle(sec, tok)
	}
	fail := func(now time.Duration, tok Token) { a.Failure(now, tok, true) }
	for _, step := range []struct {
		settle func(time.Duration, Token)
		shut   bool
	}{
		{a.Exclude, true}, {a.Success, false}, {fail, false}, {fail, true}, {a.Success, false}, {a.Success, false},
		{fail, false}, {fail, false}, {fail, false}, {fail, true}, {fail, true},
	} {
		probe(step.settle)
		if c.Closed() == step.shut || a.Passing() == step.shut {
			t.Fatalf("closed %v, passing %v, %+v", c.Closed(), a.Passing(), a.Snapshot(sec))
		}
	}
	state(t, a.Breaker, sec, breaker.Open)
	var moves []breaker.State
	for _, ch := range s.Changes(nil) {
		if ch.Scope == "t" {
			moves = append(moves, ch.To)
			if ch.Cause != breaker.CauseQuorum {
				t.Errorf("%+v", ch)
			}
		}
	}
	if want := []breaker.State{breaker.Open, breaker.Closed, breaker.Open, breaker.Closed, breaker.Open}; !slices.Equal(moves, want) {
		t.Errorf("%v, want %v", moves, want)
	}
}

// What a release closes has not recovered, and its change says so; what it opens, by a
// quorum of fewer, it opens as a quorum.
func TestReleaseClosesByItsOwnCause(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	var leaves []*Leaf
	for _, p := range []string{"a", "b", "c", "d", "e"} {
		leaves = append(leaves, leaf(t, s, "g", "t", p), leaf(t, s, "g", "u", p))
	}
	for _, l := range leaves[:4] { // two of five, in each topic
		l.Trip(sec, "test")
	}
	s.Tick(2 * sec)
	s.Changes(nil)
	for _, leaf := range slices.Backward(leaves) {
		s.Release(leaf)
	}
	type move struct {
		scope string
		to    breaker.State
		cause breaker.Cause
	}
	got := map[string][]move{}
	for _, c := range s.Changes(nil) {
		got[c.Scope] = append(got[c.Scope], move{c.Scope, c.To, c.Cause})
	}
	for _, p := range []string{"g", "g/t", "g/u"} {
		if want := []move{{p, breaker.Open, breaker.CauseQuorum}, {p, breaker.Closed, breaker.CauseReleased}}; !slices.Equal(got[p], want) {
			t.Errorf("%s: %v, want %v", p, got[p], want)
		}
	}
	if len(got) != 3 {
		t.Errorf("%v", got)
	}
	// A claim that makes the open ones too few is no release.
	a, b := leaf(t, s, "g", "t", "a"), leaf(t, s, "g", "t", "b")
	for _, l := range []*Leaf{a, b} {
		if l.Closed() {
			t.Fatal("forgotten")
		}
	}
	for _, p := range []string{"c", "d", "e"} {
		leaf(t, s, "g", "t", p)
	}
	if c := s.Changes(nil); len(c) != 2 || c[1].To != breaker.Closed || c[1].Cause != breaker.CauseQuorum {
		t.Errorf("%+v", c)
	}
}

// A claim aside neither votes nor is held; a claim with a part in the same leaf gives it both.
func TestAside(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	aside := func(name string) *Leaf {
		t.Helper()
		l, err := s.Aside("t", name)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	a, b, f := leaf(t, s, "t", "a"), leaf(t, s, "t", "b"), aside("f")
	a.Trip(0, "test")
	f.Trip(0, "test")
	if p := s.Parents()[0]; !b.Closed() || p.Live != 2 || p.Votes != 1 {
		t.Fatalf("a claim aside votes: %+v", p)
	}
	b.Trip(0, "test")
	f.ForceClosed(0, "test")
	if !f.Closed() {
		t.Fatal("a claim aside is held by its parent")
	}
	part := leaf(t, s, "t", "f")
	if p := s.Parents()[0]; f.Closed() || part.Closed() || p.Live != 3 {
		t.Fatalf("a claim with a part is not held: %+v", p)
	}
	s.Release(part)
	if p := s.Parents()[0]; !f.Closed() || p.Live != 2 {
		t.Fatalf("%+v", p)
	}
	s.Release(f)
	if n := s.Evict(time.Hour, 0); n != 1 || s.Len() != 2 {
		t.Fatalf("%d evicted, %d left", n, s.Len())
	}
}

func TestReleaseAndClaim(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	a, b, c := leaf(t, s, "t", "a"), leaf(t, s, "t", "b"), leaf(t, s, "t", "c")
	a.Trip(0, "test")
	b.Trip(0, "test")
	again := leaf(t, s, "t", "a")
	if again.Breaker != a.Breaker {
		t.Fatal("two claims of one scope, two breakers")
	}
	s.Release(a)
	s.Release(a)
	if c.Closed() {
		t.Fatal("released by one of two, and no vote")
	}
	s.Release(again)
	if !c.Closed() {
		t.Fatal("a released child votes")
	}
	if p := s.Parents()[0]; p.Live != 2 || p.Votes != 1 {
		t.Fatalf("%+v", p)
	}
	back := leaf(t, s, "t", "a")
	if back.Snapshot(0).State != breaker.Open || c.Closed() {
		t.Fatal("a scope claimed again has forgotten")
	}
}

func TestEvict(t *testing.T) {
	const idle = 5 * time.Minute
	s := mustScopes(t, ScopesConfig{Limit: 5, Breaker: breaker.Config{Successes: 1}})
	clean, dirty, open, forced, claimed := leaf(t, s, "g", "t", "clean"), leaf(t, s, "g", "t", "dirty"),
		leaf(t, s, "g", "t", "open"), leaf(t, s, "g", "t", "forced"), leaf(t, s, "g", "u", "claimed")
	_, err := s.Leaf("g", "t", "one more")
	if !errors.Is(err, ErrTooManyScopes) || s.Len() != 5 {
		t.Fatalf("%v, %d", err, s.Len())
	}
	_ = claimed
	s.Tick(sec)
	for _, l := range []*Leaf{clean, dirty, open, forced} {
		s.Release(l)
	}
	dirty.Failure(5*time.Minute, enter(t, dirty.Breaker), true)
	open.Trip(5*time.Minute, "test")
	forced.Force(0, 0, "op")
	if n := s.Evict(sec+idle-1, idle); n != 0 {
		t.Fatalf("dropped %d before their time", n)
	}
	if n := s.Evict(sec+idle, idle); n != 1 {
		t.Fatalf("dropped %d, want the clean one", n)
	}
	if n := s.Evict(6*time.Minute, idle); n != 1 {
		t.Fatalf("dropped %d, want the one whose window is clean now", n)
	}
	if n := s.Evict(6*time.Minute+100*ms, idle); n != 1 {
		t.Fatalf("dropped %d, want the open one whose memory is over", n)
	}
	if n := s.Evict(1000*time.Hour, idle); n != 0 || s.Len() != 2 {
		t.Fatalf("dropped %d, %d left; want the claimed and the forced one", n, s.Len())
	}
	if c := s.Changes(nil); len(c) != 2 {
		t.Errorf("changes of a dropped scope are gone: %+v", c)
	}
	leaf(t, s, "g", "t", "one more")
	forced.ForceClosed(0, "op")
	for _, p := range []*Leaf{claimed} {
		s.Release(p)
	}
	s.Tick(2000 * time.Hour)
	if n := s.Evict(2001*time.Hour, idle); n != 2 {
		t.Fatalf("dropped %d", n)
	}
	if p := s.Parents(); len(p) != 2 || p[1].Name != "g/t" {
		t.Fatalf("parents without children stay: %+v", p)
	}
}

func TestPaths(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	for _, p := range [][]string{{}, {""}, {"a", ""}, {"a", "b", "c", "d"}} {
		if _, err := s.Leaf(p...); !errors.Is(err, ErrPath) {
			t.Errorf("%q: %v", p, err)
		}
	}
	if leaf(t, s, "a/b", "c").Breaker == leaf(t, s, "a", "b/c").Breaker {
		t.Error("a slash in a name joins two scopes")
	}
	one := leaf(t, s, "alone")
	if !one.Closed() || one.Name() != "alone" {
		t.Error("a leaf without parents")
	}
	one.Trip(0, "x")
	if _, r := one.Admit(0, 1); r.OK() {
		t.Error("a leaf without parents admits while open")
	}
}

// A parent is open exactly when its live children say so, whatever the order
// of claims, releases, trips, closes and time.
func TestScopesModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := mustScopes(t, ScopesConfig{
			Quorum:  rapid.SampledFrom([]float64{0.3, 0.5, 1}).Draw(rt, "quorum"),
			Breaker: breaker.Config{Successes: rapid.SampledFrom([]int{1, 5}).Draw(rt, "successes")},
		})
		now := time.Duration(0)
		stir := map[*Breaker]time.Duration{} // when a probe was last given or settled
		out := map[*Breaker]int{}
		claims := map[string][]*Leaf{}
		names := []string{"a/0", "a/1", "a/2", "b/0", "b/1", "c/0"}
		path := func(n string) []string { return []string{"g", n[:1], n[2:]} }
		any := func(rt *rapid.T) (string, *Leaf) {
			n := rapid.SampledFrom(names).Draw(rt, "leaf")
			if len(claims[n]) == 0 {
				rt.Skip("unclaimed")
			}
			return n, claims[n][0]
		}
		rt.Repeat(map[string]func(*rapid.T){
			"claim": func(rt *rapid.T) {
				n := rapid.SampledFrom(names).Draw(rt, "leaf")
				claims[n] = append(claims[n], leaf(t, s, path(n)...))
			},
			"release": func(rt *rapid.T) {
				n, l := any(rt)
				s.Release(l)
				claims[n] = claims[n][1:]
			},
			"trip": func(rt *rapid.T) { _, l := any(rt); l.Trip(now, "test") },
			"probe": func(rt *rapid.T) {
				_, l := any(rt)
				tok, r := l.Admit(now, 0)
				if !r.OK() {
					if r.Cause == breaker.CauseQuorum && l.Snapshot(now).State == breaker.Open { // it waits for its turn, and has something to probe with
						stir[l.Breaker] = now
						s.Tick(now)
					}
					return
				}
				stir[l.Breaker] = now
				switch rapid.IntRange(0, 4).Draw(rt, "settle") {
				case 0:
					l.Failure(now, tok, true)
				case 1:
					l.Exclude(now, tok)
				case 2, 3:
					l.Success(now, tok)
				}
				s.Tick(now) // a probe alone, which may bring a vote back, tells nobody
			},
			"evict": func(rt *rapid.T) { s.Evict(now, time.Second) },
			"time": func(rt *rapid.T) {
				now += rapid.SampledFrom([]time.Duration{ms, sec, 31 * sec, 61 * sec}).Draw(rt, "d")
				s.Tick(now)
				for b, was := range out { // of unclaimed leaves, too: they come back
					if n := b.Snapshot(now).ProbesOut; n < was { // lost
						stir[b], out[b] = now, n
					}
				}
			},
			"": func(rt *rapid.T) {
				open := func(votes, live int) bool {
					return votes >= 2 && float64(votes) >= s.cfg.Quorum*float64(live)
				}
				votes, live := map[string]int{}, map[string]int{}
				for _, n := range names {
					if len(claims[n]) == 0 {
						continue
					}
					live[n[:1]]++
					b := claims[n][0].Breaker
					snap := b.Snapshot(now)
					out[b] = snap.ProbesOut
					idle := snap.ProbesOut == 0 && now >= max(snap.Until, snap.Since, stir[b])+30*sec
					if snap.State != breaker.Closed && !idle && !b.Passing() {
						votes[n[:1]]++
					}
				}
				gv, gl := 0, 0
				want := map[string]bool{}
				for topic := range live {
					gl++
					if open(votes[topic], live[topic]) {
						gv++
						want["g/"+topic] = true
					}
				}
				if open(gv, gl) {
					want["g"] = true
				}
				for _, p := range s.Parents() {
					if p.Open != want[p.Name] {
						rt.Fatalf("at %v: %+v, want open %v", now, p, want[p.Name])
					}
				}
			},
		})
	})
}

func TestScopesUnderLoad(t *testing.T) {
	s := mustScopes(t, ScopesConfig{Breaker: breaker.Config{Base: ms, Cap: 5 * ms, Successes: 1, Lease: 10 * ms}})
	origin := time.Now()
	now := func() time.Duration { return time.Since(origin) }
	d := 500 * time.Millisecond
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for n := 0; now() < d; n++ {
				l, err := s.Leaf("g", strconv.Itoa(i%2), strconv.Itoa(n%3))
				if err != nil {
					t.Error(err)
					return
				}
				for k := range 50 {
					tok, ok := l.Enter()
					if !ok {
						tok, _ = l.Admit(now(), uint64(k))
					}
					if (n+k)%3 == 0 {
						l.Failure(now(), tok, true)
					} else {
						l.Success(now(), tok)
					}
				}
				s.Release(l)
			}
		})
	}
	wg.Go(func() {
		var buf []Change
		for now() < d {
			s.Tick(now())
			s.Evict(now(), ms)
			s.Parents()
			buf = s.Changes(buf[:0])
			time.Sleep(ms)
		}
	})
	wg.Wait()
	for _, p := range s.Parents() {
		if p.Live != 0 || p.Votes != 0 || p.Open {
			t.Errorf("all released, yet %+v", p)
		}
	}
}

func TestMemoryOf10kScopes(t *testing.T) {
	s := mustScopes(t, ScopesConfig{})
	before := heap()
	leaves := make([]*Leaf, 10_000)
	for i := range leaves {
		leaves[i] = leaf(t, s, "group", fmt.Sprintf("topic-%d", i%100), strconv.Itoa(i))
	}
	used := heap() - before
	runtime.KeepAlive(leaves)
	t.Logf("%d bytes per scope", used/uint64(len(leaves)))
	if used > 25<<20 {
		t.Errorf("10000 scopes take %d MB, want at most 25", used>>20)
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
