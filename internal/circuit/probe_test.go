// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A result of an older generation changes nothing.
func TestLateResults(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 2, Probes: 2})
		old := enter(t, b)
		trip(t, b, 0)
		for range 100 {
			b.Success(0, old)
			b.Failure(0, old, true)
			b.Slow(0, old, true)
			b.Exclude(0, old)
		}
		if s := b.Snapshot(0); s.State != breaker.Open || s.Until != 100*ms || s.BackoffLevel != 1 {
			t.Fatalf("late results moved it: %+v", s)
		}
		p, q := admit(t, b, 100*ms), admit(t, b, 100*ms)
		b.Success(100*ms, old)
		b.Success(100*ms, old)
		state(t, b, 100*ms, breaker.HalfOpen)
		b.Failure(100*ms, p, true)
		b.Success(100*ms, q)
		b.Failure(100*ms, q, true)
		if s := b.Snapshot(100 * ms); s.State != breaker.Open || s.BackoffLevel != 2 || s.Until != 200*ms {
			t.Fatalf("a probe of the last phase moved it: %+v", s)
		}
		admit(t, b, 300*ms)
		b.Success(300*ms, q) // not of this phase either
		b.Failure(300*ms, p, true)
		if s := b.Snapshot(300 * ms); s.State != breaker.HalfOpen || s.ProbesPassed != 0 || s.ProbesOut != 1 {
			t.Fatalf("a probe of the last phase settled in this one: %+v", s)
		}
		b.ForceClosed(300*ms, "test")
		for range 100 {
			b.Success(300*ms, old)
			b.Failure(300*ms, old, true)
			b.Success(300*ms, q)
			b.Failure(300*ms, p, true)
		}
		if s := b.Snapshot(300 * ms); s.State != breaker.Closed || s.Successes+s.Failures != 0 || s.Run != 0 {
			t.Fatalf("late results count in the next closed period: %+v", s)
		}
	})
}

func TestProbeSettlesOnce(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 3, Probes: 3})
		trip(t, b, 0)
		p := admit(t, b, sec)
		for range 10 {
			b.Success(sec, p)
		}
		if s := b.Snapshot(sec); s.State != breaker.HalfOpen || s.ProbesPassed != 1 || s.ProbesOut != 0 {
			t.Fatalf("one probe settled ten times: %+v", s)
		}
		b.Failure(sec, p, true)
		b.Exclude(sec, p)
		if s := b.Snapshot(sec); s.State != breaker.HalfOpen || s.ProbesPassed != 1 {
			t.Fatalf("a settled probe was settled again: %+v", s)
		}
		q := admit(t, b, sec)
		b.Exclude(sec, q)
		b.Success(sec, q)
		if s := b.Snapshot(sec); s.ProbesPassed != 1 {
			t.Fatalf("an excluded probe counted: %+v", s)
		}
	})
}

func TestProbeWidth(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Probes: 3, Successes: 4, Lease: 7 * sec})
		trip(t, b, 0)
		a := admit(t, b, sec)
		admit(t, b, 2*sec)
		admit(t, b, 3*sec)
		if r := refused(t, b, 3*sec); r.State != breaker.HalfOpen || r.Until != 8*sec || r.Cause != breaker.CauseRun {
			t.Fatalf("full: %+v", r)
		}
		b.Success(3*sec, a) // a pace of two at once is less than Probes
		d := admit(t, b, 3*sec)
		if r := refused(t, b, 3*sec); r.Until != 9*sec {
			t.Fatalf("until %v, want the earliest lease that is left, 9s", r.Until)
		}
		b.Success(3*sec, d) // four at once
		admit(t, b, 3*sec)
		admit(t, b, 3*sec)
		refused(t, b, 3*sec)
	})
}

// room counts the probes that b would give out more, and gives them back.
func room(b *Breaker, now time.Duration) int {
	var got []Token
	for {
		k, r := b.Admit(now, 0)
		if !r.OK() {
			break
		}
		got = append(got, k)
	}
	for _, k := range got {
		b.Exclude(now, k)
	}
	return len(got)
}

// Half-open, a success doubles what may be out, and two failures halve it.
func TestPace(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		for _, c := range []struct {
			outcomes string // . passed, x failed, d down, s slow, - excluded, h the same message failed
			room     int    // 0: open again
			row      int
		}{
			{"", 1, 0},
			{"x", 0, 0},
			{"d", 0, 0},
			{"s", 0, 0},
			{"-", 1, 0},
			{".", 2, 1},
			{"..", 4, 2},
			{"...", 8, 3},
			{".....", 32, 5},
			{"......", 64, 6},
			{".........", 64, 9},
			{".x", 1, 0},
			{".d", 1, 0},
			{".s", 1, 0},
			{".xx", 1, 0},
			{".xxx", 0, 0},
			{"..x", 2, 0},
			{"..xx", 2, 0},
			{"..xxx", 1, 0},
			{"..xxxx", 1, 0},
			{"..xxxxx", 0, 0},
			{"......xx", 32, 0},
			{".........xx", 32, 0},
			{".........xxxxxxxxxxxx", 1, 0},
			{".........xxxxxxxxxxxxx", 0, 0},
			{".xx.", 2, 1},
			{".xx.xxx", 0, 0},
			{".x-x-", 1, 0},
			// One message that fails again and again is no further evidence, while
			// others succeed.
			{".h", 1, 0},
			{".hhhhhhhh", 1, 0},
			{".hh.h.hh", 4, 2},
			{"..xhxh", 1, 0}, // another between: it is no longer the last that failed
			{"..hhxh", 1, 0},
			{"h", 0, 0},
		} {
			b := must(t, breaker.Config{})
			trip(t, b, 0)
			for i, o := range c.outcomes {
				head := uint64(100 + i)
				if o == 'h' {
					head = 7
				}
				k, r := b.Admit(sec, head)
				if !r.OK() {
					t.Fatalf("%q: refused before outcome %d", c.outcomes, i)
				}
				switch o {
				case '.':
					b.Success(sec, k)
				case 'x', 'h':
					b.Failure(sec, k, true)
				case 'd':
					b.Unavailable(sec, k, true)
				case 's':
					b.Slow(sec, k, true)
				case '-':
					b.Exclude(sec, k)
				}
			}
			got := room(b, sec)
			if s := b.Snapshot(sec); got != c.room || s.ProbesPassed != c.row || (s.State == breaker.Open) != (c.room == 0) {
				t.Errorf("%q: room for %d, %d in a row, %v; want %d, %d", c.outcomes, got, s.ProbesPassed, s.State, c.room, c.row)
			}
		}
	})
}

// A call that finds its dependency down is evidence each time, whosever it is.
func TestDownAgainIsEvidence(t *testing.T) {
	for name, fail := range map[string]func(*Breaker, Token){
		"down": func(b *Breaker, k Token) { b.Unavailable(sec, k, false) },
		"slow": func(b *Breaker, k Token) { b.Slow(sec, k, false) },
	} {
		b := must(t, breaker.Config{})
		trip(t, b, 0)
		b.Success(sec, admit(t, b, sec))
		for range 3 {
			k, _ := b.Admit(sec, 7)
			fail(b, k)
		}
		if s := b.Snapshot(sec); s.State != breaker.Open {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// A failure between successes starts the row over, also for probes that were out
// when it came.
func TestCloseNeedsARow(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 4})
		trip(t, b, 0)
		b.Success(sec, admit(t, b, sec))
		b.Success(sec, admit(t, b, sec))
		var out []Token
		for range 4 {
			out = append(out, admit(t, b, sec))
		}
		b.Failure(sec, out[0], true)
		for i, k := range out[1:] {
			b.Success(sec, k)
			if s := b.Snapshot(sec); s.State != breaker.HalfOpen || s.ProbesPassed != i+1 {
				t.Fatalf("%d in a row since the failure: %+v", i+1, s)
			}
		}
		b.Success(sec, admit(t, b, sec))
		state(t, b, sec, breaker.Closed)
	})
}

// A breaker that trips soon after it closed needs twice as many in a row.
func TestFlapsDoubleTheRow(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 3, Memory: 10 * sec})
		now := sec
		row := func() (n int) {
			for now = max(now, b.Snapshot(now).Until); !b.Closed(); n++ {
				b.Success(now, admit(t, b, now))
			}
			return n
		}
		for i, want := range []int{3, 6, 12, 24, 48, 96, 192, 192} {
			trip(t, b, now)
			if got := row(); got != want {
				t.Fatalf("trip %d: closed after %d, want %d", i+1, got, want)
			}
			now += 10 * sec
		}
		now++ // Memory is over
		trip(t, b, now)
		if got := row(); got != 3 {
			t.Fatalf("closed after %d, a quiet time later, want 3", got)
		}
		trip(t, b, now)
		b.ForceClosed(now, "operator")
		trip(t, b, now)
		if got := row(); got != 3 {
			t.Fatalf("closed after %d, an operator's close later, want 3", got)
		}
	})
}

// Once a dependency that has flapped fails no more than a closed breaker bears, the breaker
// closes; one that fails more keeps it half-open.
func TestFlapsAreForgotten(t *testing.T) {
	for _, c := range []struct {
		every  int // a call in so many fails
		closes bool
	}{{50, true}, {10, false}} {
		b := must(t, breaker.Config{})
		now := sec
		for range 8 {
			trip(t, b, now)
			for now = max(now, b.Snapshot(now).Until); !b.Closed(); {
				b.Success(now, admit(t, b, now))
			}
			now += sec
		}
		trip(t, b, now)
		now = max(now, b.Snapshot(now).Until)
		began := now
		for n := 1; !b.Closed() && now < began+10*time.Minute; n++ {
			now += 5 * ms
			tok, r := b.Admit(now, uint64(n))
			if !r.OK() {
				t.Fatalf("call %d is refused: %+v", n, r)
			}
			if n%c.every == 0 {
				b.Failure(now, tok, true)
			} else {
				b.Success(now, tok)
			}
		}
		if b.Closed() != c.closes {
			t.Errorf("one call in %d fails: closed %v after %v", c.every, b.Closed(), now-began)
		}
	}
}

// All probes that are out may be lost at once.
func TestManyLostProbes(t *testing.T) {
	b := must(t, breaker.Config{Lease: 5 * sec, Successes: 100})
	trip(t, b, 0)
	for range 6 {
		b.Success(sec, admit(t, b, sec))
	}
	for range 64 {
		admit(t, b, sec)
	}
	b.Tick(6*sec - 1)
	state(t, b, 6*sec-1, breaker.HalfOpen)
	b.Tick(6 * sec)
	if s := b.Snapshot(6 * sec); s.State != breaker.Open || s.Cause != breaker.CauseLost || s.ProbesOut != 0 {
		t.Fatalf("%+v", s)
	}
	// Fewer than what would open it make it slower.
	b = must(t, breaker.Config{Lease: 5 * sec})
	trip(t, b, 0)
	for range 2 {
		b.Success(sec, admit(t, b, sec))
	}
	admit(t, b, sec)
	admit(t, b, sec)
	admit(t, b, 2*sec)
	b.Tick(6 * sec)
	if s := b.Snapshot(6 * sec); s.State != breaker.HalfOpen || s.ProbesOut != 1 || room(b, 6*sec) != 1 {
		t.Fatalf("%+v", s)
	}
}

// A dependency that fails every second call is never closed upon, be its outcomes in
// turns or in halves of what is out.
func TestHalfFailing(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		trip(t, b, 0)
		for i := range 10_000 {
			k, r := b.Admit(sec, uint64(i+1))
			if !r.OK() {
				t.Fatalf("call %d: %+v", i, r)
			}
			if i%2 == 0 {
				b.Success(sec, k)
			} else {
				b.Failure(sec, k, true)
			}
			state(t, b, sec, breaker.HalfOpen)
		}
		if n := room(b, sec); n < 32 {
			t.Errorf("room for %d", n)
		}
		// All failures of what is out, then all successes.
		for range 100 {
			var out []Token
			for k, r := b.Admit(sec, 0); r.OK() && len(out) < 18; k, r = b.Admit(sec, 0) {
				out = append(out, k)
			}
			for i, k := range out {
				if i < len(out)/2 {
					b.Failure(sec, k, true)
				} else {
					b.Success(sec, k)
				}
			}
			state(t, b, sec, breaker.HalfOpen)
		}
	})
	// Closed, the ratio is judged when a call fails: what the twentieth outcome, a
	// success, makes half is seen at the next failure.
	b := must(t, breaker.Config{})
	for i := range 21 {
		k := enter(t, b)
		if i%2 == 1 {
			b.Success(0, k)
			continue
		}
		b.Failure(0, k, true)
	}
	if s := b.Snapshot(0); s.State != breaker.Open || s.Cause != breaker.CauseRate {
		t.Fatalf("%+v", s)
	}
}

func TestExcludedProbesDoNotWedge(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		trip(t, b, 0)
		for range 1000 {
			b.Exclude(sec, admit(t, b, sec))
		}
		if s := b.Snapshot(sec); s.State != breaker.HalfOpen || s.BackoffLevel != 1 || s.ProbesPassed != 0 {
			t.Fatalf("%+v", s)
		}
		reclose(t, b, sec)
	})
}

func TestExcludedCallsDoNotCount(t *testing.T) {
	b := must(t, breaker.Config{})
	for range 4 {
		b.Failure(0, enter(t, b), true)
	}
	for range 1000 {
		b.Exclude(0, enter(t, b))
	}
	if s := b.Snapshot(0); s.Successes != 0 || s.Failures != 4 || s.Run != 4 {
		t.Fatalf("%+v", s)
	}
	b.Failure(0, enter(t, b), true)
	state(t, b, 0, breaker.Open)
}

func TestLostProbe(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		for name, how := range map[string]func(*Breaker, time.Duration){
			"Tick":  func(b *Breaker, now time.Duration) { b.Tick(now) },
			"Admit": func(b *Breaker, now time.Duration) { b.Admit(now, 1) },
		} {
			b := must(t, breaker.Config{Lease: 5 * sec})
			trip(t, b, 0)
			p, _ := b.Admit(sec, 9)
			how(b, 6*sec-1)
			state(t, b, 6*sec-1, breaker.HalfOpen)
			how(b, 6*sec)
			if s := b.Snapshot(6 * sec); s.State != breaker.Open || s.Cause != breaker.CauseLost || s.BackoffLevel != 2 {
				t.Fatalf("%s: a lost probe holds its slot: %+v", name, s)
			}
			b.Success(6*sec, p)
			b.Success(7*sec, p)
			state(t, b, 7*sec, breaker.Open)
		}
		// A result that comes as late as that is a loss, whoever looks first.
		b := must(t, breaker.Config{Lease: 5 * sec, Successes: 1})
		trip(t, b, 0)
		p := admit(t, b, sec)
		b.Success(6*sec, p)
		state(t, b, 6*sec, breaker.Open)
	})
}

func TestRenew(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Lease: 5 * sec, Successes: 2})
		if b.Renew(0, Token{}) || b.Renew(0, enter(t, b)) {
			t.Fatal("renewed what has no lease")
		}
		trip(t, b, 0)
		p := admit(t, b, sec)
		if !b.Renew(5*sec, p) {
			t.Fatal("not renewed")
		}
		if r := refused(t, b, 5*sec); r.Until != 10*sec {
			t.Fatalf("%+v", r)
		}
		b.Tick(10*sec - 1)
		b.Success(10*sec-1, p)
		if s := b.Snapshot(10*sec - 1); s.State != breaker.HalfOpen || s.ProbesPassed != 1 {
			t.Fatalf("%+v", s)
		}
		if b.Renew(10*sec-1, p) {
			t.Fatal("renewed a settled one")
		}
		// Too late is too late, whoever looks first.
		p, q := admit(t, b, 10*sec), admit(t, b, 10*sec)
		if !b.Renew(15*sec-1, q) {
			t.Fatal("not renewed")
		}
		if b.Renew(15*sec, p) || !b.Renew(15*sec, q) {
			t.Fatal("renewed a lost probe, or lost one that was renewed")
		}
		if s := b.Snapshot(15 * sec); s.State != breaker.HalfOpen || s.ProbesOut != 1 {
			t.Fatalf("%+v", s)
		}
		b.Force(15*sec, sec, "storm")
		if b.Renew(15*sec, q) {
			t.Fatal("renewed a probe of an older generation")
		}
		state(t, b, 15*sec, breaker.Open)
		// The last that is lost opens it, also by Renew, and the tree hears of it.
		b = must(t, breaker.Config{Lease: 5 * sec})
		told := 0
		b.notify = func(time.Duration) { told++ }
		trip(t, b, 0)
		p = admit(t, b, sec)
		told = 0
		if b.Renew(6*sec, p) || told != 1 {
			t.Fatalf("renewed at the end of its lease, or %d notices", told)
		}
		if s := b.Snapshot(6 * sec); s.State != breaker.Open || s.Cause != breaker.CauseLost {
			t.Fatalf("%+v", s)
		}
		// A permit has a lease too.
		b = must(t, breaker.Config{Lease: 5 * sec})
		b.Hold(0, 1, "fleet")
		b.Permit(0)
		p = admit(t, b, 0)
		if !b.Renew(4*sec, p) {
			t.Fatal("not renewed")
		}
		b.Tick(9*sec - 1)
		state(t, b, 9*sec-1, breaker.HalfOpen)
		b.Tick(9 * sec)
		if s := b.Snapshot(9 * sec); s.Trial != TrialFailed {
			t.Fatalf("%+v", s)
		}
	})
}

func TestLife(t *testing.T) {
	b := must(t, breaker.Config{Successes: 1})
	life := func(want uint64) {
		t.Helper()
		if got := b.Life(); got != want {
			t.Fatalf("life %d, want %d", got, want)
		}
	}
	life(0)
	var n, m uint64 = 1000, 7 // what they counted before is not ours
	detach := b.Attach(func() uint64 { return n })
	detachM := b.Attach(func() uint64 { return m })
	life(0)
	n += 10
	life(10)
	b.Tick(sec) // booked or not
	life(10)
	n, m = n+5, m+1
	life(16)
	b.Success(sec, enter(t, b)) // by token: not an attached counter's
	life(16)
	trip(t, b, 2*sec) // in whatever state
	n += 4
	life(20)
	b.Success(3*sec, admit(t, b, 3*sec))
	state(t, b, 3*sec, breaker.Closed)
	life(20)
	n++
	b.ForceClosed(4*sec, "operator")
	life(21)
	detach()
	detach()
	n += 100 // no longer attached
	life(21)
	m++
	life(22)
	detach = b.Attach(func() uint64 { return n })
	life(22)
	n += 3
	life(25)
	n = 2 // restarted: what it counted stays
	b.Tick(5 * sec)
	if got := b.Life(); got < 22 {
		t.Fatalf("life went down to %d", got)
	}
	was := b.Life()
	n += 6
	life(was + 6)
	detach()
	detachM()
	life(was + 6)
}

func TestHasten(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 1})
		b.Hasten(0)
		state(t, b, 0, breaker.Closed)
		trip(t, b, 0)
		b.Hasten(ms)
		if s := b.Snapshot(ms); s.State != breaker.HalfOpen || s.Cause != breaker.CauseRun || s.BackoffLevel != 1 {
			t.Fatalf("%+v", s)
		}
		p := admit(t, b, ms)
		b.Hasten(ms) // there is nothing to end
		refused(t, b, ms)
		b.Failure(ms, p, true)
		if s := b.Snapshot(ms); s.State != breaker.Open || s.BackoffLevel != 2 {
			t.Fatalf("%+v", s)
		}
		b.Hasten(2 * ms)
		reclose(t, b, 2*ms)

		for name, shut := range map[string]func(b *Breaker){
			"forced":                       func(b *Breaker) { b.Force(0, 10*sec, "storm") },
			"forced for good":              func(b *Breaker) { b.Force(0, 0, "operator") },
			"held":                         func(b *Breaker) { b.Hold(0, 1, "fleet") },
			"forced behind its own period": func(b *Breaker) { b.Trip(0, "test"); b.Force(0, 100*ms-1, "storm") },
		} {
			b := must(t, breaker.Config{})
			shut(b)
			b.Hasten(50 * ms)
			if s := b.Snapshot(50 * ms); s.State != breaker.Open {
				t.Errorf("%s: %+v", name, s)
			}
			refused(t, b, 50*ms)
		}
		// The force behind the period is over first.
		b = must(t, breaker.Config{})
		b.Trip(0, "test")
		b.Force(0, 60*ms, "storm")
		b.Hasten(60*ms - 1)
		state(t, b, 60*ms-1, breaker.Open)
		b.Hasten(60 * ms)
		state(t, b, 60*ms, breaker.HalfOpen)
		// A permit is not hastened into a phase.
		b = must(t, breaker.Config{})
		b.Hold(0, 1, "fleet")
		b.Permit(0)
		b.Hasten(0)
		if s := b.Snapshot(0); !s.Held {
			t.Fatalf("%+v", s)
		}
	})
}
