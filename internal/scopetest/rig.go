// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package scopetest has the laws of internal/scope, to be run on each of its substrates in virtual
// time.
package scopetest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// A Fabric carries messages between processes.
type Fabric interface {
	// Start begins an incarnation of a process, which goes by p.Clock.
	Start(p Process) *scope.Machine

	// Stop ends an incarnation at once, without a last message.
	Stop(name string)

	// Cut disconnects the named processes, and no others: each of them reaches nobody, and nobody
	// reaches it.
	Cut(names ...string)

	// Step delivers messages that are under way. It is called each [Tick].
	Step()
}

// Process is an incarnation of a process.
type Process struct {
	Name        string
	Incarnation uint64 // counts from 1
	Roster      []string
	Config      breaker.FleetConfig
	Clock       func() time.Duration
}

// Tick is how often the rig looks at everything.
const Tick = 10 * time.Millisecond

// TB has the methods of testing.TB and rapid.T that the rig uses.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

// rig has processes with real breakers, a fabric between them, and one dependency.
type rig struct {
	t      TB
	rng    *rand.Rand
	cfg    breaker.FleetConfig
	names  []string // the roster
	f      Fabric
	now    time.Duration
	procs  []*proc
	cut    []string
	down   bool          // the dependency is down
	calls  int           // calls while the dependency was down
	probes int           // probes that the fleet permitted
	took   time.Duration // duration of a handler call
	calm   time.Duration // since when no process was cut off, began or ended
}

// proc is a process, incarnation after incarnation.
type proc struct {
	r           *rig
	name        string
	incarnation uint64
	alive       bool
	offset      time.Duration // offset of its clock
	m           *scope.Machine
	leaves      []*leaf
	broken      bool          // its own path is broken
	hangs       bool          // its handler does not return
	quiet       bool          // it has no messages
	rare        time.Duration // time between its calls; 0 means that it is called all the time
	called      time.Duration // when it was last called
}

// leaf is a breaker, and the worker behind it.
type leaf struct {
	scope  string
	b      *circuit.Breaker
	flying bool
	fleets bool // the flying call is a probe that the fleet permitted
	bad    bool
	until  time.Duration
	tok    circuit.Token
	seq    uint64
	last   scope.Position
}

// start returns a rig with that roster, and with the scope q in each of its processes.
func start(t TB, mk func() Fabric, cfg breaker.FleetConfig, names ...string) *rig {
	t.Helper()
	cfg.Base, cfg.Cap = cmp.Or(cfg.Base, 100*time.Millisecond), cmp.Or(cfg.Cap, 2*time.Second)
	cfg.Lease, cfg.Silent = 5*time.Second, 2*time.Second
	r := &rig{t: t, rng: rand.New(rand.NewPCG(1, 1)), cfg: cfg.WithDefaults(), names: names, f: mk(), took: 30 * time.Millisecond}
	for _, n := range names {
		r.add(n).start()
	}
	r.run(3 * time.Second)
	for _, p := range r.procs {
		p.adopt("q")
	}
	r.run(time.Second)
	return r
}

func (r *rig) add(name string) *proc {
	p := &proc{r: r, name: name, offset: time.Duration(len(r.procs)+1) * time.Hour}
	r.procs = append(r.procs, p)
	return p
}

func (p *proc) now() time.Duration { return p.r.now + p.offset }

func (p *proc) start() {
	p.incarnation++
	p.alive, p.leaves, p.r.calm = true, nil, p.r.now
	p.m = p.r.f.Start(Process{Name: p.name, Incarnation: p.incarnation, Roster: p.r.names, Config: p.r.cfg, Clock: p.now})
}

func (p *proc) kill() {
	p.alive, p.leaves, p.r.calm = false, nil, p.r.now
	p.r.f.Stop(p.name)
}

// adopt takes a scope over.
func (p *proc) adopt(name string) *leaf {
	p.r.t.Helper()
	b, err := circuit.New(name, breaker.Config{Base: p.r.cfg.Base, Cap: p.r.cfg.Cap, Slow: 9 * time.Second}, circuit.WithRand(p.r.rng.Float64))
	if err != nil {
		p.r.t.Fatalf("%v", err)
	}
	l := &leaf{scope: name, b: b}
	p.leaves = append(p.leaves, l)
	a, err := p.m.Adopt(p.now(), name)
	if err != nil {
		p.r.t.Fatalf("%v", err)
	}
	a.Apply(p.now(), b)
	p.drive(l)
	return l
}

func (p *proc) leave(l *leaf) {
	p.leaves = slices.DeleteFunc(p.leaves, func(other *leaf) bool { return other == l })
	p.m.Leave(p.now(), l.scope)
}

// drive applies the actions of p's Machine.
func (p *proc) drive(l *leaf) {
	p.m.Observe(p.now(), l.scope, l.b.Snapshot(p.now()))
	for {
		acts := p.m.Actions(nil)
		if len(acts) == 0 {
			break
		}
		for _, a := range acts {
			i := slices.IndexFunc(p.leaves, func(l *leaf) bool { return l.scope == a.Scope })
			if i < 0 {
				continue
			}
			a.Apply(p.now(), p.leaves[i].b)
			if a.Kind != scope.Probe {
				p.leaves[i].fleets = false // the permit is void
			}
			p.m.Observe(p.now(), a.Scope, p.leaves[i].b.Snapshot(p.now()))
		}
	}
	at := p.at(l)
	if at.Compare(l.last) < 0 {
		p.r.t.Fatalf("%s went from %v back to %v", p.name, l.last, at)
	}
	l.last = at
}

// at returns the fleet's position, as p knows it.
func (p *proc) at(l *leaf) scope.Position {
	p.m.Lock()
	defer p.m.Unlock()
	if sc := p.m.Get(l.scope); sc != nil {
		return sc.Known.Position
	}
	return scope.Position{}
}

func (p *proc) step() {
	for _, l := range slices.Clone(p.leaves) {
		now := p.now()
		l.b.Tick(now)
		if l.flying && now >= l.until && !p.hangs {
			l.flying, l.fleets = false, false
			if l.bad {
				l.b.Failure(now, l.tok, true)
			} else {
				l.b.Success(now, l.tok)
			}
		}
		if !l.flying && !p.quiet && now-p.called >= p.rare {
			p.called = now
			p.call(l)
		}
		p.m.Want(now, l.scope, !p.quiet && (p.rare == 0 || now-p.called < sec) && !l.b.Closed())
		p.m.Tick(now)
		p.drive(l)
	}
	if len(p.leaves) == 0 {
		p.m.Tick(p.now())
	}
}

func (p *proc) call(l *leaf) {
	now := p.now()
	tok, refused := l.b.Admit(now, l.seq+1)
	if !refused.OK() {
		return
	}
	l.seq++
	l.flying, l.until, l.tok, l.bad = true, now+p.r.took, tok, p.r.down || p.broken
	l.fleets = tok.Probe() && l.b.Held()
	if p.r.down {
		p.r.calls++
	}
	if !l.fleets {
		return
	}
	p.r.probes++
	// For Silent and Settle after a cut or a death, processes do not know yet who is on their side.
	if p.r.now-p.r.calm > p.r.cfg.Silent+p.r.cfg.Settle {
		for _, q := range p.r.procs {
			for _, other := range q.leaves {
				if q != p && other.scope == l.scope && other.fleets && q.reached() && p.reached() {
					p.r.t.Errorf("%v: %s probes while the probe of %s is out", p.r.now, p.name, q.name)
				}
			}
		}
	}
}

func (p *proc) reached() bool { return p.alive && !slices.Contains(p.r.cut, p.name) }

// cutOff cuts processes off. Without names it heals the cut.
func (r *rig) cutOff(names ...string) {
	r.cut, r.calm = names, r.now
	r.f.Cut(names...)
}

func (r *rig) run(d time.Duration) {
	for end := r.now + d; r.now < end; {
		r.now += Tick
		r.f.Step()
		for _, p := range r.procs {
			if p.alive {
				p.step()
			}
		}
	}
}

// until runs until ok returns true, and returns how long that took. It fails the test after d.
func (r *rig) until(d time.Duration, what string, ok func() bool) time.Duration {
	r.t.Helper()
	began := r.now
	for !ok() {
		if r.now-began >= d {
			r.t.Fatalf("%s: not within %v: %s", what, d, r.describe())
		}
		r.run(Tick)
	}
	return r.now - began
}

func (r *rig) describe() (s string) {
	for _, p := range r.procs {
		for _, l := range p.leaves {
			f := p.m.Describe(p.now(), l.scope)
			s += fmt.Sprintf("\n%s: breaker %v, held %v, fleet %v, heard %d", p.name, l.b.Snapshot(p.now()).State, l.b.Held(), p.at(l), f.Heard)
		}
	}
	return s
}

// every returns a function that reports whether ok holds for the first scope of each process in of.
// If of is empty, that is each process that lives.
func (r *rig) every(ok func(p *proc, l *leaf) bool, of ...*proc) func() bool {
	return func() bool {
		for _, p := range r.procs {
			if p.alive && len(p.leaves) > 0 && (len(of) == 0 || slices.Contains(of, p)) && !ok(p, p.leaves[0]) {
				return false
			}
		}
		return true
	}
}

func open(p *proc, l *leaf) bool   { return p.at(l).Open() && l.b.Held() }
func closed(p *proc, l *leaf) bool { return !p.at(l).Open() && l.b.Closed() }
