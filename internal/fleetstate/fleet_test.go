// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// long reports whether the test may take its long form: alone, and not under
// the race detector, for it is one goroutine.
func long() bool { return os.Getenv("STORMGUARD_FULL") != "" && !raceEnabled }

// outage lets a fleet of fifty run against a dependency that is down for d, and
// returns the attempts on it after the first five seconds.
func outage(t *testing.T, name string, d time.Duration, o options) (attempts int) {
	t.Helper()
	o.nodes, o.rate = 50, 20
	if raceEnabled {
		o.nodes = 10
	}
	w := newWorld(t, 1, o)
	w.run(5 * sec)
	if w.attempts != 0 || !w.closed() {
		t.Fatalf("before the outage: %d attempts failed, closed %v", w.attempts, w.closed())
	}
	w.down = true
	w.run(5 * sec)
	first := w.attempts
	w.run(d - 5*sec)
	attempts = w.attempts - first
	w.down = false
	back := w.until(2*time.Minute, "every breaker closed", w.closed)
	good := w.good
	w.run(10 * sec)
	if w.good-good < o.nodes*20*9 {
		t.Errorf("%s: handled %d in ten seconds after the outage", name, w.good-good)
	}
	if w.overlaps > 0 {
		t.Errorf("%s: %d probes began while another was out", name, w.overlaps)
	}
	t.Logf("%-28s down %v: %4d attempts in the first 5 s, then %4d; all closed %v after the dependency was back",
		name, d, first, attempts, back.Round(10*ms))
	return attempts
}

// Fifty processes (ten under the race detector, for it is all one goroutine) at
// twenty messages a second each. After the first five
// seconds, in which each process finds out for itself, the fleet as a whole is
// to try a dead dependency about as often as one breaker does.
func TestOutage(t *testing.T) {
	d := time.Minute
	if long() {
		d = 10 * time.Minute
	}
	ratio := 20
	if raceEnabled {
		ratio = 4
	}
	local := outage(t, "each by itself", d, options{local: true})
	for name, o := range map[string]options{
		"fleet":                  {},
		"fleet, quorum 0.1":      {quorum: 0.1},
		"fleet, 35 % loss":       {loss: 0.35, dup: 0.1},
		"fleet, delay 50-100 ms": {delay: 50 * ms},
	} {
		if n := outage(t, name, d, o); n > 30 || n*ratio > local {
			t.Errorf("%s: %d attempts, want at most 30, and one in %d of %d", name, n, ratio, local)
		}
	}
}

// One process cannot reach a dependency that is well. Nobody else may notice.
func TestOneBadNode(t *testing.T) {
	d := time.Minute
	if long() {
		d = 10 * time.Minute
	}
	for _, quorum := range []float64{0.1, 0.5} {
		o := options{nodes: 50, rate: 20, quorum: quorum}
		if raceEnabled {
			o.nodes = 10
		}
		w := newWorld(t, 1, o)
		w.watch(func(n *node, _, is State) {
			if is.Open() {
				t.Errorf("%s: the fleet is %v", n.name, is.Position)
			}
		})
		bad := w.nodes[7]
		bad.broken = true
		w.run(d)
		want := int(d/sec)*20 - 2
		for _, n := range w.nodes {
			if n != bad && n.good < want {
				t.Errorf("%s handled %d, want %d", n.name, n.good, want)
			}
		}
		t.Logf("quorum %v, %v: %d attempts of the bad node failed, the others handled %d", quorum, d, bad.failed, w.good)
	}
}

// An outage is over for all but nine of twenty, whose own path stays broken. Each
// of them ends a round, but only one before everybody else had a turn; then they
// are left to their own breakers.
func TestPartlyBack(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	w := newWorld(t, 3, options{nodes: 20, rate: 20})
	w.down = true
	w.run(90 * sec)
	for _, n := range w.nodes[4:13] {
		n.broken = true
	}
	w.down = false
	round := w.status(0).Round
	last := round
	took := w.until(3*time.Minute, "the others closed", func() bool {
		last = max(last, w.status(0).Round)
		return !slices.ContainsFunc(w.nodes, func(n *node) bool { return !n.broken && !n.b.Closed() })
	})
	if n := last - round; n > 10 {
		t.Errorf("%d rounds for nine processes with a broken path", n)
	}
	w.watch(func(n *node, _, is State) {
		if is.Open() {
			t.Errorf("%s: the fleet is %v", n.name, is.Position)
		}
	})
	w.run(time.Minute)
	t.Logf("closed %v and %d rounds after the dependency was back for most", took, last-round)
}

// A process whose own path stays broken does not keep the few others held.
func TestOneBrokenAmongFew(t *testing.T) {
	for _, nodes := range []int{3, 5} {
		w := newWorld(t, 3, options{nodes: nodes, rate: 20})
		w.down = true
		w.run(30 * sec)
		w.nodes[0].broken, w.down = true, false
		took := w.until(3*time.Minute, "the others closed", func() bool {
			return !slices.ContainsFunc(w.nodes, func(n *node) bool { return !n.broken && !n.b.Closed() })
		})
		t.Logf("%d nodes: %v", nodes, took)
	}
}

// Nor does it where the others but one have no messages: these second what that one's probes
// say. Where those with a broken path are a quorum, the scope stays open.
func TestBrokenAmongQuiet(t *testing.T) {
	for _, c := range []struct {
		name          string
		broken, nodes int
		closes        bool
	}{
		{"one of three", 1, 3, true},
		{"two of five", 2, 5, true},
		{"two of four", 2, 4, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			quiet := make(map[int]bool)
			for i := c.broken + 1; i < c.nodes; i++ {
				quiet[i] = true
			}
			w := newWorld(t, 3, options{nodes: c.nodes, rate: 20, quiet: quiet})
			w.down = true
			w.run(30 * sec)
			if s := w.status(0); !s.Open() {
				t.Fatalf("the fleet is %v", s.Position)
			}
			for _, n := range w.nodes[:c.broken] {
				n.broken = true
			}
			w.down = false
			if c.closes {
				took := w.until(3*time.Minute, "the one that is well closed", w.nodes[c.broken].b.Closed)
				t.Logf("%v", took)
				return
			}
			w.run(3 * time.Minute)
			if s := w.status(0); s.Gen > 0 || !s.Open() {
				t.Errorf("the fleet is %v", s.Position)
			}
		})
	}
}

// Half of four is a quorum. Where the path of two stays broken after an outage, they do not hold
// the two that are well again and again. Once they are well their votes count as before.
func TestHalfStaysBroken(t *testing.T) {
	for _, rate := range []int{20, 1} {
		t.Run(fmt.Sprint(rate, " messages a second"), func(t *testing.T) {
			w := newWorld(t, 3, options{nodes: 4, rate: rate})
			w.down = true
			w.run(90 * sec)
			w.nodes[0].broken, w.nodes[1].broken, w.down = true, true, false
			well := w.nodes[2:]
			took := w.until(2*time.Minute, "the two that are well closed", func() bool { return well[0].b.Closed() && well[1].b.Closed() })
			before := []int{well[0].good, well[1].good}
			w.run(10 * time.Minute)
			for i, n := range well {
				if got, want := n.good-before[i], 590*rate; got < want {
					t.Errorf("%s handled %d in ten minutes, want %d", n.name, got, want)
				}
			}
			w.nodes[0].broken, w.nodes[1].broken = false, false
			w.until(time.Minute, "the others closed", w.closed)
			well[0].broken, w.nodes[0].broken = true, true
			opened := w.until(time.Minute, "the fleet opened by the votes of two", func() bool { return w.status(3).Open() })
			t.Logf("closed after %v, opened after %v", took, opened)
		})
	}
}

// Three sides of one: nobody decides for the fleet, and each recovers by itself.
func TestSplitInThree(t *testing.T) {
	for _, before := range []bool{false, true} {
		w := newWorld(t, 5, options{nodes: 3, rate: 20})
		w.run(2 * sec)
		if before { // the fleet opens, and then falls apart
			w.down = true
			w.until(5*sec, "the fleet opened", func() bool { return w.status(0).Open() })
			w.run(20 * sec)
		}
		w.cut = islands(0, 1, 2)
		w.run(6 * sec)
		known := make([]State, 3)
		for i := range known {
			known[i] = w.status(i).State
		}
		w.down = true
		w.run(20 * sec)
		w.down = false
		took := w.until(40*sec, "each recovered by itself", w.closed)
		for i := range known {
			s := w.status(i)
			if s.State != known[i] || s.Connected {
				t.Errorf("before %v: alone, node %d went from %v to %v, connected %v", before, i, known[i], s.State, s.Connected)
			}
		}
		w.cut = whole
		probed := len(w.probes)
		healed := w.until(10*sec, "the fleet closed", func() bool { return w.closed() && !w.status(0).Open() && w.status(0).Connected })
		w.run(10 * sec)
		if !w.closed() || len(w.probes) != probed {
			t.Errorf("closed %v, %d rounds of probes though each had recovered", w.closed(), len(w.probes)-probed)
		}
		for i := range known {
			if s := w.status(i); s.State != w.status(0).State || before != (s.Gen > 0) {
				t.Errorf("before %v: node %d is at %v", before, i, s.State)
			}
		}
		t.Logf("before %v: each back after %v; fleet closed %v after the heal", before, took, healed)
	}
}

// One and two: the two are a quorum and decide, the one goes by itself. What it
// did meanwhile, and what it still says, reopens nothing.
func TestSplitOneAndTwo(t *testing.T) {
	w := newWorld(t, 7, options{nodes: 3, rate: 20})
	w.down = true
	w.run(25 * sec)
	if !w.status(0).Open() {
		t.Fatal("the fleet did not open")
	}
	w.cut = islands(1, 0, 0)
	w.run(10 * sec)
	lone := w.status(0)
	if lone.Connected || !w.status(1).Connected || !w.status(2).Connected {
		t.Fatalf("connected: %v %v %v", lone.Connected, w.status(1).Connected, w.status(2).Connected)
	}
	w.down, w.nodes[0].broken = false, true
	w.until(70*sec, "the two closed", func() bool { return w.nodes[1].b.Closed() && w.nodes[2].b.Closed() })
	if s := w.status(1); s.Position != (Position{Gen: 1}) || s.State != w.status(2).State {
		t.Errorf("the two are at %v and %v", s.Position, w.status(2).Position)
	}
	if w.status(0).State != lone.State || w.nodes[0].b.Closed() {
		t.Errorf("the one went from %v to %v", lone.State, w.status(0).State)
	}

	opened := 0
	w.watch(func(_ *node, was, is State) {
		if is.Open() || is.Compare(was.Position) < 0 {
			opened++
		}
	})
	w.cut = whole
	w.until(5*sec, "the one heard", func() bool { return w.status(0).State == w.status(1).State })
	w.run(time.Minute)
	if opened > 0 || !w.nodes[1].b.Closed() || !w.nodes[2].b.Closed() {
		t.Errorf("reopened %d times after the heal", opened)
	}
	w.nodes[0].broken = false
	w.until(40*sec, "the one closed", w.closed)

	// An outage that only the two see is theirs to decide on, too.
	w.decided = nil
	w.cut = islands(1, 0, 0)
	w.run(6 * sec)
	w.nodes[1].broken, w.nodes[2].broken = true, true
	w.until(5*sec, "the two opened", func() bool { return w.status(1).Open() && w.status(2).Open() })
	if w.status(0).Open() || !w.nodes[0].b.Closed() {
		t.Error("the one heard through a cut")
	}
}

func (w *world) status(i int) Status {
	return w.nodes[i].v.Status(w.nodes[i].clock(), scopeName)
}

// The process whose probe is out dies. Its slot passes on after the lease, and
// a dead prober is not a failed probe.
func TestProberDies(t *testing.T) {
	w := newWorld(t, 9, options{nodes: 5, rate: 20, took: 30 * ms, cfg: Config{Lease: 4 * sec}})
	w.down = true
	w.run(20 * sec)
	w.down = false
	var victim *node
	var round Position
	w.until(30*sec, "a probe is out", func() bool {
		for i, at := range w.out {
			victim, round = w.nodes[i], at
		}
		return victim != nil
	})
	victim.frozen = true
	w.run(100 * ms) // it is announced
	victim.crash()
	died := w.now
	w.until(20*sec, "closed without it", w.closed)
	if got := w.status((victim.i + 1) % 5).Position; got != (Position{Gen: round.Gen + 1}) {
		t.Errorf("at %v, want a close of %v", got, round)
	}
	if took := w.now - died; took < 4*sec || took > 10*sec {
		t.Errorf("took %v, want a little more than the lease of 4s", took)
	}
	victim.frozen = false
	victim.start()
	w.run(20 * sec)
	if !w.closed() {
		t.Error("its return opened the scope")
	}
}

// A probe that hangs is a failed one, by its own process's clock.
func TestProbeHangs(t *testing.T) {
	w := newWorld(t, 11, options{nodes: 5, rate: 20, cfg: Config{Lease: 4 * sec}})
	w.down = true
	w.run(20 * sec)
	for _, n := range w.nodes {
		n.frozen = true
	}
	at := w.status(0).Position
	w.until(40*sec, "the round ended", func() bool { return w.status(0).Round > at.Round })
	if s := w.status(0); s.Cause != breaker.CauseLost {
		t.Errorf("ended by %q", s.Cause)
	}
	w.down = false
	for _, n := range w.nodes {
		n.frozen, n.busy = false, false
	}
	w.until(time.Minute, "closed", w.closed)
}

// The scope opened for all; then only one process of ten has messages left. It
// probes, the others second, and the fleet closes.
func TestSeconds(t *testing.T) {
	w := newWorld(t, 13, options{nodes: 10, rate: 20})
	w.down = true
	w.run(10 * sec)
	for _, n := range w.nodes[1:] {
		n.idle, n.waiting = true, 0
	}
	w.down = false
	took := w.until(40*sec, "closed", w.closed)
	t.Logf("closed after %v", took)

	// Nobody has: nothing to learn, and it stays open until somebody does.
	w.nodes[0].idle = false
	for _, n := range w.nodes {
		n.idle = false
	}
	w.down = true
	w.run(10 * sec)
	for _, n := range w.nodes {
		n.idle, n.waiting = true, 0
	}
	w.down = false
	w.run(time.Minute)
	if !w.status(0).Open() {
		t.Fatal("closed without a probe")
	}
	w.nodes[3].idle = false
	w.until(15*sec, "closed", w.closed)
}

// A roster of one is a breaker by itself: ten successes close.
func TestAlone(t *testing.T) {
	w := newWorld(t, 15, options{nodes: 1, rate: 20})
	w.down = true
	w.run(10 * sec)
	failed := w.attempts
	w.run(50 * sec)
	w.down = false
	w.until(31*sec, "closed", w.closed)
	probes := 0
	for at, n := range w.probes {
		if at.Round == w.status(0).Round || n > 1 {
			probes += n
		}
	}
	if failed > 12 || probes < 10 {
		t.Errorf("%d attempts in ten seconds, %d probes in the round that closed", failed, probes)
	}
}

// Wall time gets into a process only as the incarnation that its session brings.
// An hour more or less changes nothing, to the last event.
func TestWallClockJump(t *testing.T) {
	run := func(incarnation uint64) uint64 {
		w := newWorld(t, 17, options{nodes: 5, rate: 20, loss: 0.2, incarnation: incarnation})
		w.tracing = true
		w.down = true
		w.run(20 * sec)
		w.nodes[2].crash()
		w.run(10 * sec)
		w.nodes[2].start()
		w.down = false
		w.run(40 * sec)
		if !w.closed() || len(w.trace) < 20 {
			t.Fatalf("closed %v after %d lines", w.closed(), len(w.trace))
		}
		return w.hash()
	}
	const hour = 3600 * 1_000_000_000
	at := uint64(1_800_000_000_000_000_000)
	want := run(at)
	for _, incarnation := range []uint64{at, at - hour, at + hour} {
		if got := run(incarnation); got != want {
			t.Errorf("with incarnations from %d the trace is %x, not %x", incarnation, got, want)
		}
	}
}
