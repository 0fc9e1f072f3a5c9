// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// held tells whether a source is held by the fleet.
func (s *fleetSource) held() bool { return s.State().Breaker.Held }

// A partition whose dependency is dead goes to another process: that one does not
// try it before the open period is over, and then with one probe at a time.
func TestFleetHandsAPartitionOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		ps := r.startAll()
		r.feed("orders/0", 400, 10*time.Millisecond)
		a := ps[0].open("orders", "0")
		time.Sleep(time.Second)
		r.down.Store(true)
		// Three periods or more: the backoff stands high enough to be waited for.
		r.until(time.Minute, "a long open period", func() bool {
			s := a.State().Breaker
			return s.State == breaker.Open && s.BackoffLevel >= 6 && s.Until-r.now()-ps[0].offset/2 > 2*time.Second
		})
		left := a.State().Breaker.Until - r.now() - ps[0].offset/2
		time.Sleep(200 * time.Millisecond)
		a.end(t)
		time.Sleep(200 * time.Millisecond)

		taken := r.now()
		b := ps[1].open("orders", "0")
		if !b.held() {
			t.Fatalf("B begins with %+v", b.State().Breaker)
		}
		h := b.State().Holds
		if len(h) == 0 || !strings.Contains(h[0].Detail, "held by the fleet: g/orders/0") || h[0].ClearedBy == "" || h[0].Until <= 0 {
			t.Errorf("holds %+v", h)
		}
		r.until(time.Minute, "B's first call", func() bool { return len(r.since(taken)) > 0 })
		waited := r.since(taken)[0].at - taken
		if want := left - 400*time.Millisecond; waited < want-20*time.Millisecond || waited > want+200*time.Millisecond {
			t.Errorf("B called after %v; A's period had %v left", waited, want)
		}
		if n := b.State().Tally.Probes; n != 1 {
			t.Errorf("%d probes", n)
		}
		r.down.Store(false)
		r.until(2*time.Minute, "all is handled", func() bool { return b.Account().Unsettled() == 0 && b.State().Breaker.State == breaker.Closed })
		r.check()
		r.handled("orders/0", 400, true)
	})
}

// An owner whose predecessor had nothing wrong begins closed, without a wait.
func TestFleetHandsAHealthyPartitionOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		ps := r.startAll()
		r.feed("orders/0", 200, 10*time.Millisecond)
		a := ps[0].open("orders", "0")
		time.Sleep(time.Second)
		a.end(t)
		b := ps[1].open("orders", "0")
		if s := b.State().Breaker.State; s != breaker.Closed {
			t.Errorf("B begins %v", s)
		}
		r.until(10*time.Second, "all is handled", func() bool { return len(r.since(0)) >= 200 })
		r.handled("orders/0", 200, true)
	})
}

// A process that has just started and hears nobody holds its first message until
// it knows that nobody will tell, and probes then.
func TestFleetNewProcessWaits(t *testing.T) {
	for _, roster := range [][]string{{"a", "b", "c"}, {"a"}} {
		t.Run(fmt.Sprint(len(roster)), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newFleetRig(t, roster...)
				p := r.start("a")
				r.feed("orders", 100, 10*time.Millisecond)
				s := p.open("orders", "")
				alone := len(roster) == 1
				if s.held() == alone {
					t.Fatalf("begins with %+v", s.State().Breaker)
				}
				time.Sleep(950 * time.Millisecond)
				if n := len(r.since(0)); n > 0 && !alone {
					t.Fatalf("%d calls in the first second", n)
				}
				took := r.until(time.Second, "the first call", func() bool { return len(r.since(0)) > 0 })
				if took > 150*time.Millisecond {
					t.Errorf("first call %v after the second", took)
				}
				r.until(10*time.Second, "all is handled", func() bool { return len(r.since(0)) >= 100 })
				if st := s.State(); st.Tally.Probes != 10 || st.Tally.Failures != 0 || st.Breaker.State != breaker.Closed {
					t.Errorf("%d probes, %d failures, %v", st.Tally.Probes, st.Tally.Failures, st.Breaker.State)
				}
				r.check()
				r.handled("orders", 100, true)
			})
		})
	}
}

// One that is told begins at once.
func TestFleetNewProcessIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		r.start("a")
		r.start("b")
		time.Sleep(5 * time.Second)
		c := r.start("c")
		s := c.open("orders", "")
		r.feed("orders", 10, 10*time.Millisecond)
		r.until(500*time.Millisecond, "all is handled", func() bool { return len(r.since(0)) == 10 })
		if st := s.State(); st.Tally.Probes != 0 || st.Breaker.State != breaker.Closed {
			t.Errorf("%d probes, %v", st.Tally.Probes, st.Breaker.State)
		}
	})
}

// outage runs nine processes through ten minutes without their dependency, and
// says how often it was called after the first 5s, and how long it took until all
// were closed again.
func outage(t *testing.T, alone, partitions bool, loss float64) (calls int, back time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		var names []string
		for i := range 9 {
			names = append(names, fmt.Sprintf("node-%d", i))
		}
		r := newFleetRig(t, names...)
		r.alone, r.loss = alone, loss
		ps := r.startAll()
		const n = 2000
		queues := []string{"orders"}
		if partitions {
			queues = nil
			for i := range ps {
				queues = append(queues, fmt.Sprintf("orders/%d", i))
			}
		}
		for _, q := range queues {
			r.feed(q, n, 5*time.Millisecond)
		}
		for i, p := range ps {
			if partitions {
				p.open("orders", fmt.Sprint(i))
			} else {
				p.open("orders", "")
			}
		}
		time.Sleep(3 * time.Second)
		r.down.Store(true)
		began := r.now()
		for range 120 {
			time.Sleep(5 * time.Second)
			r.check()
		}
		calls = len(r.since(began + 5*time.Second))
		r.down.Store(false)
		back = r.until(2*time.Minute, "every breaker is closed", r.closed)
		r.until(5*time.Minute, "all is handled", func() bool {
			for _, q := range queues {
				if r.broker.Stats(q).Acked < n {
					return false
				}
			}
			return true
		})
		r.check()
		for _, q := range queues {
			r.handled(q, n, partitions)
		}
	})
	return calls, back
}

// Nine processes probe a dead dependency as one.
func TestFleetProbesAsOne(t *testing.T) {
	if guard.RaceEnabled {
		t.Skip("ten minutes of nine processes: run without -race; the other tests of fleets run with it")
	}
	each, backEach := outage(t, true, false, 0)
	t.Logf("each by itself: %d calls, back after %v", each, backEach)
	for _, partitions := range []bool{false, true} {
		what := map[bool]string{false: "one queue", true: "a partition each"}[partitions]
		t.Run(what, func(t *testing.T) {
			calls, back := outage(t, false, partitions, 0.1)
			t.Logf("%s: %d calls as a fleet, back after %v", what, calls, back)
			if calls > 150 || calls < 10 { // 27 grants, with a look of five calls at most
				t.Errorf("%d calls", calls)
			}
			if each < 5*calls {
				t.Errorf("%d calls each by itself", each)
			}
			if back > 40*time.Second {
				t.Errorf("back after %v", back)
			}
		})
	}
}

// One process whose own path is broken holds itself and nobody else.
func TestFleetOneBadNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c", "d", "e")
		ps := r.startAll()
		const n = 3000
		r.feed("orders", n, 10*time.Millisecond)
		ss := openAll(ps)
		time.Sleep(2 * time.Second)
		ps[0].broken.Store(true)
		opened := 0
		for range 200 {
			time.Sleep(100 * time.Millisecond)
			for i, s := range ss {
				st := s.State()
				if st.Fleet.State != breaker.Closed || st.Breaker.Held || i > 0 && st.Breaker.State != breaker.Closed {
					t.Fatalf("%s: %+v, %+v", ps[i].replica.Name, st.Breaker, st.Fleet)
				}
				if i == 0 && st.Breaker.State == breaker.Open {
					opened++
				}
			}
			r.check()
		}
		if opened == 0 {
			t.Error("the bad one never opened")
		}
		if n := len(r.since(10 * time.Second)); n < 1000 {
			t.Errorf("%d calls", n)
		}
		ps[0].broken.Store(false)
		r.until(2*time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == n })
		r.handled("orders", n, false)
	})
}

// Three that do not hear each other decide nothing for each other: each goes by
// its own breaker, and each recovers.
func TestFleetSplitInThree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		ps := r.startAll()
		var ss []*fleetSource
		for i, p := range ps {
			r.feed(fmt.Sprintf("orders/%d", i), 2000, 20*time.Millisecond)
			ss = append(ss, p.open("orders", fmt.Sprint(i)))
		}
		time.Sleep(time.Second)
		r.split(map[string]int{"a": 1, "b": 2, "c": 3})
		time.Sleep(6 * time.Second)
		r.down.Store(true)
		probed := make(map[string]bool)
		for range 250 {
			time.Sleep(100 * time.Millisecond)
			for i, s := range ss {
				st := s.State()
				if st.Fleet.State != breaker.Closed || st.Breaker.Held {
					t.Fatalf("%s: %+v, %+v", ps[i].replica.Name, st.Breaker, st.Fleet)
				}
			}
		}
		for _, c := range r.since(12 * time.Second) {
			probed[c.who] = true
		}
		if len(probed) != 3 {
			t.Errorf("probed: %v", probed)
		}
		r.down.Store(false)
		r.until(time.Minute, "every breaker is closed", r.closed)
		r.split(nil)
		r.until(2*time.Minute, "all is handled", func() bool {
			return r.broker.Stats("orders/0").Acked == 2000 && r.broker.Stats("orders/1").Acked == 2000 && r.broker.Stats("orders/2").Acked == 2000
		})
		r.check()
		for i := range ss {
			r.handled(fmt.Sprintf("orders/%d", i), 2000, true)
		}
	})
}

// Of a fleet that is split while it is open, the side without a quorum waits for
// the rest of the period and then recovers by itself.
func TestFleetCutOffWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c", "d", "e")
		ps := r.startAll()
		var ss []*fleetSource
		for i, p := range ps {
			r.feed(fmt.Sprintf("orders/%d", i), 500, 20*time.Millisecond)
			ss = append(ss, p.open("orders", fmt.Sprint(i)))
		}
		time.Sleep(time.Second)
		r.down.Store(true)
		r.until(20*time.Second, "the fleet opens", func() bool { return ss[4].held() })
		time.Sleep(10 * time.Second)
		r.split(map[string]int{"e": 1})
		time.Sleep(time.Second)
		r.down.Store(false)
		r.until(time.Minute, "the lone one is closed", func() bool { return ss[4].State().Breaker.State == breaker.Closed })
		r.until(time.Minute, "every breaker is closed", r.closed)
		r.split(nil)
		time.Sleep(20 * time.Second)
		if !r.closed() {
			t.Errorf("after the split: %s", r.describe())
		}
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders/4").Acked == 500 })
		for i := range ss {
			r.handled(fmt.Sprintf("orders/%d", i), 500, true)
		}
	})
}

// An operator's word stands: what was forced open stays so when the fleet closes,
// and what was closed by force is not held again unless it trips again.
func TestFleetLeavesAnOperatorsForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c", "d")
		ps := r.startAll()
		r.feed("orders", 1000, 20*time.Millisecond)
		ss := openAll(ps)
		time.Sleep(time.Second)
		force := 10 * time.Minute
		if guard.RaceEnabled {
			force = 2 * time.Minute
		}
		if err := ss[0].ForceOpen(force); err != nil { // before the fleet opens
			t.Fatal(err)
		}
		forced := r.now()
		r.down.Store(true)
		r.until(30*time.Second, "the fleet opens", func() bool { return ss[1].held() && ss[2].held() && ss[3].held() })
		if err := ss[1].ForceOpen(force); err != nil { // and while it holds
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		ps[2].broken.Store(false)
		r.down.Store(false)
		time.Sleep(50 * time.Millisecond)
		if err := ss[2].ForceClosed(); err != nil {
			t.Fatal(err)
		}
		if st := ss[2].State(); st.Breaker.State != breaker.Closed {
			t.Errorf("after ForceClosed: %+v", st.Breaker)
		}
		open := 0
		for r.now() < forced+force-time.Minute {
			time.Sleep(50 * time.Millisecond)
			for _, s := range ss[:2] {
				if st := s.State().Breaker; !st.Forced || st.State != breaker.Open {
					t.Fatalf("forced open, and is %+v", st)
				}
			}
			if ss[2].State().Breaker.State != breaker.Closed {
				t.Fatal("forced closed with a healthy dependency, and is held again")
			}
			if ss[3].State().Breaker.State == breaker.Open {
				open++
			}
		}
		if open == 0 {
			t.Error("the fleet was never open meanwhile")
		}
		r.until(3*time.Minute, "every breaker is closed", r.closed)
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 1000 })
		r.handled("orders", 1000, false)
	})
}

// What was closed by force stays closed through the fleet's further periods, as long
// as it works for this process.
func TestFleetLeavesWhatWasForcedClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c", "d")
		ps := r.startAll()
		var ss []*fleetSource
		for i, p := range ps {
			r.feed(fmt.Sprintf("orders/%d", i), 4000, 20*time.Millisecond)
			ss = append(ss, p.open("orders", fmt.Sprint(i)))
		}
		time.Sleep(time.Second)
		for _, i := range []int{0, 1, 3} {
			ps[i].broken.Store(true)
		}
		r.until(30*time.Second, "the fleet opens", func() bool { return ss[2].held() })
		if err := ss[2].ForceClosed(); err != nil {
			t.Fatal(err)
		}
		round := ss[3].State().Fleet.Round
		for range 450 { // a storm of the fleet, after a minute, would trip it
			time.Sleep(100 * time.Millisecond)
			if b := ss[2].State().Breaker; b.State != breaker.Closed {
				t.Fatalf("forced closed, and is %+v", b)
			}
		}
		if st := ss[3].State(); st.Fleet.Round < round+3 || !st.Breaker.Held {
			t.Errorf("the others are at %+v", st.Fleet)
		}
	})
}

// A process that is at rest is held as soon as the news arrives, not when it next
// looks.
func TestFleetWakesWhoIsAtRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		ps := r.startAll()
		for i, p := range ps[:2] {
			r.feed(fmt.Sprintf("orders/%d", i), 100, 20*time.Millisecond)
			p.open("orders", fmt.Sprint(i))
		}
		quiet := ps[2].open("orders", "2")
		time.Sleep(time.Second)
		r.down.Store(true)
		for sc, _ := ps[2].scope("g/orders"); sc.State != breaker.Open; sc, _ = ps[2].scope("g/orders") {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(2 * time.Millisecond)
		if !quiet.held() {
			t.Errorf("2ms after the news: %+v", quiet.State().Breaker)
		}
	})
}

// What was closed by force although the dependency is down trips again, and is
// held with the others again.
func TestFleetHoldsWhatTripsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, ss := heldFleet(t, 1000)
		time.Sleep(10 * time.Second)
		if err := ss[0].ForceClosed(); err != nil {
			t.Fatal(err)
		}
		took := r.until(10*time.Second, "it is held again", func() bool { return ss[0].held() })
		if took == 0 {
			t.Error("it was not closed at all")
		}
		r.down.Store(false)
		r.until(2*time.Minute, "every breaker is closed", r.closed)
	})
}

// A Guard that is closed while the fleet holds its sources ends in time, and gives
// everything back.
func TestFleetCloseWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := heldFleet(t, 300)
		time.Sleep(5 * time.Second)
		began := time.Now()
		reports, err := ps[0].guard.Close(t.Context())
		if err != nil || time.Since(began) > time.Second {
			t.Errorf("Close took %v: %v", time.Since(began), err)
		}
		for _, rep := range reports {
			if err := rep.Account.Check(); err != nil || rep.Account.Unsettled() > 0 {
				t.Errorf("%+v: %v", rep, err)
			}
		}
		ss[0].e.Close()
		// Its fleet goes on for a while: what arrives has nobody to act on.
		time.Sleep(10 * time.Second)
		if sc, claimed := ps[0].scope("g/orders"); claimed {
			t.Errorf("still claimed: %+v", sc)
		}
		r.down.Store(false)
		r.until(time.Minute, "the others recover", func() bool {
			return ss[1].State().Breaker.State == breaker.Closed && ss[2].State().Breaker.State == breaker.Closed
		})
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 300 })
		r.handled("orders", 300, false)
	})
}

// Partitions are taken away and given to others again and again while the fleet
// holds them: nothing is called out of turn, nothing is lost, and all recovers.
func TestFleetRevokeWhileHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		r.loss = 0.2
		ps := r.startAll()
		const parts, n = 6, 400
		ss := make([]*fleetSource, parts)
		for i := range parts {
			r.feed(fmt.Sprintf("orders/%d", i), n, 20*time.Millisecond)
			ss[i] = ps[i%3].open("orders", fmt.Sprint(i))
		}
		time.Sleep(time.Second)
		r.down.Store(true)
		r.until(30*time.Second, "the fleet opens", func() bool { return ss[0].held() && ss[1].held() && ss[2].held() })
		time.Sleep(2 * time.Second)
		moved := r.now()
		for k := range 30 {
			i := k % parts
			ss[i].end(t)
			time.Sleep(100 * time.Millisecond)
			ss[i] = ps[(i+k)%3].open("orders", fmt.Sprint(i))
			if !ss[i].held() {
				t.Fatalf("move %d: partition %d begins with %+v", k, i, ss[i].State().Breaker)
			}
			time.Sleep(300 * time.Millisecond)
			r.check()
		}
		if calls := len(r.since(moved)); calls > 12 {
			t.Errorf("%d calls in %v of moving partitions", calls, r.now()-moved)
		}
		r.down.Store(false)
		r.until(2*time.Minute, "every breaker is closed", r.closed)
		r.until(time.Minute, "all is handled", func() bool {
			for i := range parts {
				if r.broker.Stats(fmt.Sprintf("orders/%d", i)).Acked < n {
					return false
				}
			}
			return true
		})
		for i := range parts {
			r.handled(fmt.Sprintf("orders/%d", i), n, true)
		}
	})
}

// A member of the roster that no guard drives lends its voice all the same: without it the
// last one that has the scope passed its probes, and was held for ever.
func TestFleetMemberWithoutAGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := heldFleet(t, 200)
		ss[2].end(t)
		if _, err := ps[2].guard.Close(t.Context()); err != nil { // its process goes on
			t.Fatal(err)
		}
		ps[1].crash()
		ss[1].end(t)
		r.down.Store(false)
		took := r.until(2*time.Minute, "the last one recovers", func() bool { return ss[0].State().Breaker.State == breaker.Closed })
		if took > 45*time.Second {
			t.Errorf("it took %v", took)
		}
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 200 })
		r.handled("orders", 200, false)
	})
}

// Everybody but one vanishes while the fleet holds a scope, also the one that
// probes: who is left is not held for ever.
func TestFleetPeersVanish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := heldFleet(t, 200)
		time.Sleep(3 * time.Second)
		ps[1].crash()
		ps[2].crash()
		for _, s := range ss[1:] {
			s.end(t)
		}
		r.down.Store(false)
		took := r.until(2*time.Minute, "the last one recovers", func() bool { return ss[0].State().Breaker.State == breaker.Closed })
		if took > 45*time.Second {
			t.Errorf("it took %v", took)
		}
		r.until(time.Minute, "all is handled", func() bool { return r.broker.Stats("orders").Acked == 200 })
		r.handled("orders", 200, false)
	})
}
