// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// lab is a few processes on one clock whose packets a test carries by hand.
type lab struct {
	t   *testing.T
	cfg Config
	r   Roster
	now time.Duration
}

func newLab(t *testing.T, cfg Config, names ...string) *lab {
	return &lab{t: t, cfg: cfg, r: Roster{Number: 1, Names: names}, now: 100 * sec}
}

func (l *lab) start(name string, incarnation uint64) *Verdicts {
	l.t.Helper()
	v, err := NewVerdicts(l.now, l.cfg, crdt.Replica{Name: name, Incarnation: incarnation}, l.r)
	if err != nil {
		l.t.Fatal(err)
	}
	return v
}

// tell carries everything from one to another.
func (l *lab) tell(from, to *Verdicts) {
	l.t.Helper()
	l.now += ms
	b, upto := from.Delta(l.now, nil, to.self, 0, 1<<20)
	if upto != from.Mark(to.self) {
		l.t.Fatalf("everything is up to %d, the mark %d", upto, from.Mark(to.self))
	}
	if err := to.Merge(crdt.Contact{From: from.self, Now: l.now, Sent: l.now, Echo: l.now}, b); err != nil {
		l.t.Fatal(err)
	}
}

// meet lets all hear each other, and run for d while they do.
func (l *lab) meet(d time.Duration, vs ...*Verdicts) {
	l.t.Helper()
	for end := l.now + d; ; l.now += 500 * ms {
		for _, a := range vs {
			for _, b := range vs {
				if a != b {
					l.tell(a, b)
				}
			}
			a.Tick(l.now)
		}
		if l.now >= end {
			return
		}
	}
}

func (l *lab) adopt(v *Verdicts, name string) Action {
	l.t.Helper()
	a, err := v.Adopt(l.now, name)
	if err != nil {
		l.t.Fatal(err)
	}
	return a
}

// trip is what a breaker that has opened by itself looks like.
func trip(gen uint64, level int) breaker.Snapshot {
	return breaker.Snapshot{Generation: gen, State: breaker.Open, Cause: breaker.CauseRun, BackoffLevel: level}
}

func kinds(acts []Action) string {
	var s []string
	for _, a := range acts {
		s = append(s, a.Kind.String())
	}
	return strings.Join(s, " ")
}

// A partition's owner trips and dies. Whoever gets the partition begins where it
// was, before its first delivery: one that was there, and one that was not.
func TestHandover(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	if act := l.adopt(a, "p"); act.Kind != 0 {
		t.Fatalf("the first owner of all, in a fleet that runs: %v", act.Kind)
	}
	a.Observe(l.now, "p", trip(2, 8))
	opened := l.now
	l.meet(0, a, b, c)
	l.meet(7*sec, b, c) // a is silent

	d := l.start("c", 2) // a restart, and the partition goes to it
	act := l.adopt(d, "p")
	if act.Kind != Hold || act.Cause != CauseUnknown {
		t.Fatalf("told of nothing it does not wait: %+v", act)
	}
	l.tell(b, d)
	got := d.Actions(nil)
	if len(got) != 1 || got[0].Kind != Hold || got[0].BackoffLevel != 8 || got[0].Cause != breaker.CauseRun {
		t.Fatalf("when told: %+v", got)
	}
	if want := opened + 12800*ms; l.now+got[0].For < want-100*ms || l.now+got[0].For > want+100*ms {
		t.Errorf("held until %v, the period ends at %v", l.now+got[0].For, want)
	}
	if act := l.adopt(b, "p"); act.Kind != Hold || act.BackoffLevel != 8 {
		t.Errorf("one that was there: %+v", act)
	}
	l.meet(6*sec, b, d)
	if got := kinds(b.Actions(nil)); got != "half-open" {
		t.Errorf("when the period is over: %q", got)
	}

	// It recovers, and gives the partition on: what its first owner said is void.
	b.Observe(l.now, "p", breaker.Snapshot{Generation: 9, State: breaker.Closed})
	b.Leave(l.now, "p")
	l.meet(sec, b, d)
	d.Leave(l.now, "p")
	e := l.start("a", 2)
	l.tell(b, e)
	if act := l.adopt(e, "p"); act.Kind != 0 {
		t.Errorf("after a clean owner: %+v", act)
	}
}

// A process that is started again takes its own partition over like anybody else's:
// what its earlier incarnation said does not make it an owner that is still there.
func TestHandoverToTheNextIncarnation(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	l.adopt(a, "p")
	a.Observe(l.now, "p", trip(2, 8))
	l.meet(0, a, b, c)
	l.now += sec
	again := l.start("a", 2)
	l.tell(b, again)
	if act := l.adopt(again, "p"); act.Kind != Hold || act.BackoffLevel != 8 || act.For < 11*sec {
		t.Errorf("%+v", act)
	}
}

// What is left of a breaker's own period may be less than that of its level.
func TestHandoverOfAShortPeriod(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a, b := l.start("a", 1), l.start("b", 1)
	l.meet(2*sec, a, b)
	l.adopt(a, "p")
	s := trip(2, 8)
	s.Since, s.Until = l.now, l.now+150*ms
	a.Observe(l.now, "p", s)
	a.Leave(l.now, "p")
	l.tell(a, b)
	if act := l.adopt(b, "p"); act.Kind != Hold || act.BackoffLevel != 8 || act.For > 150*ms || act.For < 100*ms {
		t.Errorf("%+v", act)
	}
}

// The period that an owner left behind is over: probes first, never closed.
func TestHandoverLate(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a, b := l.start("a", 1), l.start("b", 1)
	l.meet(2*sec, a, b)
	l.adopt(a, "p")
	a.Observe(l.now, "p", trip(2, 5))
	a.Leave(l.now, "p")
	l.tell(a, b)
	l.now += 20 * sec
	if act := l.adopt(b, "p"); act.Kind != HalfOpen || act.BackoffLevel != 5 {
		t.Errorf("late: %+v", act)
	}
	// Given back at once, the first owner knows it too.
	b.Leave(l.now, "p")
	l.tell(b, a)
	if act := l.adopt(a, "p"); act.Kind != HalfOpen || act.BackoffLevel != 5 {
		t.Errorf("back: %+v", act)
	}
}

// An owner that is heard may share the scope: its trouble makes a new one
// careful and no more.
func TestHandoverShared(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	l.adopt(a, "t")
	a.Observe(l.now, "t", trip(2, 9))
	l.meet(0, a, b, c)
	if act := l.adopt(b, "t"); act.Kind != HalfOpen {
		t.Errorf("%+v", act)
	}
	l.meet(0, a, b, c)
	// An inherited trouble is no vote, and one vote no quorum.
	l.meet(sec, a, b, c)
	if s := c.Status(l.now, "t"); s.Open() {
		t.Errorf("the fleet is %v", s.Position)
	}
}

// Nobody is met within a second: half-open, and what a process that is alone
// does not know is not closed later either.
func TestStartUntold(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a := l.start("a", 1)
	if act := l.adopt(a, "p"); act.Kind != Hold || act.For != sec {
		t.Fatalf("%+v", act)
	}
	l.now += sec - 1
	a.Tick(l.now)
	if got := a.Actions(nil); len(got) != 0 {
		t.Fatalf("a nanosecond early: %v", kinds(got))
	}
	l.now++
	a.Tick(l.now)
	if got := kinds(a.Actions(nil)); got != "half-open" {
		t.Errorf("at the end: %q", got)
	}
	if act := l.adopt(a, "q"); act.Kind != HalfOpen {
		t.Errorf("later, still alone: %+v", act)
	}

	one := newLab(t, Config{}, "a")
	if act := one.adopt(one.start("a", 1), "p"); act.Kind != HalfOpen {
		t.Errorf("a roster of one: %+v", act)
	}
}

// One that was here says that there is nothing: closed at once.
func TestStartToldNothing(t *testing.T) {
	l := newLab(t, Config{Quorum: 1}, "a", "b", "c")
	a, b := l.start("a", 1), l.start("b", 1)
	l.now += 2 * sec
	a.informed, b.informed = true, true
	c := l.start("c", 1)
	l.adopt(c, "p")
	l.tell(a, c)
	if got := kinds(c.Actions(nil)); got != "" {
		t.Fatalf("before it hears a quorum: %q", got)
	}
	l.tell(b, c)
	if got := kinds(c.Actions(nil)); got != "close" {
		t.Errorf("told that there is nothing: %q", got)
	}

	// One that knows nothing itself tells nothing.
	l = newLab(t, Config{}, "a", "b")
	a, b = l.start("a", 1), l.start("b", 1)
	l.adopt(a, "p")
	l.tell(b, a)
	if got := kinds(a.Actions(nil)); got != "" {
		t.Errorf("told by one that has just started: %q", got)
	}
}

// A process that joins a scope that the fleet holds is held for what remains,
// and closes with it.
func TestAdoptHeld(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	l.adopt(a, "t")
	l.adopt(b, "t")
	a.Observe(l.now, "t", trip(2, 8))
	b.Observe(l.now, "t", trip(2, 9))
	opened := l.now
	l.meet(0, a, b, c)
	if got := kinds(a.Actions(nil)); got != "hold" {
		t.Fatalf("%q", got)
	}
	l.meet(3*sec, a, b, c)
	act := l.adopt(c, "t")
	if left := opened + 12800*ms - l.now; act.Kind != Hold || act.BackoffLevel != 8 || act.For > left+50*ms || act.For < left-50*ms {
		t.Errorf("%+v, %v left", act, left)
	}
	// One that has just started is told how much of it is over.
	d := l.start("c", 2)
	l.tell(a, d)
	act = l.adopt(d, "t")
	if left := opened + 12800*ms - l.now; act.Kind != Hold || act.For > left+50*ms || act.For < left-50*ms {
		t.Errorf("just started: %+v, %v left", act, left)
	}
}

// A process that hears less than a quorum takes over what was decided all the
// same, and goes on by itself when the period is over, within a fifth of it.
func TestToldWhileCutOff(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c", "d", "e")
	a, b, c, d := l.start("a", 1), l.start("b", 1), l.start("c", 1), l.start("d", 1)
	l.meet(2*sec, a, b, c)
	for _, v := range []*Verdicts{a, b, c} {
		l.adopt(v, "t")
		v.Observe(l.now, "t", trip(2, 7))
	}
	opened := l.now
	l.meet(0, a, b, c)
	d.Tick(l.now)
	l.adopt(d, "t")
	d.Actions(nil)
	l.tell(a, d)
	if got := d.Actions(nil); kinds(got) != "hold" || d.Status(l.now, "t").Connected {
		t.Fatalf("%+v", got)
	}
	period := 6400 * ms
	for l.now < opened+period {
		d.Tick(l.now)
		l.now += 50 * ms
	}
	if got := kinds(d.Actions(nil)); got != "" {
		t.Fatalf("early: %q", got)
	}
	at := l.now
	for kinds(d.Actions(nil)) != "half-open" {
		d.Tick(l.now)
		if l.now += 10 * ms; l.now > at+period/5+50*ms {
			t.Fatal("never")
		}
	}
	if d.m.Solo(l.now, d.book("t").Scope) == a.m.Solo(l.now, a.book("t").Scope) {
		t.Error("all at once")
	}
}

// What is no vote: an operator's force, and a trip from before the close that
// the process has just heard of.
func TestNoVote(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b := l.start("a", 1), l.start("b", 1)
	l.meet(2*sec, a, b)
	l.adopt(a, "t")
	forced := trip(2, 1)
	forced.Forced = true
	a.Observe(l.now, "t", forced)
	if s := a.Status(l.now, "t"); len(s.Votes) != 0 {
		t.Errorf("a force is a vote: %+v", s.Votes)
	}

	sc := bookOf(b.m.Obtain(l.now, "t"))
	sc.join(l.now, State{Position: Position{Round: 3}, BackoffLevel: 1, OpenFor: 100 * ms, Cause: "run"}, 0)
	l.tell(b, a)
	l.now += 20 * sec // alone
	a.Tick(l.now)
	l.now += 20 * sec
	a.Tick(l.now)
	a.Observe(l.now, "t", trip(7, 9))
	sc.join(l.now, State{Position: Position{Gen: 1}}, 0)
	l.tell(b, a)
	a.Observe(l.now, "t", trip(7, 9))
	for _, v := range a.Status(l.now, "t").Votes {
		if v.Phase == PhaseOpen {
			t.Errorf("a trip from before the close: %+v", v)
		}
	}
	a.Observe(l.now, "t", trip(9, 9))
	if s := a.Status(l.now, "t"); len(s.Votes) != 1 || s.Votes[0].Phase != PhaseOpen || s.Votes[0].At.Gen != 1 {
		t.Errorf("a trip since: %+v", s.Votes)
	}
}

// A process that stood still for a while may be behind: it keeps out of its turn
// until it has caught up.
func TestStoodStill(t *testing.T) {
	l := newLab(t, Config{}, "a")
	a := l.start("a", 1)
	l.adopt(a, "t")
	a.Observe(l.now, "t", breaker.Snapshot{Generation: 2})
	a.Observe(l.now, "t", trip(3, 3))
	a.Want(l.now, "t", true)
	tick := func(d time.Duration) string {
		for end := l.now + d; l.now < end; {
			l.now += 50 * ms
			a.Tick(l.now)
		}
		return kinds(a.Actions(nil))
	}
	tick(50 * ms)
	l.now += 3 * sec
	if got := tick(450 * ms); got != "" {
		t.Errorf("at once: %q", got)
	}
	if got := tick(100 * ms); got != "probe" {
		t.Errorf("after Settle: %q", got)
	}
}

// Who has just got something to probe with lets the others hear of it first. And
// a turn that comes to nothing is given back at half of the others' patience.
func TestTurn(t *testing.T) {
	l := newLab(t, Config{}, "a")
	a := l.start("a", 1)
	l.adopt(a, "t")
	a.Observe(l.now, "t", breaker.Snapshot{Generation: 2})
	a.Observe(l.now, "t", trip(3, 1))
	tick := func(d time.Duration) string {
		for end := l.now + d; l.now < end; {
			l.now += 50 * ms
			a.Tick(l.now)
		}
		return kinds(a.Actions(nil))
	}
	if got := tick(20 * sec); got != "hold" {
		t.Fatalf("with nothing to probe with: %q", got)
	}
	a.Want(l.now, "t", true)
	if got := tick(450 * ms); got != "" {
		t.Errorf("at once: %q", got)
	}
	if got := tick(100 * ms); got != "probe" {
		t.Fatalf("after Settle: %q", got)
	}
	if got := tick(900 * ms); got != "" {
		t.Errorf("before half a turn: %q", got)
	}
	if got := tick(100 * ms); got != "hold" {
		t.Errorf("nobody came to probe: %q", got)
	}
	if s := a.Status(l.now, "t"); s.Round != 1 || s.Votes[0].Phase != PhaseWaiting || s.Votes[0].Wants {
		t.Errorf("%+v", s)
	}
	a.Want(l.now, "t", true)
	if got := tick(6 * sec); got != "probe hold" {
		t.Errorf("once more: %q", got)
	}
}

// What is told is bounded, whoever tells it, and what does not fit is counted.
func TestBounds(t *testing.T) {
	l := newLab(t, Config{Scopes: 4, Votes: 3, Keep: 10 * sec}, "a", "b")
	a := l.start("a", 1)
	l.cfg.Scopes = 100
	b := l.start("b", 1)
	l.meet(2*sec, a, b)
	for i := range 6 {
		name := fmt.Sprintf("s%d", i)
		l.adopt(b, name)
		b.Observe(l.now, name, trip(2, 1))
	}
	l.tell(b, a)
	if n := len(a.Scopes()); n != 3 {
		t.Errorf("%d scopes for 3 votes: %v", n, a.Scopes())
	}
	if s := a.Status(l.now, "s0"); s.Refused != 3 {
		t.Errorf("%d refused, want 3", s.Refused)
	}
	l.adopt(a, "x")
	if _, err := a.Adopt(l.now, "y"); !errors.Is(err, circuit.ErrTooManyScopes) {
		t.Errorf("a fifth scope: %v", err)
	}

	// Its author closes: the votes are of nothing wrong, and make room.
	for i := range 6 {
		b.Observe(l.now, fmt.Sprintf("s%d", i), breaker.Snapshot{Generation: 3})
	}
	l.tell(b, a)
	a.Tick(l.now)
	if _, err := a.Adopt(l.now, "y"); err != nil {
		t.Errorf("with room to be made: %v", err)
	}
	l.meet(12*sec, a, b)
	if n := a.votes; n != 0 {
		t.Errorf("%d votes are kept", n)
	}
}

// A vote outlives its process by Keep and no longer; one that stands as long as
// its process does.
func TestKeep(t *testing.T) {
	l := newLab(t, Config{Keep: 20 * sec}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	l.adopt(a, "p")
	a.Observe(l.now, "p", trip(2, 9))
	l.meet(0, a, b, c)
	for range 60 { // nothing new is said, only that it is there
		l.now += sec
		p, _ := a.Delta(l.now, nil, b.self, a.Mark(b.self), 1<<16)
		if err := b.Merge(crdt.Contact{From: a.self, Now: l.now, Sent: l.now, Echo: l.now}, p); err != nil {
			t.Fatal(err)
		}
		b.Tick(l.now)
	}
	if n := len(b.Status(l.now, "p").Votes); n != 1 {
		t.Fatal("the vote of a process that is heard was forgotten")
	}
	l.meet(18*sec, b, c)
	if n := len(b.Status(l.now, "p").Votes); n != 1 {
		t.Fatal("forgotten too soon")
	}
	d := l.start("a", 2)
	l.tell(b, d) // told second-hand, it is no younger
	l.now += 4 * sec
	for _, v := range []*Verdicts{b, d} {
		v.Tick(l.now)
		if n := len(v.Status(l.now, "p").Votes); n != 0 {
			t.Error("not forgotten")
		}
	}
}

// What a process said and took back is not brought back by one who missed that.
func TestNoResurrection(t *testing.T) {
	l := newLab(t, Config{Keep: 10 * sec}, "a", "b", "c", "d")
	a, b, c, d := l.start("a", 1), l.start("b", 1), l.start("c", 1), l.start("d", 1)
	l.meet(2*sec, a, b, c, d)
	l.adopt(a, "p")
	a.Observe(l.now, "p", trip(2, 9))
	l.meet(0, a, b, c, d)
	l.meet(6*sec, a, b, c) // d is cut off with it
	a.Observe(l.now, "p", breaker.Snapshot{Generation: 3})
	l.meet(15*sec, a, b, c)
	if n := len(b.Status(l.now, "p").Votes); n != 0 {
		t.Fatal("b has not forgotten")
	}
	d.Tick(l.now)
	if n := len(d.Status(l.now, "p").Votes); n != 0 {
		t.Fatal("d has not forgotten what its author, silent, said")
	}
	// A packet from then, on a very long way.
	end := l.now
	l.now = 110 * sec
	old := newLab(t, Config{}, "a", "b", "c", "d")
	z := old.start("d", 1)
	row := &row{Vote: Vote{Scope: "p", Node: a.self, Version: 1, Phase: PhaseOpen, BackoffLevel: 9}, opened: l.now, at: l.now, seen: l.now, relay: true}
	bookOf(z.m.Obtain(l.now, "p")).rows["a"] = row
	z.log.vote(row, true)
	l.now = end
	packet, _ := z.Delta(110*sec, nil, b.self, 0, 1<<16)
	if err := b.Merge(crdt.Contact{From: d.self, Now: l.now, Sent: 1, Echo: l.now}, packet); err != nil {
		t.Fatal(err)
	}
	if n := len(b.Status(l.now, "p").Votes); n != 0 {
		t.Error("it is back")
	}
}

// The last words of a process that dies reach those who missed them, by others.
func TestLastWords(t *testing.T) {
	l := newLab(t, Config{}, "a", "b", "c")
	a, b, c := l.start("a", 1), l.start("b", 1), l.start("c", 1)
	l.meet(2*sec, a, b, c)
	l.adopt(b, "q")
	b.Observe(l.now, "q", trip(2, 1))
	l.meet(0, a, b, c)
	acked := b.Mark(c.self)
	l.adopt(a, "p")
	a.Observe(l.now, "p", trip(2, 9))
	l.tell(a, b) // and not c; then a dies
	if n := b.Mark(c.self); n != acked {
		t.Errorf("b has something for c while a speaks for itself")
	}
	l.now += 6 * sec
	b.Tick(l.now)
	if n := b.Mark(c.self); n == acked {
		t.Fatal("b does not pass it on")
	}
	p, _ := b.Delta(l.now, nil, c.self, acked, 1<<16)
	if err := c.Merge(crdt.Contact{From: b.self, Now: l.now, Sent: l.now, Echo: l.now}, p); err != nil {
		t.Fatal(err)
	}
	if s := c.Status(l.now, "p"); len(s.Votes) != 1 || s.Votes[0].BackoffLevel != 9 {
		t.Errorf("c knows %+v", s.Votes)
	}
}

// An operator's force stands in the way of a hold. When it is over the hold is
// asked for again; an operator's close is left alone.
func TestOperator(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a, b := l.start("a", 1), l.start("b", 1)
	l.meet(2*sec, a, b)
	brk, err := circuit.New("t", breaker.Config{})
	if err != nil {
		t.Fatal(err)
	}
	l.adopt(a, "t")
	l.adopt(b, "t")
	a.Observe(l.now, "t", trip(2, 9))
	b.Observe(l.now, "t", trip(2, 9))
	brk.Force(l.now, 3*sec, "operator")
	end := l.now + 3*sec
	l.meet(0, a, b)
	for _, act := range a.Actions(nil) {
		act.Apply(l.now, brk)
	}
	if s := brk.Snapshot(l.now); s.Held || s.Cause != "operator" {
		t.Fatalf("the hold replaced the operator's: %+v", s)
	}
	a.m.Observe(l.now, "t", brk.Snapshot(l.now))
	l.now = end
	if _, r := brk.Admit(l.now, 1); !r.OK() {
		t.Fatal("refused at its end")
	}
	a.m.Observe(l.now, "t", brk.Snapshot(l.now))
	got := a.Actions(nil)
	if kinds(got) != "hold" {
		t.Fatalf("%q", kinds(got))
	}
	got[0].Apply(l.now, brk)
	if !brk.Snapshot(l.now).Held {
		t.Error("not held")
	}
	brk.ForceClosed(l.now, "operator")
	a.m.Observe(l.now, "t", brk.Snapshot(l.now))
	if got := a.Actions(nil); len(got) != 0 {
		t.Errorf("after an operator's close: %q", kinds(got))
	}
}

func TestRefusals(t *testing.T) {
	l := newLab(t, Config{}, "a", "b")
	a, b := l.start("a", 1), l.start("b", 1)
	p, _ := b.Delta(l.now, nil, a.self, 0, 1<<16)
	if err := a.Merge(crdt.Contact{From: a.self, Now: l.now}, p); !errors.Is(err, ErrSelf) {
		t.Errorf("own packet: %v", err)
	}
	other, err := NewVerdicts(l.now, Config{}, crdt.Replica{Name: "b", Incarnation: 1}, Roster{Number: 1, Names: []string{"a", "b", "c"}})
	if err != nil {
		t.Fatal(err)
	}
	p, _ = other.Delta(l.now, nil, a.self, 0, 1<<16)
	if err := a.Merge(crdt.Contact{From: b.self, Now: l.now, Sent: l.now, Echo: l.now}, p); !errors.Is(err, ErrRoster) {
		t.Errorf("another roster of the same number: %v", err)
	}
	if s := a.Status(l.now, "s"); s.Connected || s.Heard != 1 {
		t.Errorf("a refused packet counts as heard: %+v", s)
	}
	if err := a.SetRoster(l.now, Roster{Number: 2, Names: []string{"a", "b", "c"}}); err != nil {
		t.Errorf("a later roster: %v", err)
	}
	if err := a.Merge(crdt.Contact{From: b.self, Now: l.now, Sent: l.now, Echo: l.now}, p); err != nil {
		t.Errorf("across numbers: %v", err)
	}
	if err := a.SetRoster(l.now, Roster{Number: 1, Names: []string{"a"}}); !errors.Is(err, ErrConfig) {
		t.Errorf("an earlier roster: %v", err)
	}
	for _, name := range []string{"", strings.Repeat("x", 256)} {
		if _, err := a.Adopt(l.now, name); !errors.Is(err, circuit.ErrPath) {
			t.Errorf("scope of %d bytes: %v", len(name), err)
		}
	}
}

// Everything wrong is said at once, with field, value and range.
func TestValidate(t *testing.T) {
	if err := (Config{}).Validate(); err != nil {
		t.Error(err)
	}
	if err := (StormConfig{}).Validate(); err != nil {
		t.Error(err)
	}
	_, err := NewVerdicts(0, Config{
		Quorum: 1.1, Successes: 1001, Base: 1, Cap: 25 * time.Hour, Lease: 1, Turn: 1, Settle: 2 * time.Minute,
		Silent: 1, Start: 1, Keep: -1, Scopes: -1, Votes: -1,
	}, crdt.Replica{}, Roster{Names: []string{"a", "a", ""}})
	for _, want := range []string{
		"Quorum: 1.1", "Successes: 1001", "Base: 1ns", "Cap: 25h", "Lease: 1ns", "Turn: 1ns", "Settle: 2m", "Silent: 1ns", "Start: 1ns",
		"Keep: -1ns", "Scopes: -1", "Votes: -1", "self: length of the name", `"a", twice`, "length of a name: 0", "(0, 1]", "[1, 1000]",
	} {
		if err == nil || !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	_, err = NewStorms(StormConfig{Share: -1, Silent: 1, Every: 1, Keys: -1}, crdt.Replica{Name: "a"})
	for _, want := range []string{"Share: -1", "Silent: 1ns", "Every: 1ns", "Keys: -1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if _, err := NewStorms(StormConfig{}, crdt.Replica{}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
}
