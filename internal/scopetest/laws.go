// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scopetest

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

const sec = time.Second

// Run runs all laws on a substrate. mk makes a fabric without processes.
func Run(t *testing.T, mk func() Fabric) {
	for _, law := range []struct {
		name string
		run  func(t *testing.T, mk func() Fabric)
	}{
		{"one bad process is its own matter", oneBad},
		{"an outage is probed as one and closed for all", outage},
		{"a quorum closes, not one whose probe passes", quorumCloses},
		{"a slow probe keeps its turn", slowProbes},
		{"a fleet of one", alone},
		{"who is cut off goes by itself and comes back", cutOff},
		{"all cut off go by themselves, and have recovered", allCutOff},
		{"a prober that dies does not end the round", proberDies},
		{"a prober that is cut off counts for nothing", proberCut},
		{"a probe that hangs has failed", probeHangs},
		{"calls that outlast a probe's lease close it too", outlasts},
		{"those without a message second", seconds},
		{"who may not probe is let go when nobody does", outsider},
		{"who is called seldom is let go when no call comes in a turn", seldom},
		{"a scope goes on where its last owner was", takeOver},
		{"an owner that is there makes the next careful", sharing},
		{"anything", anything},
	} {
		t.Run(law.name, func(t *testing.T) { law.run(t, mk) })
	}
}

func oneBad(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{Quorum: 0.1}, "a", "b", "c", "d", "e")
	r.procs[1].broken = true
	for range 1000 {
		r.run(Tick)
		for i, p := range r.procs {
			if l := p.leaves[0]; p.at(l).Open() || i != 1 && !l.b.Closed() {
				t.Fatalf("%s: %v, closed %v", p.name, p.at(l), l.b.Closed())
			}
		}
	}
	if r.procs[1].leaves[0].b.Closed() {
		t.Error("its own breaker did not open")
	}
}

func outage(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{Successes: 6}, "a", "b", "c", "d", "e")
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.run(5 * sec)
	r.calls = 0
	before := r.procs[0].at(r.procs[0].leaves[0])
	r.run(20 * sec)
	if after := r.procs[0].at(r.procs[0].leaves[0]); after.Gen != 0 || after.Round < before.Round+5 {
		t.Errorf("from %v to %v in 20s, with periods of 2s", before, after)
	}
	if r.calls < 5 || r.calls > 20 {
		t.Errorf("%d calls of a dead dependency in 20s, with periods of 2s", r.calls)
	}
	r.down, r.probes = false, 0
	r.until(10*sec, "closes", r.every(closed))
	if r.probes < 6 || r.probes > 8 {
		t.Errorf("closed by %d probes, want 6", r.probes)
	}
	at := r.procs[0].at(r.procs[0].leaves[0])
	r.run(10 * sec)
	if !r.every(func(p *proc, l *leaf) bool { return closed(p, l) && p.at(l) == at })() || at.Gen != 1 {
		t.Errorf("later%s", r.describe())
	}
}

func quorumCloses(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{Successes: 1}, "a", "b", "c", "d", "e")
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.down, r.probes = false, 0
	r.until(10*sec, "closes", r.every(closed))
	if r.probes != 3 {
		t.Errorf("closed by %d probes, a quorum is 3", r.probes)
	}
}

func slowProbes(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{Successes: 4}, "a", "b", "c")
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.down, r.took = false, 4*sec
	r.until(30*sec, "closes", r.every(closed)) // one after the other, see rig
}

// outlasts has a dependency that is well, but whose calls take longer than a probe may.
func outlasts(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.down, r.took = false, r.cfg.Lease+2*sec
	r.until(2*r.cfg.Cap+3*r.cfg.Lease+4*r.cfg.Turn+time.Duration(r.cfg.Successes+1)*r.took, "closes", r.every(closed))
}

func alone(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{Successes: 3}, "a")
	r.down = true
	r.until(5*sec, "opens", r.every(open))
	r.run(10 * sec)
	r.down = false
	r.until(5*sec, "closes", r.every(closed))
}

func cutOff(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.run(5 * sec)
	a, rest := r.procs[0], r.procs[1:]
	r.cutOff("a")
	r.run(r.cfg.Silent + sec)
	known := a.at(a.leaves[0])
	r.until(5*sec, "goes by itself", func() bool { return !a.leaves[0].b.Held() })
	r.run(5 * sec)
	r.until(5*sec, "the others hold", r.every(open, rest...))
	r.down = false
	r.until(10*sec, "the others close", r.every(closed, rest...))
	r.until(5*sec, "recovers by itself", func() bool { return a.leaves[0].b.Closed() })
	if a.at(a.leaves[0]) != known {
		t.Errorf("cut off it went from %v to %v", known, a.at(a.leaves[0]))
	}
	a.broken = true
	r.until(10*sec, "opens by itself", func() bool { return !a.leaves[0].b.Closed() })
	r.cutOff()
	at := rest[0].at(rest[0].leaves[0])
	r.until(5*sec, "hears what was decided", func() bool { return a.at(a.leaves[0]) == at })
	r.run(5 * sec)
	if !r.every(func(p *proc, l *leaf) bool { return closed(p, l) && p.at(l) == at }, rest...)() {
		t.Errorf("what one did while it was cut off opened more%s", r.describe())
	}
	a.broken = false
	r.until(5*sec, "back in line", r.every(func(p *proc, l *leaf) bool { return closed(p, l) && p.at(l) == at }))
	r.run(5 * sec)
	if !r.every(func(p *proc, l *leaf) bool { return closed(p, l) && p.at(l) == at })() {
		t.Errorf("later%s", r.describe())
	}
}

func allCutOff(t *testing.T, mk func() Fabric) {
	for _, before := range []bool{false, true} { // the outage began before the cut
		r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
		if r.down = before; before {
			r.until(10*sec, "opens", r.every(open))
		}
		r.run(3 * sec)
		r.cutOff("a", "b", "c")
		r.run(r.cfg.Silent + 5*sec)
		r.down = true
		r.run(5 * sec)
		r.down = false
		r.until(10*sec, "each recovers", r.every(func(_ *proc, l *leaf) bool { return l.b.Closed() }))
		r.probes = 0
		r.cutOff()
		r.until(10*sec, "closes", r.every(closed))
		if r.probes != 0 {
			t.Errorf("%d probes though each had recovered", r.probes)
		}
		if at := r.procs[0].at(r.procs[0].leaves[0]); before != (at.Gen > 0) {
			t.Errorf("outage before the cut %v: at %v", before, at)
		}
	}
}

// probing runs until a probe is out that will not end soon, and returns the process that probes.
func (r *rig) probing() *proc {
	r.t.Helper()
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.run(3 * sec)
	r.down = false
	for _, p := range r.procs {
		p.hangs = true
	}
	var who *proc
	r.until(10*sec, "probes", func() bool {
		for _, p := range r.procs {
			if len(p.leaves) > 0 && p.leaves[0].fleets {
				who = p
			}
		}
		return who != nil
	})
	r.run(100 * time.Millisecond) // the others know
	for _, p := range r.procs {
		p.hangs = p == who
	}
	return who
}

func proberDies(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c", "d")
	p := r.probing()
	at := p.at(p.leaves[0])
	p.kill()
	other := r.procs[(slices.Index(r.procs, p)+1)%len(r.procs)]
	took := r.until(15*sec, "closes without it", r.every(closed))
	if got := other.at(other.leaves[0]); got != (scope.Position{Gen: at.Gen + 1}) {
		t.Errorf("at %v, want a close of %v", got, at)
	}
	if took < r.cfg.Lease-200*time.Millisecond {
		t.Errorf("after %v, and its lease is %v", took, r.cfg.Lease)
	}
	p.hangs = false
	p.start()
	p.adopt("q")
	at = other.at(other.leaves[0])
	r.run(10 * sec)
	if !r.every(closed)() || other.at(other.leaves[0]) != at {
		t.Errorf("its return opened the scope%s", r.describe())
	}
}

func proberCut(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c", "d")
	p := r.probing()
	r.cutOff(p.name)
	var rest []*proc
	for _, q := range r.procs {
		if q != p {
			rest = append(rest, q)
		}
	}
	r.until(15*sec, "the others close", r.every(closed, rest...))
	p.hangs = false
	r.until(10*sec, "it recovers", func() bool { return p.leaves[0].b.Closed() })
	r.cutOff()
	r.until(5*sec, "back in line", r.every(closed))
}

func probeHangs(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
	p := r.probing()
	at := p.at(p.leaves[0])
	r.until(r.cfg.Lease+sec, "the round ends", r.every(func(p *proc, l *leaf) bool { return p.at(l).Compare(at) > 0 }))
	if s := p.m.Describe(p.now(), "q"); s.Round != at.Round+1 || s.Cause != breaker.CauseLost {
		t.Errorf("%+v after %v", s, at)
	}
	p.hangs = false
	r.until(10*sec, "closes", r.every(closed))
}

func seconds(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c", "d", "e")
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	for _, p := range r.procs {
		p.quiet = true
	}
	r.down = false
	r.run(20 * sec)
	if !r.every(open)() {
		t.Fatal("closed without a probe")
	}
	r.procs[3].quiet = false
	r.until(15*sec, "closes", r.every(closed))
}

// seldom has processes that call so rarely that no call comes in a turn.
func seldom(t *testing.T, mk func() Fabric) {
	periods := []time.Duration{4 * sec, 20 * sec, 60 * sec}
	if os.Getenv("STORMGUARD_FULL") != "" {
		periods = append(periods, 300*sec)
	}
	for _, every := range periods {
		r := start(t, mk, breaker.FleetConfig{Base: 30 * sec, Cap: 30 * sec}, "a", "b", "c")
		r.down = true
		r.until(10*sec, "opens", r.every(open))
		for i, p := range r.procs {
			p.rare, p.called = every, p.now()-time.Duration(i)*every/3
		}
		r.run(every)
		r.down = false
		r.until(2*r.cfg.Cap+2*r.cfg.Lease+4*r.cfg.Turn+time.Duration(r.cfg.Successes+3)*every, "closes", r.every(closed))
	}
}

func outsider(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
	x := r.add("x")
	x.start()
	r.run(2 * sec)
	x.adopt("q")
	r.run(sec)
	r.down = true
	r.until(10*sec, "opens", r.every(open))
	r.run(10 * sec) // the others probe
	if !x.leaves[0].b.Held() {
		t.Fatal("it goes by itself while others probe")
	}
	r.down = false
	for _, p := range r.procs[:3] {
		p.quiet = true
	}
	alone := r.until(20*sec, "is let go", func() bool { return !x.leaves[0].b.Held() })
	if least := r.cfg.Lease; alone < least {
		t.Errorf("after %v, a probe may take %v", alone, least)
	}
	r.until(5*sec, "closes by itself", func() bool { return x.leaves[0].b.Closed() })
	r.run(10 * sec)
	if !x.leaves[0].b.Closed() {
		t.Error("held again, though nothing was decided")
	}
	r.procs[0].quiet = false
	r.until(15*sec, "closes", r.every(closed))
}

func takeOver(t *testing.T, mk func() Fabric) {
	for _, c := range []struct {
		name  string
		leave bool // the owner gives it up in order; else it dies
		next  string
		again bool // the owner is started again
	}{
		{name: "given up", leave: true, next: "b"},
		{name: "given up, and back", leave: true, next: "a"},
		{name: "died", next: "b"},
		{name: "died, and started again", next: "a", again: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
			a := r.procs[0]
			l := a.adopt("p")
			r.run(sec)
			// A trouble that lasts longer than it takes to know that a process is gone.
			l.b.Trip(a.now(), "timeout")
			r.run(50 * time.Millisecond)
			a.broken = true
			r.until(60*sec, "climbs", func() bool {
				return l.b.Snapshot(a.now()).BackoffLevel >= 6 && l.b.Snapshot(a.now()).State == breaker.Open
			})
			r.run(50 * time.Millisecond)
			if c.leave {
				a.leave(l)
				a.broken = false
				r.run(100 * time.Millisecond)
			} else {
				a.kill()
				if !c.again { // its vote counts until it is known to be gone
					r.until(r.cfg.Silent+sec, "known to be gone", func() bool { return r.procs[1].m.Describe(r.procs[1].now(), "q").Heard == 2 })
				}
			}
			next := r.procs[slices.IndexFunc(r.procs, func(p *proc) bool { return p.name == c.next })]
			if c.again {
				a.broken = false
				a.start()
			}
			m := next.adopt("p")
			if m.b.Closed() {
				t.Fatal("begins closed")
			}
			if c.leave && !m.b.Held() {
				t.Error("it is not held for the rest of the period")
			}
			r.until(10*sec, "recovers", func() bool { return m.b.Closed() })
		})
	}
}

func sharing(t *testing.T, mk func() Fabric) {
	r := start(t, mk, breaker.FleetConfig{}, "a", "b", "c")
	a, b := r.procs[0], r.procs[1]
	l := a.adopt("t")
	r.run(sec)
	a.broken = true
	l.b.Trip(a.now(), "timeout")
	r.until(20*sec, "climbs", func() bool {
		return l.b.Snapshot(a.now()).BackoffLevel >= 5 && l.b.Snapshot(a.now()).State == breaker.Open
	})
	r.run(50 * time.Millisecond)
	m := b.adopt("t")
	if m.b.Held() || m.b.Snapshot(b.now()).State == breaker.Closed {
		t.Errorf("begins %+v", m.b.Snapshot(b.now()))
	}
	r.until(sec, "recovers", func() bool { return m.b.Closed() })
}

// anything has random things happen for a while. Views do not go back, and probes do not overlap
// between connected processes, see rig. When all is well every breaker closes, and stays closed.
func anything(t *testing.T, mk func() Fabric) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			names := []string{"a", "b", "c", "d", "e"}
			r := start(t, mk, breaker.FleetConfig{Successes: 4}, names[:1+seed%5]...)
			for range seed {
				r.rng.Uint64()
			}
			pick := func() *proc { return r.procs[r.rng.IntN(len(r.procs))] }
			for range 12 {
				switch p := pick(); r.rng.IntN(8) {
				case 0:
					r.down = !r.down
				case 1:
					r.cutOff(p.name, pick().name)
				case 2:
					r.cutOff()
				case 3:
					if p.alive {
						p.kill()
					}
				case 4:
					if !p.alive {
						p.start()
						p.adopt("q")
					}
				case 5:
					p.hangs = !p.hangs
				case 6:
					p.broken = !p.broken
				case 7:
					p.quiet = !p.quiet
				}
				r.run(time.Duration(r.rng.IntN(6000)) * time.Millisecond)
			}
			r.down = false
			r.cutOff()
			for _, p := range r.procs {
				if !p.alive {
					p.start()
					p.adopt("q")
				}
				p.hangs, p.broken, p.quiet = false, false, false
			}
			r.until(30*sec, "closes", r.every(closed))
			r.run(5 * sec)
			at := r.procs[0].at(r.procs[0].leaves[0])
			if !r.every(func(p *proc, l *leaf) bool { return closed(p, l) && p.at(l) == at })() {
				t.Errorf("later%s", r.describe())
			}
		})
	}
}
