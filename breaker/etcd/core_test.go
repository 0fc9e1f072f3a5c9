// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// desk is a core, a clock, and the keys that it is told of. Nothing is written but
// what a test puts there.
type desk struct {
	*core
	t   *testing.T
	now time.Duration
	rev int64
	l   layout
}

// newDesk is process a, with a session in which all of the roster are there, and
// with the scope q.
func newDesk(t *testing.T, names ...string) *desk {
	t.Helper()
	return deskOf(t, "a", names...)
}

func deskOf(t *testing.T, self string, names ...string) *desk {
	t.Helper()
	c := Config{Name: self, Roster: breaker.Roster{Number: 1, Names: names}}.WithDefaults()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	d := &desk{
		core: newCore(c, crdt.Replica{Name: self, Incarnation: 7}, 0),
		t:    t, now: time.Second, rev: 10, l: newLayout(c.Prefix),
	}
	d.begin()
	if _, err := d.Adopt(d.now, "q"); err != nil {
		t.Fatal(err)
	}
	return d
}

// begin begins a session. More is there than the roster's members.
func (d *desk) begin(more ...entry) {
	k := link{up: true, ttl: 5 * time.Second, renewed: d.now, watched: d.now, born: 1, settings: 1}
	for _, name := range d.Names() {
		more = append(more, entry{key: d.l.member(name), value: encodeMember(7), rev: d.rev})
	}
	d.reset(d.now, d.l, more, d.rev, k)
}

// put has the watch tell of a key.
func (d *desk) put(key string, value []byte) {
	d.rev++
	d.apply(d.now, d.l, []entry{{key: key, value: value, rev: d.rev}}, d.rev)
}

func (d *desk) del(key string) {
	d.rev++
	d.apply(d.now, d.l, []entry{{key: key, rev: d.rev, deleted: true}}, d.rev)
}

// pass makes time pass, with a session that is well.
func (d *desk) pass(span time.Duration) {
	for end := d.now + span; d.now < end; {
		d.now += 50 * time.Millisecond
		d.ask(d.now)
		d.renewed(d.now, d.now)
		d.answer(d.now)
		d.Tick(d.now)
	}
}

// open has the fleet open q.
func (d *desk) open() {
	d.put(d.l.state("q"), encodeState(scope.State{
		Position: scope.Position{Round: 1}, BackoffLevel: 1, OpenFor: 100 * time.Millisecond, Cause: "timeout",
	}))
}

// plan is what is to be written now; nil for nothing. It is void, so that it can
// be asked again.
func (d *desk) plan() *op {
	o, _ := d.next(d.now)
	if o != nil {
		d.done(d.now, o, false, 0)
		d.book().retry = 0
	}
	return o
}

// book is what is known of q.
func (d *desk) book() *book { return bookOf(d.Get("q")) }

// want fails unless the next to be written is of a kind.
func (d *desk) want(kind opKind) *op {
	d.t.Helper()
	o := d.plan()
	if o == nil || o.kind != kind {
		d.t.Fatalf("%+v is to be written, want %d", o, kind)
	}
	return o
}

// write has the watch tell of what o writes.
func (d *desk) write(o *op) {
	for _, p := range o.puts {
		if p.value == nil {
			d.del(p.key)
		} else {
			d.put(p.key, p.value)
		}
	}
}

// voted is the vote that o writes.
func (d *desk) voted(o *op) scope.Vote {
	d.t.Helper()
	v, err := decodeVote(o.puts[0].value, "q", "a")
	if err != nil {
		d.t.Fatal(err)
	}
	return v
}

// seen is a breaker as it looks, with no permit settled.
func seen(s breaker.Snapshot) circuit.Snapshot { return circuit.Snapshot{Snapshot: s} }

// kinds is what is asked for.
func (d *desk) kinds() (all []scope.Kind) {
	for _, a := range d.Actions(nil) {
		all = append(all, a.Kind)
	}
	return all
}

// probe brings it to where a probe of ours is out, and that is known.
func (d *desk) probe() {
	d.t.Helper()
	d.open()
	d.Want(d.now, "q", true)
	d.write(d.want(opVote))
	d.pass(200 * time.Millisecond)
	o := d.want(opTake)
	d.take(o, d.now)
	d.write(o)
	if k := d.kinds(); len(k) == 0 || k[len(k)-1] != scope.Probe {
		d.t.Fatalf("%v, not a probe", k)
	}
	d.Observe(d.now, "q", seen(breaker.Snapshot{State: breaker.HalfOpen, Held: true, Generation: 5, ProbesOut: 1}))
}

// A next owner waits for what is left of a breaker's own period, which may be shorter
// than that of its level.
func TestVoteHasTheBreakersPeriod(t *testing.T) {
	for _, c := range []struct{ left, want time.Duration }{
		{150 * time.Millisecond, 150 * time.Millisecond}, {time.Hour, 12800 * time.Millisecond}, {0, 12800 * time.Millisecond},
	} {
		d := newDesk(t, "a", "b")
		s := breaker.Snapshot{State: breaker.Open, Cause: "run", Generation: 2, BackoffLevel: 8, Since: d.now}
		if c.left > 0 {
			s.Until = d.now + c.left
		}
		d.Observe(d.now, "q", seen(s))
		if v := d.book().Own; v.BackoffLevel != 8 || v.OpenFor != c.want {
			t.Errorf("%v left: %+v", c.left, v)
		}
	}
}

// A probe that ends without an outcome gives the key back long before its lease is
// over, and has not failed. So does one that an operator's word takes back.
func TestProbeIsGivenBack(t *testing.T) {
	for name, after := range map[string]breaker.Snapshot{
		"excluded":        {State: breaker.HalfOpen, Held: true, Generation: 5},
		"forced":          {State: breaker.Open, Forced: true, Barred: true, Generation: 6},
		"closed by force": {State: breaker.Closed, Generation: 6},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t, "a")
			d.probe()
			d.pass(3 * time.Second)
			if o := d.plan(); o != nil {
				t.Fatalf("while it is out: %+v", o)
			}
			d.Observe(d.now, "q", seen(after))
			d.pass(100 * time.Millisecond)
			d.want(opDrop)
		})
	}
}

// Who may not probe lets an open scope go when nobody does: after a roster was rolled
// back, or where those who may have no message. What its breaker does then counts, and
// the fleet's next decision holds it again.
func TestHeldOnlyWhileSomebodyMayProbe(t *testing.T) {
	lease := breaker.FleetConfig{}.WithDefaults().Lease
	for name, c := range map[string]struct {
		roster []string
		late   bool
	}{
		"a later roster":    {[]string{"a", "b"}, true},
		"not in the roster": {[]string{"b", "c"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDesk(t, c.roster...)
			if c.late {
				d.put(d.l.roster(), settings{number: 2}.encode())
			}
			gone := func(within time.Duration, want bool) {
				t.Helper()
				d.pass(within)
				ks := d.kinds()
				if got := len(ks) > 0 && ks[len(ks)-1] == scope.HalfOpen; got != want {
					t.Fatalf("%v: let go %v, want %v", ks, got, want)
				}
			}
			d.open()
			d.Want(d.now, "q", true)
			gone(lease, false)
			// Somebody probes: it may be again, and the time begins anew at its end.
			b := crdt.Replica{Name: "b", Incarnation: 3}
			d.put(d.l.probe("q"), probe{b, d.book().Known.Position}.encode())
			gone(2*lease, false)
			d.del(d.l.probe("q"))
			gone(lease+3*time.Second, false)
			gone(2*time.Second, true)

			// Its breaker closes by itself, and that counts, also after a new session.
			d.Observe(d.now, "q", seen(breaker.Snapshot{State: breaker.Closed, Generation: 9}))
			if v := d.voted(d.want(opVote)); v.Phase != scope.PhasePassed {
				t.Errorf("votes %+v", v)
			}
			state := entry{key: d.l.state("q"), value: encodeState(d.book().Known), rev: d.rev}
			d.down(d.now, true)
			d.begin(state, entry{key: d.l.roster(), value: settings{number: 2}.encode(), rev: 1})
			if ks := d.kinds(); len(ks) != 0 {
				t.Errorf("a new session: %v", ks)
			}
			d.put(d.l.state("q"), encodeState(scope.State{Position: scope.Position{Round: 2}, BackoffLevel: 2, OpenFor: time.Second}))
			if ks := d.kinds(); len(ks) != 1 || ks[0] != scope.Hold {
				t.Errorf("the next round: %v", ks)
			}
		})
	}

	// One that may probe is held for as long as it takes.
	d := newDesk(t, "a", "b")
	d.open()
	d.kinds()
	d.pass(10 * lease)
	if ks := d.kinds(); len(ks) != 0 {
		t.Errorf("a member: %v", ks)
	}
}

// A last owner's word that cannot be read is none, whatever it begins with.
func TestUnreadableLastWord(t *testing.T) {
	d := newDesk(t, "a", "b")
	d.Leave(d.now, "q")
	word := encodeLast(scope.Vote{Node: crdt.Replica{Name: "b"}, Phase: scope.PhaseOpen, BackoffLevel: 9, OpenFor: time.Minute})
	d.put(d.l.last("q"), append(word, 0))
	if a, err := d.Adopt(d.now, "q"); err != nil || a.Kind != 0 {
		t.Errorf("begins with %+v, %v", a, err)
	}
	d.Leave(d.now, "q")
	d.put(d.l.last("q"), word)
	if a, err := d.Adopt(d.now, "q"); err != nil || a.Kind != scope.Hold {
		t.Errorf("one that can be read: begins with %+v, %v", a, err)
	}
}

// What all who trip write, and so contend for, waits for what each writes alone, and
// for the decision.
func TestVotesBeforeTheLastWord(t *testing.T) {
	d := newDesk(t, "a", "b")
	d.Observe(d.now, "q", seen(breaker.Snapshot{State: breaker.Open, Generation: 2, BackoffLevel: 1, Cause: "timeout"}))
	mine := d.voted(d.want(opVote))
	theirs := mine
	theirs.Node = crdt.Replica{Name: "b", Incarnation: 7}
	d.put(d.l.vote("q", "b"), encodeVote(theirs))
	d.put(d.l.vote("q", "a"), encodeVote(mine))
	d.write(d.want(opDecide))
	d.del(d.l.vote("q", "a"))
	d.want(opTestify)

	// At the end it is what must be written, and the rest goes with the leases.
	d.put(d.l.state("q"), encodeState(scope.State{Position: scope.Position{Gen: 1}}))
	d.kinds()
	d.Observe(d.now, "q", seen(breaker.Snapshot{State: breaker.Open, Generation: 4, BackoffLevel: 1, Cause: "timeout"}))
	d.want(opVote)
	d.part()
	d.want(opTestify)
	d.leaving = false
	d.Leave(d.now, "q")
	d.put(d.l.vote("q", "a"), encodeVote(mine))
	d.want(opTestify)

	// Void again and again, it is tried again within a second, and not by all at once.
	waits := make(map[time.Duration]bool)
	for _, name := range []string{"a", "b", "c", "d"} {
		d := deskOf(t, name, "a", "b", "c", "d")
		sc := d.book()
		sc.backoff = 0
		for range 10 {
			sc.busy = true
			d.done(d.now, &op{kind: opTestify, scope: "q"}, false, 0)
			if w := sc.retry - d.now; w <= sc.backoff/2 || w > sc.backoff {
				t.Errorf("%s waits %v of %v", name, w, sc.backoff)
			}
		}
		if sc.backoff != time.Second {
			t.Errorf("backs off for %v", sc.backoff)
		}
		waits[sc.retry-d.now] = true
	}
	if len(waits) != 4 {
		t.Errorf("four processes wait %v", waits)
	}
}

// The end of a session lets nothing go that its lease still holds: a next one that
// begins in time goes on where it was, with the probe that is out. A lease that is
// known to be over is.
func TestSessionEnds(t *testing.T) {
	alone := func(d *desk, span time.Duration) { // time passes without a session
		for end := d.now + span; d.now < end; {
			d.now += 50 * time.Millisecond
			d.Tick(d.now)
		}
	}
	held := func(t *testing.T) *desk {
		t.Helper()
		d := newDesk(t, "a")
		d.open()
		d.pass(time.Second)
		d.kinds()
		return d
	}
	t.Run("for good", func(t *testing.T) {
		d := held(t)
		d.down(d.now, false)
		d.Observe(d.now, "q", seen(breaker.Snapshot{State: breaker.Open, Held: true, Generation: 2}))
		d.Want(d.now, "q", true)
		alone(d, 4900*time.Millisecond)
		if ks := d.kinds(); len(ks) != 0 {
			t.Errorf("while its lease lasts: %v", ks)
		}
		if o := d.plan(); o != nil {
			t.Errorf("without a session: %+v", o)
		}
		alone(d, 200*time.Millisecond)
		if ks := d.kinds(); len(ks) != 1 || ks[0] != scope.HalfOpen {
			t.Errorf("after its lease: %v", ks)
		}
	})
	t.Run("with its lease", func(t *testing.T) {
		d := held(t)
		d.down(d.now, true)
		alone(d, 200*time.Millisecond)
		if ks := d.kinds(); len(ks) != 1 || ks[0] != scope.HalfOpen {
			t.Errorf("%v", ks)
		}
	})
	t.Run("while it probes", func(t *testing.T) {
		d := newDesk(t, "a")
		d.probe()
		asked := d.now
		d.down(d.now, false)
		alone(d, time.Second)
		sc := d.book()
		d.begin(
			entry{key: d.l.state("q"), value: encodeState(sc.Known), rev: sc.rev},
			entry{key: d.l.vote("q", "a"), value: encodeVote(sc.votes["a"].Vote), rev: sc.votes["a"].rev},
			entry{key: d.l.probe("q"), value: sc.probe.encode(), rev: sc.probe.rev},
		)
		if ks := d.kinds(); len(ks) != 0 || !d.Describe(d.now, "q").Probing {
			t.Errorf("a new session: %v", ks)
		}
		d.pass(asked + d.Config().Lease - d.now - 100*time.Millisecond)
		if o := d.plan(); o != nil {
			t.Errorf("while it is out: %+v", o)
		}
		d.pass(200 * time.Millisecond)
		d.want(opFail)
	})
}
