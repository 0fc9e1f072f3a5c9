// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
)

// handOver saves b at now, and restores it later, by way of the text that is written.
func handOver(t *testing.T, b *Breaker, now, later time.Duration, stale bool) *Breaker {
	t.Helper()
	s, ok := b.Save(now)
	next := must(t, b.Config())
	if !ok {
		return next
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var read Saved
	if err := json.Unmarshal(text, &read); err != nil || read != s {
		t.Fatalf("%+v came back as %+v, %v", s, read, err)
	}
	if !next.Restore(later, read, stale) {
		t.Fatal("a new breaker was not restored")
	}
	return next
}

func TestRestore(t *testing.T) {
	const now = 100 * sec
	for _, c := range []struct {
		name  string
		leave func(*Breaker)
		age   time.Duration
		stale bool
		until time.Duration // refused until then; 0: a probe is admitted at once
		cause breaker.Cause
		level int
	}{
		{name: "open", leave: func(b *Breaker) { b.Hold(0, 9, "x"); b.Unhold(now); b.Trip(now, "rate") }, age: sec, until: now + 10*sec, cause: "rate", level: 9},
		{name: "open, over", leave: func(b *Breaker) { trip(t, b, now) }, age: sec, cause: breaker.CauseRun, level: 1},
		{name: "open, stale", leave: func(b *Breaker) { b.Hold(0, 9, "x"); b.Unhold(now); b.Trip(now, "rate") }, stale: true, cause: "rate", level: 9},
		{name: "half-open", leave: func(b *Breaker) { trip(t, b, now-sec); admit(t, b, now) }, cause: breaker.CauseRun, level: 1},
		{name: "held", leave: func(b *Breaker) { b.Hold(now, 3, "fleet") }, cause: "fleet", level: 3},
		{name: "forced", leave: func(b *Breaker) { b.Force(now, 1000*sec, "operator") }, age: 900 * sec, stale: true, until: now + 1000*sec, cause: "operator", level: 1},
		{name: "forced, behind a longer period", leave: func(b *Breaker) {
			b.Hold(0, 9, "x")
			b.Unhold(now)
			b.Trip(now, "rate")
			b.Force(now, 5*sec, "operator")
		}, age: sec, stale: true, until: now + 10*sec, cause: "rate", level: 9},
		{name: "longer than a period may be", leave: func(b *Breaker) {
			b.Hold(0, 9, "x")
			b.Unhold(now)
			b.Trip(now, "rate")
			b.epoch.Load().until.Store(int64(5000 * sec))
		}, until: now + 30*sec, cause: "rate", level: 9},
		{name: "forced, over", leave: func(b *Breaker) { b.Force(now, 1000*sec, "operator") }, age: 1001 * sec, cause: "operator", level: 1},
		{name: "forced without end", leave: func(b *Breaker) { b.Force(now, 0, "operator") }, age: 1001 * sec, stale: true, until: never, cause: "operator", level: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := must(t, breaker.Config{})
			c.leave(b)
			later := now + c.age
			next := handOver(t, b, now, later, c.stale)
			s := next.Snapshot(later)
			if s.Cause != c.cause || s.BackoffLevel != c.level {
				t.Errorf("it begins as %+v; want cause %q, level %d", s, c.cause, c.level)
			}
			if c.until == 0 {
				state(t, next, later, breaker.HalfOpen)
				admit(t, next, later)
				return
			}
			if s.Forced {
				next.Hold(later, 5, "fleet")
				next.Hasten(later)
			}
			if r := refused(t, next, later); r.Until != c.until || r.Cause != c.cause {
				t.Errorf("refused until %v, want %v", r.Until, c.until)
			}
			if c.until == never {
				next.Release(later)
				admit(t, next, later)
				return
			}
			refused(t, next, c.until-1)
			admit(t, next, c.until)
		})
	}
}

// The level outlives a close by Memory, over a restart as well.
func TestRestoreOfClosed(t *testing.T) {
	b := must(t, breaker.Config{})
	if s, ok := b.Save(0); ok {
		t.Errorf("a breaker at rest leaves %+v", s)
	}
	b.Hold(0, 5, "x")
	b.CloseHeld(0, "x")
	memory := b.Config().Memory
	for age, level := range map[time.Duration]int{memory - sec: 4, memory + sec: 1} {
		next := handOver(t, b, 0, age, true)
		state(t, next, age, breaker.Closed)
		trip(t, next, age)
		if s := next.Snapshot(age); s.BackoffLevel != level {
			t.Errorf("after %v it trips at level %d, want %d", age, s.BackoffLevel, level)
		}
	}
	if _, ok := b.Save(memory + sec); ok {
		t.Error("a forgotten level is saved")
	}
}

// Only a new breaker is restored: what this process has learned is newer.
func TestRestoreOfUsed(t *testing.T) {
	b := must(t, breaker.Config{})
	b.ForceClosed(0, "operator")
	if b.Restore(0, Saved{State: breaker.Open, Until: sec}, false) {
		t.Error("restored")
	}
	state(t, b, 0, breaker.Closed)
	if must(t, breaker.Config{}).Restore(0, Saved{State: 7}, false) {
		t.Error("restored to a state that is none")
	}
}

// A restarted tree has the votes of what it was told, and lets them go as the leaves close.
func TestRestoreVotes(t *testing.T) {
	tree := func() (*Scopes, []*Leaf) {
		s, err := NewScopes(ScopesConfig{})
		if err != nil {
			t.Fatal(err)
		}
		var leaves []*Leaf
		for _, p := range []string{"0", "1", "2"} {
			l, err := s.Leaf("g", "t", p)
			if err != nil {
				t.Fatal(err)
			}
			leaves = append(leaves, l)
		}
		return s, leaves
	}
	s, leaves := tree()
	for _, l := range leaves[:2] {
		l.Trip(0, "rate")
	}
	saved := s.Save(0, nil)
	if len(saved) != 2 || !s.Parents()[1].Open {
		t.Fatalf("%d scopes saved, parents %+v", len(saved), s.Parents())
	}
	again, leaves := tree()
	for _, sc := range saved {
		for _, l := range leaves {
			if l.Name() == "g/t/"+sc.Path[2] {
				l.Restore(0, sc.Saved, false)
			}
		}
	}
	if p := again.Parents(); !p[1].Open || p[1].Votes != 2 {
		t.Errorf("parents after the restart: %+v", p)
	}
	for _, l := range leaves {
		l.ForceClosed(0, "operator")
	}
	if p := again.Parents(); p[1].Open {
		t.Errorf("parents after the leaves closed: %+v", p)
	}
}

// Whatever the breaker has seen, a restart never admits more than going on would have:
// nothing in a force, nothing in an open period that is fresh, and only probes after one.
func TestRestoreProperties(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		b, err := New("b", breaker.Config{})
		if err != nil {
			r.Fatal(err)
		}
		now := time.Duration(0)
		var out []Token
		for range rapid.IntRange(0, 30).Draw(r, "steps") {
			now += time.Duration(rapid.IntRange(0, 3000).Draw(r, "ms")) * time.Millisecond
			switch rapid.IntRange(0, 9).Draw(r, "what") {
			case 0:
				b.Force(now, time.Duration(rapid.IntRange(0, 20).Draw(r, "for"))*sec, "operator")
			case 1:
				b.Release(now)
			case 2:
				b.Hold(now, rapid.IntRange(0, 12).Draw(r, "level"), "fleet")
			case 3:
				b.Unhold(now)
			case 4:
				b.Trip(now, "rate")
			case 5:
				b.Permit(now)
			default:
				if k, refusal := b.Admit(now, 0); refusal == (Refusal{}) {
					out = append(out, k)
				}
				if len(out) > 0 {
					if rapid.Bool().Draw(r, "ok") {
						b.Success(now, out[0])
					} else {
						b.Failure(now, out[0], true)
					}
					out = out[1:]
				}
			}
		}
		was := b.Snapshot(now)
		s, ok := b.Save(now)
		if !ok && was.State != breaker.Closed {
			r.Fatalf("%+v leaves nothing", was)
		}
		age := time.Duration(rapid.IntRange(0, 60_000).Draw(r, "age")) * time.Millisecond
		stale := rapid.Bool().Draw(r, "stale")
		next, err := New("b", breaker.Config{})
		if err != nil {
			r.Fatal(err)
		}
		if ok {
			next.Restore(now+age, s, stale)
		}
		is := next.Snapshot(now + age)
		if (was.State == breaker.Closed) != (is.State == breaker.Closed) {
			r.Fatalf("%+v became %+v", was, is)
		}
		if is.BackoffLevel > was.BackoffLevel+1 {
			r.Fatalf("%+v became %+v", was, is)
		}
		if was.State == breaker.Closed || was.Held {
			return
		}
		left := was.Until - now - age
		if was.Until == never {
			left = never
		}
		k, refusal := next.Admit(now+age, 0)
		admitted := refusal == (Refusal{})
		if left > 0 && was.State == breaker.Open && (was.Forced || was.Barred || !stale) && admitted {
			r.Fatalf("%+v, %v later, admitted; now %+v", was, age, is)
		}
		if left <= 0 && !admitted {
			r.Fatalf("%+v, %v later, refused: %+v", was, age, refusal)
		}
		if admitted && k.probe == nil {
			r.Fatalf("%+v admits more than a probe", is)
		}
	})
}
