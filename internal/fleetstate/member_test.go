// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// crew is a few Members that hear each other when told to. Their breakers' clock is
// another than that of their session.
type crew struct {
	t           *testing.T
	now         time.Duration
	names       []string
	v           []*Verdicts
	m           []*Member
	incarnation uint64 // of the last one, if it is not the first
}

func newCrew(t *testing.T, names ...string) *crew {
	c := &crew{t: t, now: time.Hour + sec, names: names}
	for i := range names {
		v, err := NewVerdicts(c.fleet(), Config{}, c.self(i), Roster{Number: 1, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		c.v = append(c.v, v)
		c.m = append(c.m, NewMember(c.fleet, v, nil))
	}
	for range 3 {
		c.talk()
		c.pass(sec)
	}
	c.talk()
	return c
}

// fleet is the clock of the session.
func (c *crew) fleet() time.Duration { return c.now - time.Hour }

func (c *crew) self(i int) crdt.Replica {
	if c.incarnation > 0 && i == len(c.names)-1 {
		return crdt.Replica{Name: c.names[i], Incarnation: c.incarnation}
	}
	return crdt.Replica{Name: c.names[i], Incarnation: 1}
}

// talk lets each hear all of each other, and do nothing about it yet.
func (c *crew) talk() {
	c.t.Helper()
	for range 2 {
		c.now += ms
		for i, from := range c.v {
			for j, to := range c.v {
				if i == j {
					continue
				}
				b, _ := from.Delta(c.fleet(), nil, c.self(j), 0, 4000)
				if err := to.Merge(crdt.Contact{From: c.self(i), Now: c.fleet(), Sent: c.fleet(), Echo: c.fleet() - ms}, b); err != nil {
					c.t.Fatal(err)
				}
			}
		}
	}
}

// pass makes time pass for all, 20ms at a time.
func (c *crew) pass(d time.Duration, waiting ...*circuit.Breaker) {
	at := make(map[*circuit.Breaker]bool)
	for _, b := range waiting {
		at[b] = true
	}
	for end := c.now + d; c.now < end; {
		c.now += 20 * ms
		for _, m := range c.m {
			m.Step(c.now, at)
		}
	}
}

func (c *crew) adopt(i int, path ...string) *circuit.Breaker {
	c.t.Helper()
	b, err := circuit.New(fmt.Sprint(path), breaker.Config{})
	if err != nil {
		c.t.Fatal(err)
	}
	if err := c.m[i].Adopt(c.now, b, path, 0); err != nil {
		c.t.Fatal(err)
	}
	return b
}

// phase is what a process itself says about a scope.
func (c *crew) phase(i int, scope string) Phase {
	for _, w := range c.v[i].Status(c.fleet(), scope).Votes {
		if w.Node == c.self(i) {
			return w.Phase
		}
	}
	return PhaseClosed
}

// A force that lasts behind a longer open period of the breaker's own bars the hold,
// and shows it nowhere else: what the fleet asks for then comes to an end all the same,
// and the hold takes when the force is over.
func TestMemberHoldsAfterAForceBehindAnOpenPeriod(t *testing.T) {
	c := newCrew(t, "a", "b", "c")
	var bs []*circuit.Breaker
	for i := range 3 {
		b, err := circuit.New("orders", breaker.Config{Base: 30 * sec, Cap: 30 * sec})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.m[i].Adopt(c.now, b, []string{"g", "orders"}, 0); err != nil {
			t.Fatal(err)
		}
		bs = append(bs, b)
	}
	c.pass(100 * ms)
	bs[2].Trip(c.now, "run")
	bs[2].Force(c.now, 5*sec, "operator")
	if s := bs[2].Snapshot(c.now); s.Forced || !s.Barred {
		t.Fatalf("not behind its own period: %+v", s)
	}
	bs[0].Trip(c.now, "run")
	bs[1].Trip(c.now, "run")
	for range 3 {
		c.pass(20 * ms)
		c.talk()
	}
	for range 100 {
		c.pass(20*ms, bs[2])
		if left := c.v[2].Actions(nil); len(left) > 0 {
			t.Fatalf("asked for at one instant, again and again: %+v", left)
		}
		c.talk()
	}
	if !bs[0].Held() || !bs[1].Held() || bs[2].Held() {
		t.Errorf("held: %v, %v and %v by force", bs[0].Held(), bs[1].Held(), bs[2].Held())
	}
	for range 200 {
		c.pass(20 * ms)
		c.talk()
	}
	if s := bs[2].Snapshot(c.now); !s.Held || s.Barred {
		t.Errorf("after the force: %+v", s)
	}
}

// A process says that a topic has tripped while enough of its partitions have, and
// not because one of them begins half-open or is held.
func TestMemberSpeaksForATopic(t *testing.T) {
	c := newCrew(t, "a", "b", "c")
	var bs []*circuit.Breaker
	for i := range 3 {
		bs = append(bs, c.adopt(0, "g", "orders", fmt.Sprint(i)))
	}
	c.pass(100 * ms)
	for _, b := range bs {
		b.Force(c.now, time.Hour, "operator")
	}
	c.pass(100 * ms)
	bs[0].Release(c.now)
	bs[1].Release(c.now)
	c.pass(100 * ms)
	if p := c.phase(0, "g/orders"); p != PhaseClosed || bs[0].Closed() {
		t.Fatalf("with two half-open partitions and a forced one: %v", p)
	}
	for _, b := range bs {
		b.ForceClosed(c.now, "operator")
	}
	bs[0].Trip(c.now, "run")
	c.pass(40 * ms)
	if p := c.phase(0, "g/orders"); p != PhaseClosed {
		t.Errorf("with one partition of three: %v", p)
	}
	if p := c.phase(0, "g/orders/0"); p != PhaseOpen {
		t.Errorf("the partition's own scope: %v", p)
	}
	bs[1].Trip(c.now, "run")
	c.pass(40 * ms)
	if p := c.phase(0, "g/orders"); p != PhaseOpen {
		t.Errorf("with two partitions of three: %v", p)
	}
	bs[0].ForceClosed(c.now, "operator")
	c.pass(40 * ms)
	if p := c.phase(0, "g/orders"); p != PhaseClosed {
		t.Errorf("with one again: %v", p)
	}
}

// The fleet's hold of a topic is one of each of its partitions, also of one that
// comes later; one of them probes, and all are closed together.
func TestMemberHoldsAllOfATopic(t *testing.T) {
	c := newCrew(t, "a", "b")
	a0, b0 := c.adopt(0, "g", "orders", "0"), c.adopt(1, "g", "orders", "1")
	a0.Trip(c.now, "run")
	b0.Trip(c.now, "run")
	c.pass(20 * ms)
	c.talk()
	c.pass(20*ms, a0, b0)
	if !a0.Held() || !b0.Held() {
		t.Fatal("not held")
	}
	a1 := c.adopt(0, "g", "orders", "2")
	if !a1.Held() {
		t.Error("a partition that comes later is not held")
	}
	s, ok := c.m[0].Scope(a1)
	if !ok || s.Name != "g/orders" || s.State != breaker.Open || !s.Held || s.Round != 1 || s.Heard != 2 || s.Need != 2 {
		t.Errorf("%+v", s)
	}
	all := []*circuit.Breaker{a0, a1, b0}
	probes := 0
	for range 400 {
		c.talk()
		c.pass(20*ms, a0, b0) // nothing waits at a1
		for _, b := range all {
			if tok, r := b.Admit(c.now, 1); r.OK() && tok.Probe() {
				if b == a1 {
					t.Fatal("a partition without a message has the permit")
				}
				probes++
				b.Success(c.now, tok)
			}
		}
		if a0.Closed() && a1.Closed() && b0.Closed() {
			if probes != 10 {
				t.Errorf("%d probes", probes)
			}
			return
		}
	}
	t.Fatalf("not closed after %d probes: %+v", probes, c.m[0].Scopes())
}

// A topic that processes let go while they were cut off has not recovered before a call
// has returned there. A partition that an operator has closed shows nothing about it.
func TestMemberTellsNoRecoveryWithoutACall(t *testing.T) {
	c := newCrew(t, "a", "b", "c", "d")
	var bs, freed []*circuit.Breaker
	for i := range c.names {
		bs = append(bs, c.adopt(i, "g", "orders", fmt.Sprint(i)))
	}
	for i := range 2 {
		freed = append(freed, c.adopt(2+i, "g", "orders", fmt.Sprint(4+i)))
	}
	bs[0].Trip(c.now, "run")
	bs[1].Trip(c.now, "run")
	for range 3 {
		c.pass(20 * ms)
		c.talk()
	}
	for i, b := range bs {
		if !b.Held() {
			t.Fatalf("%s is not held: %+v", c.names[i], c.m[i].Scopes())
		}
	}
	for _, b := range freed {
		b.ForceClosed(c.now, "operator")
	}
	cutOff(c)
	for i, b := range bs {
		if s := b.Snapshot(c.now); s.State != breaker.HalfOpen || s.Held {
			t.Fatalf("%s is not let go: %+v", c.names[i], s)
		}
	}
	for range 10 {
		c.talk()
		c.pass(20 * ms)
	}
	for i := range c.names {
		if s := c.v[i].Status(c.fleet(), "g/orders"); !s.Open() {
			t.Errorf("%s: the topic is %v, and nobody has called", c.names[i], s.Position)
		}
	}
}

// A process whose topic has recovered in one partition while it was cut off counts as
// passed, whether or not it has another partition to which no message came.
func TestMemberTellsARecoveryOfOnePartition(t *testing.T) {
	c := newCrew(t, "a", "b", "c", "d")
	var bs []*circuit.Breaker
	for i := range c.names {
		bs = append(bs, c.adopt(i, "g", "orders", fmt.Sprint(i)))
	}
	idle := c.adopt(3, "g", "orders", "4")
	bs[0].Trip(c.now, "run")
	bs[1].Trip(c.now, "run")
	for range 3 {
		c.pass(20 * ms)
		c.talk()
	}
	cutOff(c)
	for _, b := range bs[2:] {
		for !b.Closed() {
			tok, r := b.Admit(c.now, 1)
			if !r.OK() {
				t.Fatalf("%s: %+v", b.Name(), r)
			}
			b.Success(c.now, tok)
		}
	}
	if s := idle.Snapshot(c.now); s.State != breaker.HalfOpen {
		t.Fatalf("not let go, or closed without a call: %+v", s)
	}
	for range 10 {
		c.pass(20 * ms)
		c.talk()
	}
	for i := range c.names {
		if s := c.v[i].Status(c.fleet(), "g/orders"); s.Open() || s.Gen != 1 {
			t.Errorf("%s: the topic is %v", c.names[i], s.Position)
		}
		if p := c.phase(i, "g/orders"); i >= 2 && p != PhasePassed {
			t.Errorf("%s says %v, and its probes have passed", c.names[i], p)
		}
	}
}

// What an operator closes has not recovered: no call has returned. The fleet stays open until
// probes have passed, also where all that a process has was closed while it was cut off.
func TestMemberTellsNoRecoveryOfAnOperatorsClose(t *testing.T) {
	const held, letGo, again = "while it is held", "after it was let go", "after it tripped again"
	for _, topic := range []bool{false, true} {
		for _, when := range []string{held, letGo, again} {
			t.Run(fmt.Sprintf("topic %v, %s", topic, when), func(t *testing.T) {
				c := newCrew(t, "a", "b", "c", "d")
				var bs []*circuit.Breaker
				for i := range c.names {
					path := []string{"g", "orders"}
					if topic {
						path = append(path, fmt.Sprint(i))
					}
					bs = append(bs, c.adopt(i, path...))
				}
				bs[0].Trip(c.now, "run")
				bs[1].Trip(c.now, "run")
				for range 3 {
					c.pass(20 * ms)
					c.talk()
				}
				each := func(do func(b *circuit.Breaker)) {
					for _, b := range bs {
						do(b)
					}
					c.pass(40 * ms)
				}
				freed := func(b *circuit.Breaker) { b.ForceClosed(c.now, "operator") }
				if each(func(b *circuit.Breaker) {
					if !b.Held() {
						t.Fatalf("%s is not held", b.Name())
					}
				}); when == held {
					each(freed)
				}
				cutOff(c)
				if when == again {
					each(func(b *circuit.Breaker) { b.Trip(c.now, "run") })
				}
				if when != held {
					each(freed)
				}
				for range 10 {
					c.talk()
					c.pass(20 * ms)
				}
				for i := range c.names {
					if s := c.v[i].Status(c.fleet(), "g/orders"); !s.Open() {
						t.Errorf("%s: the fleet is %v, and nobody has called", c.names[i], s.Position)
					}
				}
				closed := func() bool {
					return !slices.ContainsFunc(bs, func(b *circuit.Breaker) bool { return !b.Closed() })
				}
				for n := 0; !closed(); n++ {
					if n == 1000 {
						t.Fatalf("probes do not close it: %+v", c.m[0].Scopes())
					}
					c.talk()
					c.pass(20*ms, bs...)
					for _, b := range bs {
						if tok, r := b.Admit(c.now, 1); r.OK() && tok.Probe() {
							b.Success(c.now, tok)
						}
					}
				}
			})
		}
	}
}

// A partition that an operator had closed shows a recovery once its own probes have closed it
// after it tripped again.
func TestMemberTellsARecoveryAfterAnOperatorsClose(t *testing.T) {
	c := newCrew(t, "a", "b", "c", "d")
	var bs []*circuit.Breaker
	for i := range c.names {
		bs = append(bs, c.adopt(i, "g", "orders", fmt.Sprint(i)))
	}
	bs[0].Trip(c.now, "run")
	bs[1].Trip(c.now, "run")
	for range 3 {
		c.pass(20 * ms)
		c.talk()
	}
	for _, b := range bs {
		b.ForceClosed(c.now, "operator")
	}
	c.pass(40 * ms)
	cutOff(c)
	for _, b := range bs {
		b.Trip(c.now, "run")
	}
	c.pass(sec)
	for _, b := range bs {
		for !b.Closed() {
			tok, r := b.Admit(c.now, 1)
			if !r.OK() {
				t.Fatalf("%s: %+v", b.Name(), r)
			}
			b.Success(c.now, tok)
		}
	}
	for range 10 {
		c.pass(20 * ms)
		c.talk()
	}
	for i := range c.names {
		if s := c.v[i].Status(c.fleet(), "g/orders"); s.Open() || s.Gen != 1 {
			t.Errorf("%s: the topic is %v", c.names[i], s.Position)
		}
	}
}

// cutOff keeps all from hearing each other until each has let go of its scopes.
func cutOff(c *crew) {
	cfg := c.v[0].m.Config()
	c.pass(cfg.Silent + 2*cfg.Cap)
}

// A topic that closes lets go of a partition only if nothing else holds it.
func TestMemberKeepsWhatAnotherScopeHolds(t *testing.T) {
	c := newCrew(t, "a", "b", "c")
	parts := make([]*circuit.Breaker, 3)
	for i := range parts {
		parts[i] = c.adopt(0, "g", "orders", fmt.Sprint(i))
	}
	c.pass(40 * ms)
	for parts[0].Snapshot(c.now).Until-c.now < 25*sec { // one partition of three: the topic is fine
		parts[0].Trip(c.now, "run")
		c.pass(40 * ms)
		c.now = parts[0].Snapshot(c.now).Until
		if _, r := parts[0].Admit(c.now, 1); !r.OK() {
			t.Fatalf("%+v", r)
		}
		parts[0].Trip(c.now, "run")
		for range 8 {
			c.talk()
			c.pass(20 * ms)
		}
	}
	if left := parts[0].Snapshot(c.now).Until - c.now; left < 20*sec {
		t.Fatalf("the period has %v left", left)
	}
	c.m[0].Leave(c.now, parts[0])

	v, err := NewVerdicts(c.fleet(), Config{}, crdt.Replica{Name: "c", Incarnation: 2}, Roster{Number: 1, Names: c.names})
	if err != nil {
		t.Fatal(err)
	}
	fresh := &crew{t: t, now: c.now, names: c.names, v: []*Verdicts{c.v[0], c.v[1], v}}
	fresh.m = []*Member{c.m[0], c.m[1], NewMember(fresh.fleet, v, nil)}
	heir := fresh.adopt(2, "g", "orders", "0")
	if s := fresh.m[2].Scopes(); len(s) != 2 || !s[0].Held || !s[1].Held {
		t.Fatalf("a new process begins with %+v", s)
	}
	fresh.incarnation = 2
	fresh.talk()
	fresh.talk()
	fresh.m[2].Step(fresh.now, nil)
	s := fresh.m[2].Scopes()
	if s[0].Held || !s[1].Held || !heir.Held() || s[1].Left < 10*sec {
		t.Errorf("told that the topic is fine and its partition is not: held %v, %+v", heir.Held(), s)
	}
}

// A hold by one scope does not take back a probe that another permitted.
func TestMemberHoldSparesAnothersPermit(t *testing.T) {
	c := newCrew(t, "a", "b")
	a0, b0 := c.adopt(0, "g", "orders", "0"), c.adopt(1, "g", "orders", "1")
	a0.Trip(c.now, "run")
	b0.Trip(c.now, "run")
	c.pass(20 * ms)
	for range 100 {
		c.talk()
		c.pass(20*ms, a0)
		if a0.Snapshot(c.now).State == breaker.HalfOpen {
			break
		}
	}
	tok, r := a0.Admit(c.now, 1)
	if !r.OK() {
		t.Fatalf("no probe: %+v", c.m[0].Scopes())
	}
	c.v[0].m.Lock()
	c.v[0].book("g/orders/0").join(c.fleet(), State{Position: Position{Round: 1}, BackoffLevel: 1, OpenFor: 100 * ms, Cause: "run"}, 0)
	c.v[0].m.Unlock()
	c.m[0].Step(c.now, nil)
	a0.Success(c.now, tok)
	if s := a0.Snapshot(c.now); s.Trial != circuit.TrialPassed || !s.Held {
		t.Errorf("%+v", s)
	}
}

// In a fleet of one a topic is its partitions and has no vote.
func TestMemberAlone(t *testing.T) {
	c := newCrew(t, "a")
	b := c.adopt(0, "g", "orders", "0")
	b.ForceClosed(c.now, "operator")
	c.pass(40 * ms)
	b.Trip(c.now, "run")
	c.pass(40 * ms)
	if s := c.v[0].Status(c.fleet(), "g/orders"); s.Open() {
		t.Errorf("the topic is %v", s.Position)
	}
	if s := c.v[0].Status(c.fleet(), "g/orders/0"); !s.Open() {
		t.Errorf("the partition is %v", s.Position)
	}
}

// A partition that leaves with the permit ends the turn at once.
func TestMemberWithdrawsAPermit(t *testing.T) {
	c := newCrew(t, "a", "b")
	a0, a1, b0 := c.adopt(0, "g", "orders", "0"), c.adopt(0, "g", "orders", "1"), c.adopt(1, "g", "orders", "2")
	for _, b := range []*circuit.Breaker{a0, a1, b0} {
		b.Trip(c.now, "run")
	}
	c.pass(20 * ms)
	for range 100 {
		c.talk()
		c.pass(20*ms, a0)
		if a0.Snapshot(c.now).State == breaker.HalfOpen {
			break
		}
	}
	if _, r := a0.Admit(c.now, 1); !r.OK() || !c.v[0].Status(c.fleet(), "g/orders").Probing {
		t.Fatalf("no probe: %+v", c.m[0].Scopes())
	}
	c.pass(20*ms, a0)
	c.m[0].Leave(c.now, a0)
	c.pass(20*ms, a1)
	if s := c.v[0].Status(c.fleet(), "g/orders"); s.Probing || s.Round != 1 {
		t.Errorf("probing %v, %v", s.Probing, s.Position)
	}
	if a0.Held() {
		t.Error("what has left is held")
	}
}

// A probe that ends without an outcome ends the turn and nothing else: whoever has
// something to probe with is next, long before its lease, and the round goes on. So
// does one that an operator's word takes back.
func TestMemberGivesBackAPermit(t *testing.T) {
	for name, end := range map[string]func(c *crew, b *circuit.Breaker, tok circuit.Token){
		"excluded": func(c *crew, b *circuit.Breaker, tok circuit.Token) {
			b.Exclude(c.now, tok)
		},
		"forced": func(c *crew, b *circuit.Breaker, _ circuit.Token) {
			b.Force(c.now, time.Minute, "operator")
		},
		"closed by force": func(c *crew, b *circuit.Breaker, _ circuit.Token) {
			b.ForceClosed(c.now, "operator")
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCrew(t, "a", "b")
			bs := []*circuit.Breaker{c.adopt(0, "g", "orders"), c.adopt(1, "g", "orders")}
			for _, b := range bs {
				b.Trip(c.now, "run")
			}
			var tok circuit.Token
			probe := func(within time.Duration, of ...int) int {
				t.Helper()
				for end := c.now + within; c.now < end; {
					c.talk()
					c.pass(20*ms, bs...)
					for _, i := range of {
						var r circuit.Refusal
						if tok, r = bs[i].Admit(c.now, 1); r.OK() && tok.Probe() {
							return i
						}
					}
				}
				t.Fatalf("no probe of %v in %v: %+v", of, within, c.m[0].Scopes())
				return 0
			}
			first := probe(5*sec, 0, 1)
			c.pass(20*ms, bs...)
			end(c, bs[first], tok)
			probe(5*sec, 1-first)
			if s := c.v[0].Status(c.fleet(), "g/orders"); s.Round != 1 {
				t.Errorf("%v", s.Position)
			}
		})
	}
}

// What happened since the last step is told before a scope is left.
func TestMemberHasALastWord(t *testing.T) {
	c := newCrew(t, "a", "b", "c")
	b := c.adopt(0, "g", "orders", "0")
	c.pass(40 * ms)
	b.Trip(c.now, "run")
	c.m[0].Leave(c.now, b)
	for _, scope := range []string{"g/orders", "g/orders/0"} {
		if p := c.phase(0, scope); p != PhaseOpen {
			t.Errorf("%s: %v", scope, p)
		}
	}
	c.talk()
	heir := c.adopt(1, "g", "orders", "0")
	if !heir.Held() {
		t.Error("who takes it over is not held")
	}
}

// A force that stood in the way of a topic's hold, or replaced it, gives way to it
// when it is over.
func TestMemberHoldsAfterAForce(t *testing.T) {
	c := newCrew(t, "a", "b")
	a0, a1, b0 := c.adopt(0, "g", "orders", "0"), c.adopt(0, "g", "orders", "1"), c.adopt(1, "g", "orders", "2")
	a1.Force(c.now, sec, "operator")
	a0.Trip(c.now, "run")
	b0.Trip(c.now, "run")
	c.pass(20 * ms)
	c.talk()
	c.pass(20 * ms)
	a0.Force(c.now, sec, "operator")
	c.pass(20 * ms)
	if !b0.Held() || a0.Held() || a1.Held() {
		t.Fatal("a force did not stand")
	}
	for range 30 {
		c.talk()
		c.pass(60 * ms)
	}
	for _, b := range []*circuit.Breaker{a0, a1} {
		b.Admit(c.now, 1) // the probe that follows a force
	}
	c.pass(20 * ms)
	if !a0.Held() || !a1.Held() {
		t.Errorf("after the force: %+v, %+v", a0.Snapshot(c.now), a1.Snapshot(c.now))
	}
}

// What the fleet wanted of a scope before it was left is void.
func TestLeftScopeVoidsActions(t *testing.T) {
	c := newCrew(t, "a", "b", "c")
	b := c.adopt(0, "g", "orders")
	c.pass(40 * ms)
	for i := range 2 {
		o := c.adopt(1+i, "g", "orders")
		o.Trip(c.now, "run")
		c.m[1+i].Step(c.now, nil)
	}
	c.talk() // a hears that it is open, and has not held b yet
	if b.Held() {
		t.Fatal("held before anybody drove")
	}
	c.v[0].Leave(c.fleet(), "g/orders")
	if acts := c.v[0].Actions(nil); len(acts) > 0 {
		t.Errorf("%+v", acts)
	}
}

// Whoever takes over a scope at the end of the backoff waits for the rest of the
// period that is running, not of the first of that length.
func TestTopLevelIsToldAnew(t *testing.T) {
	c := newCrew(t, "a", "b")
	const scope = "g/orders/0"
	if _, err := c.v[0].Adopt(c.fleet(), scope); err != nil {
		t.Fatal(err)
	}
	snap := breaker.Snapshot{State: breaker.Open, BackoffLevel: 10, Cause: "probe", Generation: 100}
	c.v[0].Observe(c.fleet(), scope, snap)
	for range 8 {
		c.now += 4 * sec
		c.talk()
	}
	snap.Generation += 2
	c.v[0].Observe(c.fleet(), scope, snap)
	c.talk()
	c.now += 2 * sec
	c.v[0].Leave(c.fleet(), scope)
	c.talk()
	a, err := c.v[1].Adopt(c.fleet(), scope)
	if err != nil || a.Kind != Hold || a.For < 27*sec || a.For > 28*sec {
		t.Errorf("%+v, %v", a, err)
	}
}
