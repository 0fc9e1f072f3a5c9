// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
)

// stormRig is three processes in trouble and one that is fine, but for a poison
// message now and then.
func stormRig(t *testing.T, policy guard.Policy, noVotes bool) (*fleetRig, []*party, []*fleetSource) {
	r := newFleetRig(t, "a", "b", "c", "d")
	r.cfg.Policy, r.noVotes = policy, noVotes
	r.poison = 100
	ps := r.startAll()
	ss := make([]*fleetSource, len(ps))
	for i, p := range ps {
		p.broken.Store(i < 3)
		r.feed(fmt.Sprintf("orders/%d", i), 20000, 20*time.Millisecond)
		ss[i] = p.open("orders", fmt.Sprint(i))
	}
	return r, ps, ss
}

func holdOf(st guard.State, why guard.Reason) *guard.Hold {
	if i := slices.IndexFunc(st.Holds, func(h guard.Hold) bool { return h.Reason == why }); i >= 0 {
		return &st.Holds[i]
	}
	return nil
}

// In a storm of the fleet a process that is not in storm itself dead-letters
// from the small part of its budget.
func TestFleetStormStopsDeadLettering(t *testing.T) {
	if guard.RaceEnabled {
		t.Skip("minutes of four processes' time, which two tests below have too: run without -race")
	}
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := stormRig(t, guard.Policy{NoBreaker: true, Order: guard.OrderNone}, false)
		dead := func() int { return r.broker.DeadLetters("orders/3").Len() }
		r.until(50*time.Second, "poison is dead-lettered", func() bool { return dead() > 2 })
		r.until(2*time.Minute, "the fleet's storm", func() bool { return ss[3].State().FleetStorm.Active })
		st := ss[3].State()
		if st.Storm.Active {
			t.Fatalf("d is in storm itself: %v", st.Storm)
		}
		if h := holdOf(st, guard.ReasonStorm); h == nil || h.Detail == "" || h.ClearedBy == "" {
			t.Errorf("holds %+v", st.Holds)
		}
		time.Sleep(100 * time.Millisecond)
		before, calls := dead(), len(r.since(r.now()-time.Second))
		time.Sleep(30 * time.Second)
		if n := dead() - before; n > 20 { // the small part of the budget
			t.Errorf("%d dead letters in the storm", n)
		}
		if n := len(r.since(r.now() - time.Second)); n < calls/2 {
			t.Errorf("%d calls a second, %d before: it only stops dead letters", n, calls)
		}
		r.check()
		for _, p := range ps[:3] {
			p.broken.Store(false)
		}
		r.until(3*time.Minute, "the storm is over", func() bool { return !ss[3].State().FleetStorm.Active })
		r.until(time.Minute, "poison is dead-lettered again", func() bool { return dead() > before })
	})
}

// A storm ends for those who no longer hear the processes that are in it, after
// five seconds of silence.
func TestFleetStormOfTheSilent(t *testing.T) {
	if guard.RaceEnabled {
		t.Skip("minutes of four processes' time, which two tests below have too: run without -race")
	}
	synctest.Test(t, func(t *testing.T) {
		r, _, ss := stormRig(t, guard.Policy{NoBreaker: true, Order: guard.OrderNone}, false)
		r.until(3*time.Minute, "the fleet's storm", func() bool { return ss[3].State().FleetStorm.Active })
		r.split(map[string]int{"d": 1})
		took := r.until(time.Minute, "the storm is over for who is alone", func() bool { return !ss[3].State().FleetStorm.Active })
		// Five seconds after the last of its own words that a peer told of having
		// heard. With nothing new, the rig speaks each 0.6 s at most, so that was at
		// most 1.2 s old. The sweeper looks each 0.25 s.
		if took < 3800*time.Millisecond || took > 5300*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		for _, s := range ss[:3] {
			if !s.State().FleetStorm.Active {
				t.Error("it ended for those who are in it")
			}
		}
		r.split(nil)
		r.until(5*time.Second, "and back", func() bool { return ss[3].State().FleetStorm.Active })
	})
}

// A storm of the fleet opens a breaker that is closed, once, by the backoff.
func TestFleetStormOpensTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, ss := stormRig(t, guard.Policy{}, true)
		var seen breaker.Snapshot
		r.until(3*time.Minute, "the breaker opens", func() bool {
			seen = ss[3].State().Breaker
			return seen.State != breaker.Closed && seen.Cause == "storm"
		})
		if !ss[3].State().FleetStorm.Active {
			t.Errorf("no storm, and %+v", seen)
		}
		r.until(5*time.Second, "its probes close it", func() bool { return ss[3].State().Breaker.State == breaker.Closed })
		time.Sleep(10 * time.Second)
		if s := ss[3].State(); !s.FleetStorm.Active || s.Breaker.State != breaker.Closed {
			t.Errorf("%v, breaker %+v", s.FleetStorm, s.Breaker)
		}
	})
}

// A process in storm is no storm of the fleet.
func TestFleetStormNeedsMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, ps, ss := stormRig(t, guard.Policy{NoBreaker: true, Order: guard.OrderNone}, false)
		ps[1].broken.Store(false)
		ps[2].broken.Store(false)
		r.until(3*time.Minute, "one is in storm", func() bool { return ss[0].State().Storm.Active })
		time.Sleep(20 * time.Second)
		for i, s := range ss {
			if f := s.State().FleetStorm; f.Active || f.Reporters != 4 || f.Affected != 1 || f.Need != 2 {
				t.Errorf("%d: %+v", i, f)
			}
		}
		ss[0].end(t)
		ss[0].e.Close()
		time.Sleep(time.Second)
		if f := ss[1].State().FleetStorm; f.Reporters != 3 || f.Affected != 0 {
			t.Errorf("after its source ended: %+v", f)
		}
	})
}
