// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func rosterOf(names string) (r Roster) {
	for name := range strings.FieldsSeq(names) {
		r.Members = append(r.Members, Member{Name: name})
	}
	return r
}

// changed is the next configuration after c's.
func changed(c Configuration, change func(*Configuration)) Configuration {
	c.Number++
	change(&c)
	return c
}

// all adopt and complete.
func (f *fleet) adopt(c Configuration) {
	f.t.Helper()
	for i, s := range f.nodes {
		if err := s.Adopt(s.clock(f.now), c); err != nil {
			f.t.Fatal(err)
		}
		f.settleNode(i)
	}
}

func (f *fleet) completed(number uint64) {
	for i, s := range f.nodes {
		s.Complete(s.clock(f.now), number)
		f.settleNode(i)
	}
}

// A node skips a configuration in which it has half, applies the next one, and so
// completes the one that it skipped: the other half is another's now.
func TestSkippedConfigurationIsCompletedByWhoSkippedIt(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 50}, Roster: rosterOf("n00")}
	f := newFleetOf(silent{}, 2, cfg, 1)
	a := newNotary(f)
	for _, names := range []string{"n00 n01", "n00"} {
		a.add(changed(a.newest(), func(c *Configuration) { c.Roster = rosterOf(names) }))
	}
	for i, number := range []uint64{3, 2} {
		if err := a.tell(i, number); err != nil {
			t.Fatal(err)
		}
	}
	f.pass(2 * writeOff) // no earlier incarnation has lent anything
	if a.finish(); a.complete != 2 {
		t.Fatalf("configuration %d is complete", a.complete)
	}
	for i, s := range f.nodes {
		a.told(i)
		f.key(s)
	}
	if err := a.check(); err != nil {
		t.Error(err)
	}
	if r := f.nodes[1].rows["k"]; r.cap != 25*micro {
		t.Errorf("a cap of %d: nobody was there to use the other half", r.cap)
	}
}

// Who left, and starts again before its first incarnation is over for all, is refused.
func TestNewIncarnationOfALeaver(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 50}, Roster: rosterOf("a b")}
	incarnation := func(name string, incarnation uint64) *Node {
		n, err := NewNode(crdt.Replica{Name: name, Incarnation: incarnation}, cfg, 0)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	a := incarnation("a", 1)
	says := func(from *Node) error {
		b, _ := from.Delta(ms, nil, a.self, 0, 1200)
		return a.Merge(crdt.Contact{From: from.self, Now: ms, Sent: 1}, b)
	}
	if err := says(incarnation("b", 1)); err != nil {
		t.Fatal(err)
	}
	if err := a.Adopt(ms, changed(cfg.Configuration(), func(c *Configuration) { c.Roster = rosterOf("a") })); err != nil {
		t.Fatal(err)
	}
	a.Complete(ms, 2)
	if p := a.peers["b"]; p == nil || p.leaving == never {
		t.Fatalf("%+v", p)
	}
	if err := says(incarnation("b", 2)); !errors.Is(err, errMismatch) {
		t.Error(err)
	}
}

func TestSharesOfConfigurations(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 100}, Limits: map[string]Limit{"k": {Rate: 400, Burst: 40}}, Roster: rosterOf("a b")}
	n, err := NewNode(crdt.Replica{Name: "a"}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	limit := func(rate float64, burst int) func(*Configuration) {
		return func(c *Configuration) { c.Limits = map[string]Limit{"k": {rate, burst}} }
	}
	first := cfg.Configuration()
	smaller := changed(first, limit(200, 40))
	larger := changed(smaller, limit(800, 80))
	mine := changed(larger, func(c *Configuration) { c.Limits, c.Roster = nil, rosterOf("a") })
	gap := changed(mine, func(c *Configuration) { c.Number += 2 })
	again := changed(gap, func(c *Configuration) { c.Number++ })
	row := n.row("k")
	for i, step := range []struct {
		adopt     *Configuration
		complete  uint64
		rate, cap float64
	}{
		{nil, 0, 200, 20},
		{&smaller, 0, 100, 20},        // at once
		{&larger, 0, 100, 20},         // not yet
		{&smaller, 0, 100, 20},        // an old one
		{nil, 2, 100, 20},             // smaller counts, and larger
		{nil, 3, 400, 40},             // larger alone
		{&mine, 0, 400, 40},           // Limit instead, all of it: not yet
		{nil, 4, 1000, 100},           //
		{&gap, 0, 0, 0},               // what was skipped is unknown
		{nil, 6, 0, 0},                // and stays so when it is complete
		{nil, 7, 1000, 100},           //
		{&again, 8, 0, 0},             //
		{nil, 100, 1000, 100},         // more than there is here
		{nil, 9, 1000, 100},           // late
		{&Configuration{}, 0, -1, -1}, // none
		{&again, 0, 1000, 100},        // the same again
		{&Configuration{Number: 200, Limit: first.Limit}, 0, -1, -1}, // nobody mints
		{&Configuration{Number: again.Number, Limit: first.Limit, Roster: first.Roster}, 0, -2, -2},
	} {
		var err error
		if step.adopt != nil {
			err = n.Adopt(0, *step.adopt)
		}
		n.Complete(0, step.complete)
		switch {
		case step.rate == -1 && !errors.Is(err, ErrConfig), step.rate == -2 && !errors.Is(err, errMismatch), step.rate >= 0 && err != nil:
			t.Fatalf("step %d: %v", i, err)
		case step.rate < 0:
			continue
		}
		if rate := float64(row.rate) / 1e9 * (1 + drift*1e-6); rate < step.rate-1e-6 || rate > step.rate+1e-6 || row.cap != int64(step.cap*micro) {
			t.Errorf("step %d: rate %v, cap %v, want %v, %v", i, rate, row.cap/micro, step.rate, step.cap)
		}
	}
	if n.refused.Mismatch != 1 || n.Configuration().Number != again.Number {
		t.Errorf("%+v, configuration %d", n.refused, n.Configuration().Number)
	}
	// An incarnation that knows the initial configuration only does not know what it lost since.
	late, err := NewNode(crdt.Replica{Name: "a"}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := late.Adopt(0, again); err != nil {
		t.Fatal(err)
	}
	r := late.row("k")
	if r.rate != 0 || r.cap != 0 {
		t.Errorf("a late incarnation uses %d of %d", r.rate, r.cap)
	}
	if late.Applied() != 0 {
		t.Error("a late incarnation keeps within a configuration, and nobody knows what an earlier one has lent")
	}
	if late.advance(writeOff); late.Applied() != again.Number {
		t.Errorf("applied %d after a write-off", late.Applied())
	}
	if late.Complete(0, again.Number); r.cap != 100*micro {
		t.Errorf("a late incarnation uses %d when all is complete", r.cap)
	}
}

// Who loses is who has less of some key, and only those.
func TestLosers(t *testing.T) {
	keys := []string{"k", "l"}
	for i := range 800 {
		keys = append(keys, fmt.Sprint("key", i))
	}
	rapid.Check(t, func(t *rapid.T) {
		draw := func() (c Configuration) {
			limit := rapid.SampledFrom([]Limit{{100, 10}, {100, 100}, {200, 100}, {1000, 50}, {5, 5}})
			c.Number, c.Limit = 1, limit.Draw(t, "limit")
			for _, k := range keys[:2] {
				if rapid.Bool().Draw(t, "own") {
					if c.Limits == nil {
						c.Limits = map[string]Limit{}
					}
					c.Limits[k] = limit.Draw(t, "limit")
				}
			}
			for _, name := range []string{"a", "b", "c", "d", "e"} {
				if w := rapid.IntRange(-1, 2).Draw(t, "weight"); w >= 0 {
					c.Roster.Members = append(c.Roster.Members, Member{Name: name, Weight: w, NoShare: w == 0})
				}
			}
			if sum, _ := c.Roster.weights(); sum == 0 {
				c.Roster = rosterOf("a")
			}
			return c
		}
		from, to := draw(), draw()
		a, b := newTerm(from), newTerm(to)
		var want []string
		for _, m := range from.Roster.Members {
			for _, key := range keys {
				burstA, rateA := a.share(m.Name, a.limit(key), a.owner(key))
				burstB, rateB := b.share(m.Name, b.limit(key), b.owner(key))
				if burstB < burstA || rateB < rateA {
					want = append(want, m.Name)
					break
				}
			}
		}
		if got := Losers(from, to); !slices.Equal(got, want) {
			t.Fatalf("%v lose, want %v", got, want)
		}
		if got := Losers(from, from); len(got) != 0 {
			t.Fatalf("%v lose by nothing", got)
		}
	})
}

// Who has borrowed for good, and does not spend, has it no longer than a lease
// when the limit is cut.
func TestCutEndsLeases(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 4, Burst: 400}, Roster: rosterOf("n00 n01")}
	f := newFleetOf(t, 2, cfg, 1)
	f.pass(110 * time.Second)
	s := f.nodes[1]
	s.demand(f.key(s), 400*micro) // and never served
	f.settleNode(1)
	f.pass(f.now + 3*time.Second)
	lent := f.key(f.nodes[0]).lent
	if lent < 100*micro || f.nodes[0].Applied() != 1 {
		t.Fatalf("%d are lent, applied %d", lent/micro, f.nodes[0].Applied())
	}
	trimmed := f.key(s).level
	f.adopt(changed(cfg.Configuration(), func(c *Configuration) { c.Limit.Burst = 40 }))
	if got := f.nodes[0].Applied(); got != 1 {
		t.Fatalf("configuration %d is applied with %d lent of %d", got, f.key(f.nodes[0]).lent, f.key(f.nodes[0]).cap)
	}
	if r := f.key(s); r.level > 20*micro || r.sum.Trimmed < trimmed-20*micro || s.Applied() != 2 {
		t.Errorf("the other has %d, lost %d of %d, applied %d", r.level, r.sum.Trimmed, trimmed, s.Applied())
	}
	f.pass(f.now + writeOff + sweepEvery)
	if r := f.key(f.nodes[0]); f.nodes[0].Applied() != 2 || r.level+r.lent > 20*micro || f.nodes[0].overCapRows != 0 {
		t.Errorf("a write-off later configuration %d is applied, %d lent of %d", f.nodes[0].Applied(), r.lent, r.cap)
	}
	for _, p := range f.nodes[0].slots {
		if p != nil && p.pinned != 0 {
			t.Errorf("%v is pinned %d times", p.id, p.pinned)
		}
	}
	f.completed(2)
	if r := f.key(f.nodes[0]); r.burst != 40*micro {
		t.Errorf("burst %d", r.burst)
	}
}

// What grows does so when the configuration is complete, and what a node of another
// number lends is as good.
func TestNumbersLendToEachOther(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 400}, Roster: rosterOf("n00 n01")}
	f := newFleetOf(t, 2, cfg, 1)
	f.pass(3 * time.Second)
	c := changed(cfg.Configuration(), func(c *Configuration) { c.Limit.Rate = 2000 })
	if err := f.nodes[0].Adopt(f.nodes[0].clock(f.now), c); err != nil {
		t.Fatal(err)
	}
	f.run(f.now+2*time.Second, 2000, func(time.Duration) int { return 1 })
	if r := f.key(f.nodes[1]); r.sum.Borrowed < 800*micro || f.over > 1e-6 || f.refused > 0 {
		t.Errorf("%d borrowed, %v over, %d refused", r.sum.Borrowed/micro, f.over, f.refused)
	}
	other := changed(c, func(c *Configuration) { c.Number, c.Limit.Rate = 2, 3000 })
	if err := f.nodes[1].Adopt(f.nodes[1].clock(f.now), other); err != nil {
		t.Fatal(err)
	}
	f.pass(f.now + 200*ms)
	if a, b := f.nodes[0].refused.Mismatch, f.nodes[1].refused.Mismatch; a == 0 || b == 0 || f.nodes[0].Stats(0).Refused.Mismatch != a {
		t.Errorf("two configurations of one number: %d and %d packets refused", a, b)
	}
	// Those of another fleet are too.
	cfg.Fleet = "g"
	n, err := NewNode(crdt.Replica{Name: "n01", Incarnation: 1}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := n.Delta(0, nil, f.nodes[0].self, 0, 1200)
	if err := f.nodes[0].Merge(crdt.Contact{From: n.self, Now: f.nodes[0].Node.now, Sent: 1}, b); !errors.Is(err, errMismatch) {
		t.Errorf("another fleet: %v", err)
	}
}

// A reset fills once per node and configuration, and never beyond the cap.
func TestResetFillsOnce(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1, Burst: 400}, Roster: rosterOf("n00 n01")}
	f := newFleetOf(t, 2, cfg, 1)
	f.pass(2 * time.Second)
	reset := func(c *Configuration) { c.Resets++ }
	c := changed(cfg.Configuration(), reset)
	for _, s := range f.nodes {
		f.key(s)
	}
	for round, want := range []int64{400, 400, 400, 400, 400, 800} {
		switch round {
		case 2:
			f.completed(2)
		case 3: // spent, and no reset
			for _, s := range f.nodes {
				r := f.key(s)
				s.spend(r, r.level)
			}
			c = changed(c, func(c *Configuration) { c.Limit.Rate = 2 })
		case 5:
			c = changed(c, reset)
		}
		f.adopt(c)
		refilled := int64(0)
		for _, s := range f.nodes {
			r := f.key(s)
			refilled += r.sum.Refilled
			if r.level+r.lent > r.cap {
				t.Fatalf("%d of %d", r.level+r.lent, r.cap)
			}
		}
		if refilled > want*micro || refilled < (want-8)*micro {
			t.Fatalf("round %d: %d refilled, want %d", round, refilled/micro, want)
		}
	}
}

func (n *Node) spend(r *row, amount int64) {
	r.mint(n.now, n.mintAt)
	r.spend(min(amount, r.level))
}

// What a lender gets back after a cut does not fill it above its cap, and neither
// does a reset while much of it is lent.
func TestCutAndResetWithLoansOut(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 4, Burst: 400}, Roster: rosterOf("n00 n01")}
	f := newFleetOf(t, 2, cfg, 1)
	f.pass(110 * time.Second)
	lender, s := f.nodes[0], f.nodes[1]
	s.demand(f.key(s), 300*micro) // and never served
	f.settleNode(1)
	f.pass(f.now + time.Second)
	within := func() {
		t.Helper()
		if r := f.key(lender); r.level+r.lent > r.cap {
			t.Errorf("%d and %d lent, of %d", r.level, r.lent, r.cap)
		}
	}
	c := changed(cfg.Configuration(), func(c *Configuration) { c.Resets++ })
	f.adopt(c)
	within()
	f.completed(2)
	if lent := f.key(lender).lent; lent < 90*micro {
		t.Fatalf("%d lent", lent)
	}
	within()
	f.adopt(changed(c, func(c *Configuration) { c.Limit.Burst = 40 }))
	if lender.Applied() != 2 {
		t.Fatal("a cut is applied with loans out")
	}
	s.Withdraw(s.clock(f.now), "k", 300) // and so returned
	f.settleNode(1)
	f.pass(f.now + 500*ms)
	within()
	if r := f.key(lender); r.lent != 0 || r.sum.Back < 90*micro || lender.Applied() != 3 {
		t.Errorf("%d lent, %d back, applied %d", r.lent, r.sum.Back, lender.Applied())
	}
}

// A name that is in no roster any more is forgotten, a write-off later.
func TestDepartedAreForgotten(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 100}, Roster: rosterOf("n00 n01 n02")}
	f := newFleetOf(t, 3, cfg, 1)
	f.run(3*time.Second, 1200, func(time.Duration) int { return 2 })
	c := changed(cfg.Configuration(), func(c *Configuration) { c.Roster = rosterOf("n00 n01") })
	f.adopt(c)
	f.run(f.now+500*ms, 1200, func(time.Duration) int { return 2 })
	if f.nodes[0].Node.peers["n02"] == nil || f.refused > 0 {
		t.Fatalf("forgotten before the configuration is complete, %d refused", f.refused)
	}
	f.completed(2)
	f.run(f.now+writeOff-50*ms, 1200, func(time.Duration) int { return 2 })
	if f.nodes[0].Node.peers["n02"] == nil || f.refused > 0 {
		t.Fatalf("forgotten before a write-off has passed, %d refused", f.refused)
	}
	f.run(f.now+3*time.Second, 1200, func(time.Duration) int { return 2 })
	for _, s := range f.nodes[:2] {
		p := s.Node.peers["n02"]
		b, _ := s.Delta(s.Node.now, nil, p.id, p.acked, 1200)
		if !p.detached || p.lent.some() || p.held.some() || len(b) != 0 || s.Mark(p.id) != p.acked {
			t.Errorf("%s still deals with it: %+v", s.self.Name, p)
		}
	}
	if f.over > 1e-6 || f.refused == 0 {
		t.Errorf("%v over, %d refused", f.over, f.refused)
	}
	// The same incarnation comes back, and is served again.
	f.refused = 0
	f.adopt(changed(c, func(c *Configuration) { c.Roster = cfg.Roster }))
	f.completed(3)
	before := f.admitted
	f.run(f.now+3*time.Second, 1200, func(time.Duration) int { return 2 })
	if f.over > 1e-6 || f.refused != 0 || f.admitted-before < 2900 {
		t.Errorf("%v over, %d refused, %d admitted", f.over, f.refused, f.admitted-before)
	}
}

// A fence ends minting, spending and lending, and empties the pool without a call.
func TestFence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := monotonic()
		s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 1000, Burst: 400}}, WithClock(clock))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l := s.Key("k")
		l.Allow() // fills the pool
		s.Mint(100 * ms)
		time.Sleep(99 * ms)
		if !l.Allow() {
			t.Error("denied before the fence")
		}
		time.Sleep(2 * ms)
		if l.pool.left() != 0 || l.Allow() {
			t.Errorf("%d in the pool behind the fence", l.pool.left())
		}
		if st := s.Stats(); !st.Fenced || st.Level != 0 {
			t.Errorf("%+v", st)
		}
		l.Refund(1)
		if st := s.Stats(); st.Level != 0 || l.Allow() {
			t.Errorf("a refund behind the fence counts: %+v", st)
		}
		time.Sleep(time.Second)
		s.Mint(never)
		if l.Allow() {
			t.Error("what passed behind the fence was minted")
		}
		time.Sleep(100 * ms)
		v, _ := s.View("k")
		if v.Level != 100*micro || v.Sums.Minted-v.Sums.Own-v.Sums.Trimmed != v.Level {
			t.Errorf("%+v", v)
		}
	})
}

// Behind its fence a lender renews nothing, and what comes back is void.
func TestFencedLender(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 100, Burst: 400}, Roster: rosterOf("n00 n01")}
	f := newFleetOf(t, 2, cfg, 1)
	f.pass(6 * time.Second)
	s, lender := f.nodes[1], f.nodes[0]
	s.demand(f.key(s), 400*micro)
	f.settleNode(1)
	f.pass(f.now + time.Second)
	if f.key(lender).lent < 50*micro {
		t.Fatal("nothing lent")
	}
	lender.advance(lender.clock(f.now))
	lender.Mint(0)
	f.settleNode(0)
	if r := f.key(lender); r.level != 0 || r.lent == 0 {
		t.Fatalf("level %d, lent %d", r.level, r.lent)
	}
	f.pass(f.now + writeOff + sweepEvery)
	if r := f.key(lender); r.level != 0 || r.lent != 0 {
		t.Errorf("a write-off later: level %d, lent %d", r.level, r.lent)
	}
	if r := f.key(s); r.held != 0 {
		t.Errorf("%d are still held", r.held)
	}
}

// A lender that stood still for longer than a write-off does not renew what its
// borrower may have forgotten.
func TestNoRenewalAfterTheWriteOff(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := 2 * time.Second
	b.Demand(now, "k", 80)
	talk := func() {
		b.Tick(now)
		_, err1 := say(now, b, a)
		a.Tick(now)
		_, err2 := say(now, a, b)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		now += 10 * ms
	}
	for range 6 {
		talk()
	}
	p := a.peers["b"]
	if !p.lent.some() {
		t.Fatal("nothing lent")
	}
	was := p.renewed
	now += 5 * time.Second
	if _, err := say(now, b, a); err != nil { // before any sweep
		t.Fatal(err)
	}
	if a.Delta(now, nil, b.self, 0, 1200); p.renewed != was || !a.fresh(p) {
		t.Errorf("renewed to %v, was %v, fresh %v", p.renewed, was, a.fresh(p))
	}
}

// Who waits for more than there can be is told so.
func TestCutEndsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := monotonic()
		cfg := Config{Limit: Limit{Rate: 100, Burst: 50}}
		s, err := New(crdt.Replica{Name: "a"}, cfg, WithClock(clock))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l := s.Key("k")
		if !l.AllowN(50) {
			t.Fatal("denied within the burst")
		}
		var all sync.WaitGroup
		wait := func(n int, want error) {
			all.Go(func() {
				if err := l.WaitN(t.Context(), n); !errors.Is(err, want) {
					t.Errorf("%d: %v, want %v", n, err, want)
				}
			})
			synctest.Wait()
		}
		wait(40, ErrBurst)
		wait(5, nil)
		wait(30, ErrBurst)
		wait(20, nil)
		if err := s.Adopt(clock(), changed(cfg.Configuration(), func(c *Configuration) { c.Limit.Burst = 20 })); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		all.Wait()
		if took := time.Since(start); took != 250*ms {
			t.Errorf("25 at 100/s took %v", took)
		}
		if l.AllowN(21) || s.Applied() != 2 || s.Configuration().Limit.Burst != 20 || s.Completed() != 1 {
			t.Errorf("applied %d, completed %d", s.Applied(), s.Completed())
		}
		s.Complete(clock(), 2)
		if s.Completed() != 2 {
			t.Error("not complete")
		}
	})
}

// TakeOver begins with mutual silence, ends with a packet, and brings no burst.
func TestTakeOver(t *testing.T) {
	cfg := Config{Limit: Limit{Rate: 1000, Burst: 90}, Roster: rosterOf("n00 n01 n02"), OnSilence: Silence{Policy: TakeOver, After: 2 * time.Second}}
	f := newFleetOf(t, 3, cfg, 1)
	f.pass(3 * time.Second)
	rate := func(i int) float64 {
		f.settleNode(i)
		return float64(f.key(f.nodes[i]).rate) / 1e9 * (1 + drift*1e-6)
	}
	is := func(want ...float64) {
		t.Helper()
		for i, w := range want {
			if got := rate(i); got < w-.001 || got > w+.001 {
				t.Errorf("at %v node %d mints %v, want %v", f.now, i, got, w)
			}
			if got := f.key(f.nodes[i]).cap; got != 30*micro {
				t.Errorf("node %d has a cap of %d", i, got)
			}
		}
	}
	is(1000./3, 1000./3, 1000./3)
	cut := true
	f.down = func(_ time.Duration, a, b int) bool { return cut && (a == 0 || b == 0) }
	f.pass(f.now + 1900*ms)
	is(1000./3, 1000./3, 1000./3)
	f.pass(f.now + 200*ms)
	is(1000, 500, 500)
	if st := f.nodes[0].Stats(f.nodes[0].clock(f.now)); st.TakenOver != 2 || st.Stranded < .66 || st.Share > .34 {
		t.Errorf("%+v", st)
	}
	cut = false
	f.pass(f.now + 60*ms) // a keep-alive
	is(1000./3, 1000./3, 1000./3)
	// One way is heard: n00 is answered by nobody, but hears.
	f.down = func(_ time.Duration, a, _ int) bool { return a == 0 }
	f.pass(f.now + 4*time.Second)
	is(1000./3, 500, 500)
}

// A member with other settings is refused, and not silent: it mints its share. That is taken over
// when its packets stop, and until they come again.
func TestTakeOverSparesWhoIsRefused(t *testing.T) {
	node := func(name string, after time.Duration) *Node {
		cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 100}, Roster: rosterOf("a b"), OnSilence: Silence{Policy: TakeOver, After: after}}
		n, err := NewNode(crdt.Replica{Name: name, Incarnation: 1}, cfg, 0)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	a, b := node("a", 2*time.Second), node("b", 3*time.Second)
	now := time.Duration(0)
	tell := func(from, to *Node) {
		t.Helper()
		p, _ := from.Delta(now, nil, to.self, 0, 1200)
		if err := to.Merge(crdt.Contact{From: from.self, Now: now, Sent: now}, p); !errors.Is(err, errMismatch) {
			t.Fatal(err)
		}
	}
	pass := func(d time.Duration, packets bool) {
		for until := now + d; now < until; {
			now += 50 * ms
			if packets {
				tell(a, b)
				tell(b, a)
			}
			for _, n := range []*Node{a, b} {
				n.Take(now, "k", 1)
				n.Tick(now)
			}
		}
	}
	is := func(n *Node, want float64) {
		t.Helper()
		if got := float64(n.rows["k"].rate) / 1e9 * (1 + drift*1e-6); got < want-.001 || got > want+.001 {
			t.Errorf("at %v %s mints %v, want %v", now, n.self.Name, got, want)
		}
		if got, want := n.Stats(now).TakenOver, int(want/500)-1; got != want {
			t.Errorf("at %v %s has taken over from %d, want %d", now, n.self.Name, got, want)
		}
	}
	pass(10*time.Second, true)
	is(a, 500)
	is(b, 500)
	pass(1950*ms, false)
	is(a, 500)
	pass(50*ms, false)
	is(a, 1000)
	is(b, 500)
	pass(time.Second, false)
	is(b, 1000)
	tell(b, a)
	is(a, 500)
	is(b, 1000)
}

// Before it may mint a node denies, or admits its share from a bucket of its own.
func TestUntilJoined(t *testing.T) {
	for policy, want := range map[Joining]int{Deny: 0, Open: 100} { // 50 and half a second of 100/s
		cfg := Config{Fleet: "f", Limit: Limit{Rate: 200, Burst: 100}, Roster: rosterOf("a b"), UntilJoined: policy}
		n, err := NewNode(crdt.Replica{Name: "a"}, cfg, 0)
		if err != nil {
			t.Fatal(err)
		}
		n.Mint(0)
		ask := func(from, to time.Duration) (got int) {
			for now := from; now <= to; now += ms {
				if n.Take(now, "k", 1) {
					got++
				}
			}
			return got
		}
		got := ask(0, 500*ms)
		if got != want {
			t.Errorf("%s: %d admitted, want %d", policy, got, want)
		}
		v, _ := n.View(500*ms, "k")
		if v.Sums.Open != int64(want)*micro || v.Sums.Own != 0 {
			t.Errorf("%s: %+v", policy, v)
		}
		n.Mint(never)
		if ask(500*ms+1, 1010*ms); n.joined() {
			t.Errorf("%s: joined before a write-off", policy)
		}
		n.advance(2 * time.Second)
		n.Mint(0) // a later fence opens nothing
		if got := ask(2*time.Second, 3*time.Second); got != 0 {
			t.Errorf("%s: %d admitted behind a later fence", policy, got)
		}
	}
	// Who has no share yet has none here either.
	n, err := NewNode(crdt.Replica{Name: "c"}, Config{Fleet: "f", Limit: Limit{Rate: 200, Burst: 100}, Roster: rosterOf("a b"), UntilJoined: Open}, 0)
	if err != nil || n.Take(ms, "k", 1) {
		t.Errorf("%v: a newcomer without a share was admitted", err)
	}
}

// Figures that say what a fleet lacks.
func TestStats(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 1000, Burst: 100}, Roster: rosterOf("n00 n01 n02 n03")}
	f := newFleetOf(t, 3, cfg, 1)
	f.run(3*time.Second, 1200, func(time.Duration) int { return 1 })
	s := f.nodes[0]
	st := s.Stats(s.clock(f.now))
	if st.Keys != 1 || st.Cap != 25*micro || st.Share != .25 || st.Stranded != .25 || st.Lent == 0 || st.Pinned != 0 || st.Number != 1 || st.Applied != 1 {
		t.Errorf("%+v", st)
	}
	f.down = func(time.Duration, int, int) bool { return true }
	f.pass(f.now + lease/2 + 10*ms)
	if st := s.Stats(s.clock(f.now)); st.Stranded != .75 || st.Pinned != st.Lent || st.Pinned == 0 {
		t.Errorf("cut off: %+v", st)
	}
}

// The cases that chance seldom draws: by weights, limits and owners.
func TestLosersByCase(t *testing.T) {
	same := func(*Configuration) {}
	limit := func(rate float64, burst int) func(*Configuration) {
		return func(c *Configuration) { c.Limit = Limit{Rate: rate, Burst: burst} }
	}
	own := func(rate float64) func(*Configuration) {
		return func(c *Configuration) { c.Limits = map[string]Limit{"k": {Rate: rate, Burst: 1_000_000}} }
	}
	members := func(names string) func(*Configuration) { return func(c *Configuration) { c.Roster = rosterOf(names) } }
	weigh := func(a, b, c int) func(*Configuration) {
		return func(ch *Configuration) {
			for i, w := range []int{a, b, c} {
				ch.Roster.Members[i].Weight, ch.Roster.Members[i].NoShare = w, w == 0
			}
		}
	}
	both := func(f, g func(*Configuration)) func(*Configuration) { return func(c *Configuration) { f(c); g(c) } }
	small, tiny := limit(1000, 3), limit(5, 3)
	for _, c := range []struct {
		what     string
		from, to func(*Configuration)
		want     string
	}{
		{"nothing", same, same, "[]"},
		{"join", same, members("a b c d"), "[a b c]"},
		{"leave", same, members("b c"), "[a]"},
		{"faster", same, limit(2000, 1_000_000), "[]"},
		{"slower", same, limit(999, 1_000_000), "[a b c]"},
		{"less burst", same, limit(1000, 999_999), "[a b c]"},
		{"join and faster", same, both(members("a b c d"), limit(4000, 4_000_000)), "[]"},
		{"heavier", same, weigh(1, 2, 1), "[a c]"},
		{"all heavier", same, weigh(3, 3, 3), "[]"},
		{"no share", same, weigh(1, 0, 1), "[b]"},
		{"a slower key", same, own(1), "[a b c]"},
		{"a faster key", same, own(1001), "[]"},
		{"owners: join", small, both(small, members("a b c d")), "[a b c]"}, // d takes some keys of each
		{"owners: leave", small, both(small, members("b c")), "[a]"},
		{"to owners", same, small, "[a b c]"},
		{"from owners", small, same, "[a b c]"}, // of its own keys each had all the rate
		{"owners: faster", small, limit(2000, 3), "[]"},
		{"a tiny limit: join", tiny, both(tiny, members("a b c d")), "[a b c]"},
		{"a tiny limit: leave", tiny, both(tiny, members("a b")), "[c]"},
		{"a tiny limit: to owners", limit(5, 30), tiny, "[a b c]"},
		{"a tiny limit: from owners", tiny, limit(5, 30), "[a b c]"},
	} {
		from := Configuration{Number: 1, Limit: Limit{Rate: 1000, Burst: 1_000_000}, Roster: rosterOf("a b c")}
		to := Configuration{Number: 1, Limit: from.Limit, Roster: rosterOf("a b c")}
		c.from(&from)
		c.to(&to)
		if got := fmt.Sprint(Losers(from, to)); got != c.want {
			t.Errorf("%s: %s lose, want %s", c.what, got, c.want)
		}
	}
}

// A key that is asked for first when its share has just grown has what was minted
// since, and a pool that was filled before a cut is emptied.
func TestNothingFromBefore(t *testing.T) {
	cfg := Config{Fleet: "f", Limit: Limit{Rate: 100, Burst: 100}, Roster: rosterOf("b")}
	n, err := NewNode(crdt.Replica{Name: "a"}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Hour
	if err := n.Adopt(now, changed(cfg.Configuration(), func(c *Configuration) { c.Roster = rosterOf("a") })); err != nil {
		t.Fatal(err)
	}
	n.Complete(now, 2)
	n.Take(now+100*ms, "new", 1000)
	if v, _ := n.View(now+100*ms, "new"); v.Level > 10*micro || v.Level < 9*micro {
		t.Errorf("%d, want what 100 ms mint", v.Level)
	}

	cfg = Config{Limit: Limit{Rate: 1000, Burst: 400}}
	at := time.Duration(0)
	s, err := New(crdt.Replica{Name: "a"}, cfg, WithClock(func() time.Duration { return at }))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := s.Key("k")
	l.Allow()
	had := l.pool.left()
	if err := s.Adopt(at, changed(cfg.Configuration(), func(c *Configuration) { c.Limit.Burst = 4 })); err != nil || had == 0 {
		t.Fatal(err, had)
	}
	if l.pool.left() != 0 || !l.AllowN(4) || l.Allow() {
		t.Errorf("%d in the pool after a cut", l.pool.left())
	}
}
