// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"
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

// scopetest has the laws of a scope in a fleet; here is what takes many processes, or
// those whose path is broken.

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
		"fleet, quorum 0.1":      {cfg: Config{Quorum: 0.1}},
		"fleet, 35 % loss":       {loss: 0.35, dup: 0.1},
		"fleet, delay 50-100 ms": {delay: 50 * ms},
	} {
		if n := outage(t, name, d, o); n > 30 || n*ratio > local {
			t.Errorf("%s: %d attempts, want at most 30, and one in %d of %d", name, n, ratio, local)
		}
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

// Where no quorum can close the scope, one that is well is not held for ever by those whose path
// stays broken.
func TestWellAmongBroken(t *testing.T) {
	for _, c := range []struct {
		name                        string
		nodes, broken, quiet, ended int
	}{
		{"one of three ended", 3, 1, 0, 1},
		{"two of three are broken", 3, 2, 0, 0},
		{"four of five are broken", 5, 4, 0, 0},
		{"two of four are broken, one is quiet", 4, 2, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			quiet := make(map[int]bool)
			for i := range c.quiet {
				quiet[c.broken+1+i] = true
			}
			w := newWorld(t, 3, options{nodes: c.nodes, rate: 20, quiet: quiet})
			w.down = true
			w.run(90 * sec)
			for i, n := range w.nodes {
				n.broken = i < c.broken
				if i >= c.nodes-c.ended {
					n.crash()
				}
			}
			w.down = false
			well := w.nodes[c.broken]
			took := w.until(5*time.Minute, "the one that is well closed", well.b.Closed)
			before := well.good
			w.run(10 * time.Minute)
			if got, want := well.good-before, 590*20; got < want {
				t.Errorf("it handled %d in ten minutes, want %d", got, want)
			}
			for _, n := range w.nodes {
				n.broken = false
			}
			w.until(2*time.Minute, "all closed", w.closed)
			t.Logf("%v", took)
		})
	}
}

func (w *world) status(i int) Status {
	return w.nodes[i].v.Status(w.nodes[i].clock(), scopeName)
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
