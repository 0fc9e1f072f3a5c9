// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

func TestConfiguratorBegins(t *testing.T) {
	for _, policy := range []escrow.SilencePolicy{escrow.Hold, escrow.Majority} {
		for _, nodes := range []int{1, 2, 3, 9} {
			w := newRealm(t, 1, nodes, nodes, ConfiguratorConfig{OnSilence: policy}, ground{})
			w.begun(nodes)
			t.Logf("%s, %d nodes: all have their shares after %v, number %d, %d writes", policy, nodes, w.now, w.reg.number, w.reg.writes)
		}
	}
}

// A rate change, a join, a leave and an eviction in a whole network.
func TestConfiguratorChanges(t *testing.T) {
	for _, nodes := range []int{1, 2, 3, 9, 50} {
		w := newRealm(t, 1, nodes, nodes+1, ConfiguratorConfig{}, ground{lag: 5 * ms})
		w.begun(nodes)
		start := w.now
		took := func(what string, limit time.Duration) {
			t.Helper()
			before := w.reg.number
			if !w.runUntil(start+limit, func() bool { return w.reg.number > before && w.rested() }) {
				w.report()
				t.Fatalf("%d nodes: %s: not after %v", nodes, what, limit)
			}
			if w.reg.number != before+1 {
				t.Errorf("%d nodes: %s took %d numbers", nodes, what, w.reg.number-before)
			}
			t.Logf("%3d nodes: %s: known and complete everywhere after %v", nodes, what, w.now-start)
			start = w.now
		}
		ticket, err := w.nodes[nodes/2].set(500)
		if err != nil {
			t.Fatal(err)
		}
		took("rate", sec)
		if n, done, err := w.nodes[nodes/2].c.Outcome(ticket); n != w.reg.number || !done || err != nil {
			t.Fatalf("outcome %d, %v, %v", n, done, err)
		}
		joiner := w.nodes[nodes]
		joiner.weight = 1
		joiner.start()
		took("join", 2*sec)
		if got, want := joiner.applier.using(), 500/float64(nodes+1); got != want {
			t.Fatalf("the newcomer uses %v, not %v", got, want)
		}
		leaver := w.nodes[0]
		if err := leaver.c.Leave(leaver.clock(), leaver.clock()+5*sec); err != nil {
			t.Fatal(err)
		}
		leaver.poke()
		took("leave", 2*sec)
		if !w.runUntil(w.now+100*ms, leaver.left(t)) || leaver.applier.using() != 0 {
			t.Fatalf("it has not left, or uses %v", leaver.applier.using())
		}
		leaver.stop()
		if nodes < 2 {
			continue
		}
		w.nodes[1].stop()
		w.run(w.now + 100*ms)
		start = w.now
		number, _ := joiner.c.Number()
		if _, err := joiner.c.Evict(joiner.clock(), number, w.nodes[1].name, "ann"); err != nil {
			t.Fatal(err)
		}
		joiner.poke()
		took("evict", 2*sec) // of two, one can evict the other
		s := joiner.c.Status(joiner.clock())
		if r := s.Log[len(s.Log)-1]; r.Number != w.reg.number || r.Who != "ann" || r.What != "evict n001" || r.At == 0 {
			t.Errorf("the log ends with %+v", r)
		}
	}
}

func (n *subject) left(t testing.TB) func() bool {
	return func() bool {
		done, err := n.c.Left(n.clock())
		if err != nil {
			t.Fatal(err)
		}
		return done
	}
}

// outcome waits for what becomes of a request.
func (w *realm) outcome(t testing.TB, n *subject, ticket uint64, within time.Duration) (uint64, error) {
	t.Helper()
	var number uint64
	var err error
	if !w.runUntil(w.now+within, func() (done bool) {
		number, done, err = n.c.Outcome(ticket)
		return done
	}) {
		w.report()
		t.Fatalf("no outcome within %v", within)
	}
	return number, err
}

func (w *realm) rests(t testing.TB, within time.Duration, what string) time.Duration {
	t.Helper()
	from := w.now
	if !w.runUntil(w.now+within, w.rested) {
		w.report()
		t.Fatalf("%s: not all have their shares after %v", what, within)
	}
	return w.now - from
}

// A pause of 1.2 s, and the process is evicted. It comes back by itself.
func TestConfiguratorPausedComesBack(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{OnSilence: escrow.Majority}, ground{drift: 500e-6})
	w.begun(3)
	n := w.nodes[2]
	n.paused = true
	w.run(w.now + 1200*ms)
	if s := w.nodes[0].c.Status(w.nodes[0].clock()); len(s.Members) != 2 || w.nodes[0].applier.using() != 500 {
		w.report()
		t.Fatal("it was not evicted")
	}
	n.paused = false
	n.poke()
	back := w.now
	if !w.runUntil(w.now+2*sec, func() bool { return w.rested() && w.members() == 3 && n.applier.using() > 0 }) {
		w.report()
		t.Fatal("it has not come back within 2 s")
	}
	if s := n.c.Status(n.clock()); s.Evicted == 0 {
		t.Error("it does not say that it was evicted")
	}
	t.Logf("back after %v", w.now-back)
}

// With Majority who is silent is evicted after its lease has run out, and what it had
// is used. Nobody evicts while the register is away.
func TestConfiguratorEvictsTheSilent(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{OnSilence: escrow.Majority}, ground{drift: 500e-6})
	w.begun(3)
	w.run(w.now + sec)
	cut := w.now
	w.cut = islands(0, 0, 1)
	w.reg.away = func(i int) bool { return i == 2 }
	var stopped, used time.Duration
	w.runUntil(cut+3*sec, func() bool {
		if stopped == 0 && w.nodes[2].applier.using() == 0 {
			stopped = w.now - cut
		}
		if used == 0 && w.nodes[0].applier.using() > 400 && w.nodes[1].applier.using() > 400 {
			used = w.now - cut
		}
		return false
	})
	t.Logf("cut off, it stopped after %v; the others use its share after %v", stopped, used)
	if stopped < 300*ms || stopped > 410*ms || used < stopped || used > 1500*ms {
		t.Errorf("stopped after %v, used after %v", stopped, used)
	}
	w.cut = whole
	w.reg.away = func(int) bool { return false }
	t.Logf("back after %v", w.rests(t, 2*sec, "healed"))
	w.reg.away = func(int) bool { return true }
	w.run(w.now + 400*ms)
	number := w.reg.number
	w.nodes[2].stop()
	w.run(w.now + 3*sec)
	if w.reg.number != number || len(w.nodes[0].c.frozen) > 0 || w.nodes[0].applier.using() < 333 || w.nodes[1].applier.using() < 333 {
		w.report()
		t.Fatal("the register is away, and something changed")
	}
}

// Two operators evict one member at once. It happens once, and everything
// goes on.
func TestConfiguratorTwoEvictOne(t *testing.T) {
	for seed := range uint64(20) {
		w := newRealm(t, seed, 5, 5, ConfiguratorConfig{}, ground{})
		w.begun(5)
		w.nodes[4].stop()
		var tickets [2]uint64
		for i := range tickets {
			n := w.nodes[i]
			number, _ := n.c.Number()
			var err error
			if tickets[i], err = n.c.Evict(n.clock(), number, "n004", "ann"); err != nil {
				t.Fatal(err)
			}
			n.poke()
		}
		made := 0
		for i, ticket := range tickets {
			switch number, err := w.outcome(t, w.nodes[i], ticket, sec); {
			case err == nil && number == 2:
				made++
			case !errors.Is(err, ErrConflict):
				t.Fatal(number, err)
			}
		}
		if made != 1 || w.members() != 4 {
			t.Fatalf("made %d times, %d members", made, w.members())
		}
		ticket, err := w.nodes[2].set(500)
		if err == nil {
			_, err = w.outcome(t, w.nodes[2], ticket, sec)
		}
		if err != nil {
			w.rests(t, sec, "evicted") // it did not know of the eviction yet
			ticket, err = w.nodes[2].set(500)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.outcome(t, w.nodes[2], ticket, sec); err != nil {
				t.Fatal(err)
			}
		}
		w.rests(t, sec, "changed")
	}
}

// Members that leave and start again together, or start again all at
// once, find what was decided.
func TestConfiguratorAllStartAgain(t *testing.T) {
	for _, policy := range []escrow.SilencePolicy{escrow.Hold, escrow.Majority} {
		for seed := range uint64(20) {
			w := newRealm(t, seed, 3, 5, ConfiguratorConfig{OnSilence: policy}, ground{})
			for _, n := range w.nodes {
				n.weight = 1
			}
			w.begun(5)
			w.rests(t, 2*sec, "five")
			if _, err := w.nodes[0].set(300); err != nil {
				t.Fatal(err)
			}
			w.rests(t, sec, "set")
			for _, n := range w.nodes[:3] { // those of the initial roster leave
				if err := n.c.Leave(n.clock(), n.clock()+5*sec); err != nil {
					t.Fatal(err)
				}
				n.poke()
			}
			w.rests(t, 3*sec, "left")
			for _, n := range w.nodes[:3] {
				n.stop()
			}
			w.cut = islands(0, 0, 0, 1, 1) // and start again, and never meet the others
			for _, n := range w.nodes[:3] {
				n.start()
			}
			w.run(w.now + 2*sec)
			w.cut = whole
			w.rests(t, 3*sec, "started again")
			if w.members() != 5 {
				t.Fatalf("%d members", w.members())
			}
			for _, n := range w.nodes {
				n.stop()
			}
			w.cfg.Initial.Limit.Rate = 5000 // a deployment with another limit
			for _, n := range w.nodes {
				n.start()
			}
			w.rests(t, 3*sec, "all at once")
			if c := w.nodes[0].c.Status(w.nodes[0].clock()).Configuration; c.Limit.Rate != 300 {
				t.Fatalf("the operator's limit became %v", c.Limit.Rate)
			}
		}
	}
}

// A request that was given up is not made later, whatever the register does
// with the write. One that was not given up is made once.
func TestConfiguratorCancelled(t *testing.T) {
	late, made := 0, 0
	for seed := range uint64(80) { // of which six would
		w := newRealm(t, seed, 2, 2, ConfiguratorConfig{}, ground{})
		w.begun(2)
		w.reg.late, w.reg.lossy = 0.5, 0.3
		n := w.nodes[0]
		ticket, err := n.set(300)
		if err != nil {
			t.Fatal(err)
		}
		w.run(w.now + time.Duration(w.rng.Int64N(int64(200*ms))))
		if w.rng.IntN(2) == 0 {
			w.reg.away = func(int) bool { return true }
		}
		n.c.Cancel(n.clock(), ticket)
		n.poke()
		w.run(w.now + time.Duration(w.rng.Int64N(int64(sec))))
		w.reg.away = func(int) bool { return false }
		number, err := w.outcome(t, n, ticket, 20*sec)
		rateThen := n.c.Status(n.clock()).Configuration.Limit.Rate
		w.run(w.now + 3*sec)
		rate := must(readDocument(w.reg.document)).newest().Limit.Rate
		switch {
		case err == nil:
			made++
			if number != 2 || rate != 300 {
				t.Fatalf("seed %d: made as %d, the rate is %v", seed, number, rate)
			}
		case !errors.Is(err, ErrEnded):
			t.Fatal(err)
		default:
			if w.reg.number > 1 {
				late++ // its number was taken
			}
			if rate != 1000 || rateThen != 1000 {
				t.Fatalf("seed %d: given up, and the rate is %v", seed, rate)
			}
		}
	}
	if late == 0 || made == 0 {
		t.Errorf("%d had their number taken, %d were made: nothing was tested", late, made)
	}
	t.Logf("of 200 given up, %d were made before; the number of %d had to be taken", made, late)
}

// A majority's later change is not overridden by an earlier one of somebody
// cut off: that one's number is over.
func TestConfiguratorCutOffOperator(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	w.cut, w.reg.away = islands(0, 1, 1), func(i int) bool { return i == 0 }
	lone, err := w.nodes[0].set(100)
	if err != nil {
		t.Fatal(err)
	}
	w.run(w.now + sec)
	if _, done, _ := w.nodes[0].c.Outcome(lone); done {
		t.Fatal("decided")
	}
	other, err := w.nodes[1].set(2000)
	if err != nil {
		t.Fatal(err)
	}
	if number, err := w.outcome(t, w.nodes[1], other, sec); number != 2 || err != nil {
		t.Fatal(number, err)
	}
	s := w.nodes[1].c.Status(w.nodes[1].clock())
	if s.Complete != 2 {
		t.Fatalf("nobody loses by more, and %d is complete", s.Complete)
	}
	w.cut, w.reg.away = whole, func(int) bool { return false }
	if _, err := w.outcome(t, w.nodes[0], lone, 2*sec); !errors.Is(err, ErrConflict) {
		t.Fatal(err)
	}
	var c *ConflictError
	if _, err := w.nodes[0].c.Set(w.nodes[0].clock(), 1, Change{Reset: true}, "ann"); !errors.As(err, &c) || c.Newest != 2 || c.Number != 1 {
		t.Fatal(err)
	}
	w.rests(t, 2*sec, "healed")
	if rate := w.nodes[0].c.Status(0).Configuration.Limit.Rate; rate != 2000 {
		t.Fatalf("rate %v", rate)
	}
}

// A process whose incarnation is below its previous one is let in.
func TestConfiguratorClockStepsBack(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{OnSilence: escrow.Majority}, ground{})
	for _, n := range w.nodes {
		n.incarnation = 1 << 40
	}
	w.begun(3)
	for _, n := range w.nodes {
		n.stop()
		n.incarnation = uint64(10 + n.i)
	}
	for _, n := range w.nodes {
		n.start()
	}
	w.rests(t, 2*sec, "the clock stepped back")
}

// Of three, one is dead and one starts again: it has its share at once.
func TestConfiguratorOneDeadOneRestarts(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	w.nodes[0].stop()
	w.nodes[1].stop()
	w.nodes[1].start()
	if !w.runUntil(w.now+100*ms, func() bool { return w.nodes[1].applier.using() > 333 }) {
		w.report()
		t.Fatal("it does not mint")
	}
}

// One that leaves while it is being made a member takes no share with it.
func TestConfiguratorLeavesWhileItJoins(t *testing.T) {
	for seed := range uint64(40) {
		w := newRealm(t, seed, 3, 4, ConfiguratorConfig{}, ground{})
		w.begun(3)
		n := w.nodes[3]
		n.start()
		w.run(w.now + 1500*ms)
		if err := n.c.Join(n.clock(), 1); err != nil {
			t.Fatal(err)
		}
		w.run(w.now + 50*ms + time.Duration(seed)*ms)
		if err := n.c.Leave(n.clock(), n.clock()+10*sec); err != nil {
			t.Fatal(err)
		}
		if !w.runUntil(w.now+9*sec, n.left(t)) {
			t.Fatalf("seed %d: it does not leave", seed)
		}
		n.stop()
		w.run(w.now + 3*sec)
		if s := w.nodes[0].c.Status(w.nodes[0].clock()); len(s.Members) != 3 {
			t.Fatalf("seed %d: its share is stranded: %+v", seed, s.Members)
		}
	}
}

func TestConfiguratorRefuses(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	n := w.nodes[0]
	number, _ := n.c.Number()
	for name, tt := range map[string]struct {
		err  error
		want error
	}{
		"a wrong limit":    {second(n.c.Set(0, number, Change{Limit: &escrow.Limit{Rate: -1, Burst: 1}}, "")), ErrConfig},
		"another number":   {second(n.c.Set(0, number+1, Change{Reset: true}, "")), ErrConflict},
		"nobody's weight":  {second(n.c.Set(0, number, Change{Weights: map[string]int{"x": 1}}, "")), ErrMember},
		"to evict oneself": {second(n.c.Evict(0, number, n.name, "")), ErrMember},
		"to evict nobody":  {second(n.c.Evict(0, number, "x", "")), ErrMember},
		"to join twice":    {n.c.Join(0, 1), ErrMember},
		"a weight of 0":    {n.c.Join(0, 0), ErrConfig},
		"to load":          {n.c.Load(0, 9, nation(3)), ErrConfig},
		"what is cut off":  {n.c.Read(0, 2, w.reg.document[:9]), ErrMalformed},
		"a wrong number":   {n.c.Read(0, number+1, w.reg.document), ErrMalformed},
		"another of a number": {n.c.Read(0, number, func() []byte {
			d := must(readDocument(w.reg.document))
			d.log[0].ID++
			d.encode()
			return d.bytes
		}()), ErrDiffers},
		"another fleet": {n.c.Read(0, number+1, func() []byte {
			d := must(readDocument(w.reg.document))
			d.fleet = "other"
			d.encode()
			return d.bytes
		}()), ErrFleet},
	} {
		if !errors.Is(tt.err, tt.want) {
			t.Errorf("%s: %v", name, tt.err)
		}
	}
	if after, _ := n.c.Number(); after != number {
		t.Error("it was taken in")
	}
}

func second[A, B any](_ A, b B) B { return b }

func TestConfiguratorConfig(t *testing.T) {
	err := ConfiguratorConfig{
		Static: true, Initial: nation(1), OnSilence: escrow.Majority, Weight: -1, Lease: 1, Silent: time.Hour, Batch: time.Hour, Patience: 1,
	}.Validate()
	for _, field := range []string{"Fleet", "Weight", "OnSilence", "Lease", "Silent", "Batch", "Patience", "Initial"} {
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), field+":") && !strings.Contains(err.Error(), field+".") {
			t.Errorf("%s is not named in: %v", field, err)
		}
	}
	if err := (ConfiguratorConfig{Fleet: "f"}).Validate(); err != nil {
		t.Error(err)
	}
}
