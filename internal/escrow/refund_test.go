// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A token that is given back is there again, one that does not fit is lost, and
// what was never taken is not given.
func TestRefund(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: .001, Burst: 5})
		l.Refund(3)
		if l.AllowN(6) || !l.AllowN(5) || l.Allow() {
			t.Fatal("not a burst of 5")
		}
		l.Refund(2)
		if !l.AllowN(2) || l.Allow() {
			t.Fatal("what was given back is not there")
		}
		l.Refund(100)
		l.Refund(-1)
		if !l.AllowN(5) || l.Allow() {
			t.Fatal("given back: want what fits")
		}
	})
}

// What is lent fills the cap, and a node that has spent nothing of its own has nothing
// to give back, however empty it is.
func TestRefundOfANode(t *testing.T) {
	n, err := NewNode(crdt.Replica{Name: "a"}, Config{
		Limit: Limit{Rate: 10, Burst: 40}, Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}}},
	}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if n.Take(0, "k", 1) || n.Refund(0, "k", 5) != 0 || n.Refund(0, "other", 5) != 0 {
		t.Fatal("a new incarnation has something")
	}
	now := 10 * time.Second
	if !n.Take(now, "k", 15) {
		t.Fatal("not its share")
	}
	r := n.rows["k"]
	lend := func(amount int64) {
		r.level -= amount
		r.lent += amount
		r.sum.Lent += amount
	}
	lend(3 * micro)
	if back := n.Refund(now, "k", 5); back != 5*micro {
		t.Fatalf("%d given back of 5", back)
	}
	now += 5 * time.Second // it is full again, but for what has been lent
	if back := n.Refund(now, "k", 10); back != 0 || r.level+r.lent != r.cap {
		t.Fatalf("%d given back to a full one, level %d, lent %d", back, r.level, r.lent)
	}
	if r.sum.Minted+r.sum.Back != r.level+r.sum.Own+r.sum.Lent {
		t.Error("own tokens do not tie up")
	}
}

// Who waits gets what is given back.
func TestRefundServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: .001, Burst: 2})
		defer l.set.Close()
		l.AllowN(2)
		start := time.Now()
		done := make(chan error)
		go func() { done <- l.WaitN(t.Context(), 2) }()
		synctest.Wait()
		l.Refund(1)
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatal("served by half of what it wants", err)
		default:
		}
		l.Refund(1)
		if err := <-done; err != nil || time.Since(start) > 0 {
			t.Fatal(err, time.Since(start))
		}
	})
}

// However tokens are taken and given back, and whatever time passes between, what
// is used is within burst and rate and what was on its way back when the interval
// began; without such, within burst and rate.
func TestRefundMakesNoTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := Limit{
			Rate:  rapid.SampledFrom([]float64{1, 100, 12345}).Draw(t, "rate"),
			Burst: rapid.SampledFrom([]int{1, 2, 5, 300}).Draw(t, "burst"),
		}
		var now hand
		s, err := New(crdt.Replica{Name: "a"}, Config{Limit: limit}, WithClock(now.read))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l := s.Key("k")
		// all is a bucket in nano-tokens with every token that exists: those that
		// are out included, which therefore keep nobody from filling it.
		level, most, out := int64(limit.Burst)*1e9, int64(limit.Burst)*1e9, 0
		for range 80 {
			if rapid.IntRange(0, 3).Draw(t, "passes") == 0 {
				d := time.Duration(rapid.IntRange(0, 100_000).Draw(t, "µs")) * time.Microsecond
				now.move(d)
				level = max(level, min(most+int64(out)*1e9, level+int64(d)*int64(limit.Rate)))
			}
			n := rapid.SampledFrom([]int{1, 1, 2, limit.Burst}).Draw(t, "n")
			switch rapid.SampledFrom([]string{"use", "take", "give", "at once"}).Draw(t, "what") {
			case "use":
				if l.AllowN(n) {
					level -= int64(n) * 1e9
				}
			case "take":
				if l.AllowN(n) {
					out += n
				}
			case "give":
				n = min(n, out)
				out -= n
				l.Refund(n)
				level = min(level, most+int64(out)*1e9)
			case "at once":
				_, before, _ := l.Level()
				if l.AllowN(n) {
					l.Refund(n)
				}
				if _, after, _ := l.Level(); after != before {
					t.Fatal("taken and given back: the level has changed")
				}
			}
			if level < 0 {
				t.Fatal("more is used than there is")
			}
			v, _ := s.View("k")
			if v.Level > v.Cap || v.Level+v.Sums.Own != v.Sums.Minted || v.Sums.Own < 0 {
				t.Fatal("the books do not tie up")
			}
		}
	})
}

// In a fleet too, where what is spent may have been lent.
func TestRefundInAFleet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 4).Draw(t, "nodes")
		limit := rapid.SampledFrom([]Limit{{1000, 50}, {1000, 400}, {20, 5}, {100, 3}}).Draw(t, "limit")
		f := newFleet(silent{}, n, limit, rapid.Uint64().Draw(t, "seed"))
		f.loss = rapid.SampledFrom([]float64{0, .35}).Draw(t, "loss")
		var err error
		f.probe = func() {
			if err == nil {
				err = f.check()
			}
		}
		for range rapid.IntRange(3, 20).Draw(t, "steps") {
			s := f.nodes[rapid.IntRange(0, n-1).Draw(t, "node")]
			tokens := rapid.IntRange(1, limit.Burst).Draw(t, "tokens")
			now := s.clock(f.now)
			if s.Take(now, "k", tokens) {
				kept := s.Refund(now, "k", tokens)
				f.spent -= int64(tokens)*micro - kept // what found no room is gone
			}
			hot := rapid.IntRange(0, n-1).Draw(t, "hot")
			f.run(f.now+time.Duration(rapid.IntRange(1, 1500).Draw(t, "ms"))*ms, 1.5*limit.Rate, func(time.Duration) int { return hot })
			if err == nil {
				err = f.check()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}
