// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A change of the configuration leaves a customer who was idle what its bucket had.
func TestChangeKeepsIdleBuckets(t *testing.T) {
	for name, c := range map[string]struct {
		change func(c *Configuration)
		want   int // of the first node
	}{
		"reset":          {func(c *Configuration) { c.Resets++ }, 200},
		"another limit":  {func(c *Configuration) { c.Limits = map[string]Limit{"other": {10, 50}} }, 200},
		"a larger rate":  {func(c *Configuration) { c.Limit.Rate *= 2 }, 200},
		"a larger burst": {func(c *Configuration) { c.Limit.Burst *= 2 }, 200},
		"a member less":  {func(c *Configuration) { c.Roster = rosterOf("n00") }, 200},
		"a member more":  {func(c *Configuration) { c.Roster = rosterOf("n00 n01 n02") }, 133},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleetOf(t, 3, Config{Fleet: "f", Limit: Limit{100, 400}, Roster: rosterOf("n00 n01")}, 1)
			f.pass(time.Minute)
			next := f.nodes[0].Configuration()
			next.Number++
			c.change(&next)
			f.adopt(next)
			f.pass(f.now + 2*time.Second)
			f.completed(next.Number)
			s, got := f.nodes[0], 0
			for s.Take(s.clock(f.now), "new", 1) {
				got++
			}
			if got < c.want || got > c.want+1 {
				t.Errorf("%d tokens at once, want %d", got, c.want)
			}
		})
	}
}

// A key that is forgotten, or was never there, has what it would have had with a row: no more
// and no less.
func TestNewRowIsTheOneThatWasThere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := func(t *rapid.T) Limit {
			return Limit{float64(rapid.IntRange(1, 1000).Draw(t, "rate")), rapid.IntRange(1, 2000).Draw(t, "burst")}
		}
		roster := func(t *rapid.T) (r Roster) {
			for _, name := range []string{"a", "b", "c"} {
				if w := rapid.IntRange(0, 3).Draw(t, name); w > 0 || name == "a" {
					r.Members = append(r.Members, Member{Name: name, Weight: max(w, 1)})
				}
			}
			return r
		}
		cfg := Config{Fleet: "f", Limit: limit(t), Roster: roster(t)}
		n, err := NewNode(crdt.Replica{Name: "a", Incarnation: 1}, cfg, 0)
		if err != nil {
			t.Fatal(err)
		}
		now := time.Duration(0)
		kept := n.row("k")
		t.Repeat(map[string]func(*rapid.T){
			"time": func(t *rapid.T) {
				now += time.Duration(rapid.Int64Range(1, int64(20*time.Second)).Draw(t, "time"))
				n.advance(now)
			},
			"adopt": func(t *rapid.T) {
				c := n.Configuration()
				c.Number += uint64(rapid.IntRange(1, 2).Draw(t, "number"))
				switch rapid.IntRange(0, 3).Draw(t, "what") {
				case 0:
					c.Limit = limit(t)
				case 1:
					c.Roster = roster(t)
				case 2:
					c.Limits = map[string]Limit{"k": limit(t)}
				default:
					c.Resets++
				}
				if err := n.Adopt(now, c); err != nil {
					t.Fatal(err)
				}
			},
			"complete": func(t *rapid.T) {
				n.Complete(now, rapid.Uint64Range(1, n.newest().Number).Draw(t, "number"))
			},
			"fence": func(*rapid.T) { n.Mint(now) },
			"lift":  func(*rapid.T) { n.Mint(never) },
			"": func(t *rapid.T) {
				kept.update(now, n.mintAt)
				made := newRow(n, "k")
				made.update(now, n.mintAt)
				if made.cap != kept.cap || made.rate != kept.rate || made.level > kept.level ||
					len(n.eras) < mostEras && made.level < kept.level-mostEras {
					t.Fatalf("%d of %d, and one that was there has %d of %d", made.level, made.cap, kept.level, kept.cap)
				}
				if s := made.sum; s.Minted+s.Refilled != made.level+s.Trimmed {
					t.Fatalf("level %d: %+v", made.level, s)
				}
			},
		})
	})
}

// Keys that rest while a configuration is new are forgotten, too.
func TestRestingKeysAreForgottenAfterAChange(t *testing.T) {
	f := newFleetOf(t, 2, Config{Fleet: "f", Limit: Limit{100, 400}, Roster: rosterOf("n00 n01")}, 1)
	f.pass(time.Minute)
	s := f.nodes[0]
	for i := range 50 {
		if !s.Take(s.clock(f.now), string(rune('A'+i)), 1) {
			t.Fatalf("key %d is denied", i)
		}
	}
	next := s.Configuration()
	next.Number++
	next.Limits = map[string]Limit{"other": {10, 50}}
	f.adopt(next)
	f.completed(next.Number)
	f.pass(f.now + time.Minute)
	if n := len(s.rows); n > 1 {
		t.Errorf("%d keys are known, a minute after their last use", n)
	}
}
