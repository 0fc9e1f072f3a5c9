// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"fmt"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// lifeRig is three processes with a partition each; a and b handle 50 messages a
// second, and c what a test gives it.
func lifeRig(t *testing.T, policy guard.Policy, set ...func(*fleetRig)) (*fleetRig, []*party, []*fleetSource) {
	r := newFleetRig(t, "a", "b", "c")
	r.cfg.Policy = policy
	for _, f := range set {
		f(r)
	}
	ps := r.startAll()
	ss := make([]*fleetSource, len(ps))
	for i, p := range ps {
		if i < 2 {
			r.feed(fmt.Sprintf("orders/%d", i), 100_000, 20*time.Millisecond)
		}
		ss[i] = p.open("orders", fmt.Sprint(i))
	}
	time.Sleep(3 * time.Second)
	return r, ps, ss
}

// unheld leaves a fleet without votes: no breaker is held with its topic.
func unheld(r *fleetRig) { r.noVotes = true }

func (r *fleetRig) dead(i int) int { return r.broker.DeadLetters(fmt.Sprintf("orders/%d", i)).Len() }

// publish puts messages first to last into a partition at once.
func (r *fleetRig) publish(i int, first, last uint64) {
	for n := first; n <= last; n++ {
		r.broker.Publish(fmt.Sprintf("orders/%d", i), guardtest.Message{Key: fmt.Sprint(n % 5), Body: guardtest.Body(n, 0)})
	}
}

func orders(t *testing.T, test func(t *testing.T, order guard.Order)) {
	all := []guard.Order{guard.OrderSource, guard.OrderKey, guard.OrderNone}
	if guard.RaceEnabled {
		all = []guard.Order{guard.OrderKey}
	}
	for _, order := range all {
		t.Run(order.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { test(t, order) })
		})
	}
}

// A burst of poison is all that a process gets; the others succeed: that ends its
// doubt, and the burst is dead-lettered after the patience of one message.
func TestFleetLifeReleasesABurst(t *testing.T) {
	for _, n := range []uint64{1, 3, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			orders(t, func(t *testing.T, order guard.Order) {
				r, _, _ := lifeRig(t, guard.Policy{Order: order})
				r.mu.Lock()
				r.spoiled = func(queue string, _ uint64) bool { return queue == "orders/2" }
				r.mu.Unlock()
				r.publish(2, 1, n)
				took := r.until(30*time.Second, "all poison is dead-lettered", func() bool { return r.dead(2) == int(n) })
				t.Logf("%d dead letters after %v", n, took)
				if took < 10*time.Second {
					t.Error("before its patience was over")
				}
				if r.dead(0)+r.dead(1) > 0 {
					t.Error("dead letters of others")
				}
				r.check()
			})
		})
	}
}

// batches gives c so many messages at once, again and again.
func (r *fleetRig) batches(n uint64, every time.Duration) {
	r.running.Go(func() {
		for first := uint64(1); ; first += n {
			r.publish(2, first, first+n-1)
			select {
			case <-time.After(every):
			case <-r.ctx.Done():
				return
			}
		}
	})
}

// One process's path to the dependency is broken for five minutes, with errors of
// unknown class, and the others succeed: it dead-letters nothing, whatever its traffic.
func TestFleetLifeOfABrokenPath(t *testing.T) {
	for _, c := range []struct {
		batch uint64
		every time.Duration
		long  bool
	}{
		{1, 10 * time.Millisecond, false},
		{1, time.Second, true},
		{1, 7 * time.Second, true},
		{1, 20 * time.Second, false},
		{2, 20 * time.Second, false},
		{5, 30 * time.Second, true},
		{8, time.Minute, false},
		{100, time.Minute, true},
	} {
		if guard.RaceEnabled && c.batch != 2 || c.long && os.Getenv("STORMGUARD_FULL") == "" {
			continue
		}
		t.Run(fmt.Sprint(c.batch, " each ", c.every), func(t *testing.T) {
			orders(t, func(t *testing.T, order guard.Order) {
				r, ps, ss := lifeRig(t, guard.Policy{Order: order})
				r.batches(c.batch, c.every)
				time.Sleep(max(20*time.Second, 2*c.every) + 700*time.Millisecond)
				ps[2].broken.Store(true)
				time.Sleep(5 * time.Minute)
				ps[2].broken.Store(false)
				r.until(2*time.Minute, "what waited is handled", func() bool { return ss[2].Account().Unsettled() == 0 })
				time.Sleep(10 * time.Second)
				for i := range ps {
					if n := r.dead(i); n > 0 {
						t.Errorf("%d healthy dead letters of orders/%d", n, i)
					}
				}
				r.check()
			})
		})
	}
}

// A process that never reached the dependency gets a burst for each of two partitions.
// Both fail, so it is not taken for poison.
func TestFleetLifeWhereTwoSourcesFail(t *testing.T) {
	if guard.RaceEnabled {
		t.Skip("minutes of three processes' time: run without -race")
	}
	orders(t, func(t *testing.T, order guard.Order) {
		r, ps, _ := lifeRig(t, guard.Policy{Order: order})
		ps[2].broken.Store(true)
		ps[2].open("orders", "3")
		r.publish(2, 1, 8)
		r.publish(3, 1, 8)
		time.Sleep(5 * time.Minute)
		if n := r.dead(2) + r.dead(3); n > 0 {
			t.Errorf("%d healthy dead letters", n)
		}
	})
}

// A burst that fails is released once: not in the next epoch of the source, and not
// after more of it has come.
func TestFleetLifeReleasesOnce(t *testing.T) {
	for _, again := range []string{"epoch", "arrival"} {
		t.Run(again, func(t *testing.T) {
			orders(t, func(t *testing.T, order guard.Order) {
				r, ps, ss := lifeRig(t, guard.Policy{Order: order})
				ps[2].broken.Store(true)
				r.publish(2, 1, 4)
				r.until(30*time.Second, "one is dead-lettered", func() bool { return r.dead(2) > 0 })
				if again == "epoch" {
					ss[2].end(t)
					ps[2].open("orders", "2")
				} else {
					r.publish(2, 5, 5)
				}
				time.Sleep(100 * time.Millisecond) // what was decided before is written
				before := r.dead(2)
				time.Sleep(25 * time.Second)
				if n := r.dead(2) - before; n > 0 {
					t.Errorf("%d more dead letters after %d", n, before)
				}
			})
		})
	}
}

// A burst that is large, or that fills the window, is not released.
func TestFleetLifeOfALargeBurst(t *testing.T) {
	for _, c := range []struct {
		n      uint64
		window int
	}{{9, 0}, {200, 0}, {8, 4}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			orders(t, func(t *testing.T, order guard.Order) {
				r, ps, _ := lifeRig(t, guard.Policy{Order: order, Window: c.window})
				ps[2].broken.Store(true)
				r.publish(2, 1, c.n)
				time.Sleep(time.Minute)
				if n := r.dead(2); n > 0 {
					t.Errorf("%d dead letters", n)
				}
			})
		})
	}
}

// The dependency fails for all, at once or soon after a burst of poison: what the
// others did before that releases nothing.
func TestFleetLifeBeforeAnOutage(t *testing.T) {
	for _, c := range []struct{ patience, after time.Duration }{{time.Second, 0}, {0, 3 * time.Second}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			orders(t, func(t *testing.T, order guard.Order) {
				r, ps, _ := lifeRig(t, guard.Policy{Order: order, Retry: guard.Retry{Patience: c.patience}}, unheld)
				ps[2].broken.Store(true)
				time.Sleep(100 * time.Millisecond)
				r.down.Store(c.after == 0)
				r.publish(2, 1, 8)
				time.Sleep(c.after)
				r.down.Store(true)
				time.Sleep(40 * time.Second)
				if n := r.dead(2); n > 0 {
					t.Errorf("%d dead letters", n)
				}
			})
		})
	}
}

// The dependency fails for all while c is cut off, and the cut heals. What the others
// had counted before the outage arrives then: it says nothing about the dependency.
func TestFleetLifeThatComesLate(t *testing.T) {
	orders(t, func(t *testing.T, order guard.Order) {
		r, ps, _ := lifeRig(t, guard.Policy{Order: order}, unheld)
		r.split(map[string]int{"c": 1})
		time.Sleep(10 * time.Second)
		r.down.Store(true)
		r.publish(2, 1, 8)
		time.Sleep(15 * time.Second)
		before, _ := ps[2].m.OthersSucceeded("g/orders")
		heard := ps[2].tot.All(nil)[0].Handled
		r.split(nil)
		time.Sleep(2 * time.Second)
		if n := ps[2].tot.All(nil)[0].Handled; n < heard+500 {
			t.Errorf("c heard of %d calls, and of %d before the cut healed", n, heard)
		}
		if ago, ok := ps[2].m.OthersSucceeded("g/orders"); !ok || ago < before {
			t.Errorf("the others' latest success was %v ago, and %v ago before the cut healed", ago, before)
		}
		time.Sleep(30 * time.Second) // before that is a storm
		for i := range ps {
			if n := r.dead(i); n > 0 {
				t.Errorf("%d healthy dead letters of orders/%d", n, i)
			}
		}
	})
}

// Whatever ends and restarts, each process knows what all have counted, and once
// nothing happens any more nothing is sent any more.
func TestFleetTotals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFleetRig(t, "a", "b", "c")
		r.loss, r.bad = 0.2, 77
		ps := r.startAll()
		for i, p := range ps {
			r.feed(fmt.Sprintf("orders/%d", i), 500, 10*time.Millisecond)
			s := p.open("orders", fmt.Sprint(i))
			time.Sleep(time.Second)
			s.end(t) // with what it has counted since the last look
			p.open("orders", fmt.Sprint(i))
		}
		time.Sleep(20 * time.Second)
		want := fleetstate.Total{Key: "g/orders", DeadLettered: uint64(r.dead(0) + r.dead(1) + r.dead(2)), Processes: 3}
		for _, c := range r.since(0) {
			if c.ok {
				want.Handled++
			} else {
				want.Failed++
			}
		}
		if want.Handled != 1497 || want.DeadLettered != 3 {
			t.Fatalf("%+v", want)
		}
		// A call that fails while its source ends is no failure.
		if got := ps[0].tot.All(nil)[0].Failed; got+3 >= want.Failed && got < want.Failed {
			want.Failed = got
		}
		for _, p := range ps {
			if got := p.tot.All(nil); len(got) != 1 || got[0] != want {
				t.Errorf("%s knows %+v, want %+v", p.replica.Name, got, want)
			}
		}
		ps[1].crash()
		again := r.start("b")
		again.open("orders", "9")
		r.publish(9, 1, 10)
		time.Sleep(5 * time.Second)
		want.Handled, want.Processes = want.Handled+10, 4
		for _, p := range []*party{ps[0], ps[2]} {
			if got := p.tot.All(nil); got[0] != want {
				t.Errorf("after a restart %s knows %+v, want %+v", p.replica.Name, got, want)
			}
		}
		mark := again.tot.Counted()
		time.Sleep(time.Minute)
		if got := again.tot.Counted(); got != mark {
			t.Errorf("%d changes while nothing happens", got-mark)
		}
	})
}
