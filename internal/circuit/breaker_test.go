// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/stormguard-mq/stormguard/breaker"
)

// bothClocks runs f with a real clock under gobreaker and with one that stands
// still, so that both ways of judging a half-open phase are tested.
func bothClocks(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	t.Run("clock runs", f)
	t.Run("clock stands", func(t *testing.T) { synctest.Test(t, f) })
}

// An open period ends after a tenth of the time open, and after Base at least, to the
// nanosecond, for as long as somebody asks at its end.
func TestBackoffIsExact(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		began := 5 * sec
		now := began
		trip(t, b, now)
		levels := map[int]time.Duration{} // the longest period seen at each
		for n := 1; now-began < 10*time.Minute; n++ {
			d := min(max((now-began)/10, 100*ms), 30*sec)
			if r := refused(t, b, now+d-1); r.Until != now+d || r.State != breaker.Open || r.Scope != "scope" {
				t.Fatalf("period %d, %v open: refusal %+v, want until %v", n, now-began, r, now+d)
			}
			s := b.Snapshot(now)
			levels[s.BackoffLevel] = max(levels[s.BackoffLevel], d)
			now += d
			b.Failure(now, admit(t, b, now), true)
			if s := b.Snapshot(now); s.BackoffLevel > 2 && b.cfg.Period(s.BackoffLevel-1) > max((now-began)/10, 100*ms) {
				t.Fatalf("level %d after %v: ahead of its period", s.BackoffLevel, now-began)
			}
		}
		if got := b.Snapshot(now).BackoffLevel; got != 10 {
			t.Errorf("level %d after a long outage, want 10: the first at the cap", got)
		}
		for level, longest := range levels {
			if longest > b.cfg.Period(level) {
				t.Errorf("level %d had a period of %v", level, longest)
			}
		}
	})
}

// Where nothing asks for long, the level is what bounds a period.
func TestBackoffOfLateProbes(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		now := 5 * sec
		trip(t, b, now)
		for n, d := range []time.Duration{
			100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, 12800 * ms, 25600 * ms,
			30 * sec, 30 * sec, 30 * sec,
		} {
			if r := refused(t, b, now+d-1); r.Until != now+d {
				t.Fatalf("period %d: until %v, want %v", n+1, r.Until, now+d)
			}
			if got, want := b.Snapshot(now).BackoffLevel, min(n+1, 10); got != want {
				t.Fatalf("period %d: level %d, want %d", n+1, got, want)
			}
			now += d + time.Hour
			b.Failure(now, admit(t, b, now), true)
		}
	})
}

// The level climbs when its own period is one that the next may have.
func TestRungClimbsWithThePeriod(t *testing.T) {
	for _, c := range []struct {
		open  time.Duration // of a breaker at level 2, when its probe fails
		level int
		want  time.Duration
	}{
		{200 * ms, 2, 100 * ms},
		{sec, 2, 100 * ms},
		{1500 * ms, 2, 150 * ms},
		{2*sec - 1, 2, 200*ms - 1},
		{2*sec + 9, 3, 200 * ms},
		{3 * sec, 3, 300 * ms},
		{time.Hour, 3, 400 * ms},
	} {
		b := must(t, breaker.Config{})
		trip(t, b, 0)
		b.Failure(100*ms, admit(t, b, 100*ms), true) // to level 2, since 100 ms is its period too
		b.Failure(c.open, admit(t, b, c.open), true)
		if s := b.Snapshot(c.open); s.BackoffLevel != c.level || s.Until-c.open != c.want {
			t.Errorf("open for %v: level %d, period %v; want %d, %v", c.open, s.BackoffLevel, s.Until-c.open, c.level, c.want)
		}
	}
}

func TestPeriodAfter(t *testing.T) {
	c := breaker.Config{}.WithDefaults()
	for _, x := range []struct {
		n    int
		open time.Duration
		want time.Duration
	}{
		{1, -sec, 100 * ms}, {1, 0, 100 * ms}, {1, time.Hour, 100 * ms},
		{3, 0, 100 * ms}, {3, sec + 9, 100 * ms}, {3, sec + 10, 100*ms + 1}, {3, 4 * sec, 400 * ms}, {3, 5 * sec, 400 * ms},
		{99, 299 * sec, 29900 * ms}, {99, 300 * sec, 30 * sec}, {99, never, 30 * sec},
	} {
		if got := c.PeriodAfter(x.n, x.open); got != x.want {
			t.Errorf("PeriodAfter(%d, %v) = %v, want %v", x.n, x.open, got, x.want)
		}
	}
}

func TestPeriod(t *testing.T) {
	for _, c := range []struct {
		base, limit time.Duration
		n           int
		want        time.Duration
	}{
		{100 * ms, 30 * sec, 0, 100 * ms},
		{100 * ms, 30 * sec, 1, 100 * ms},
		{100 * ms, 30 * sec, 9, 25600 * ms},
		{100 * ms, 30 * sec, 10, 30 * sec},
		{100 * ms, 30 * sec, 38, 30 * sec},
		{100 * ms, 30 * sec, 63, 30 * sec},
		{100 * ms, 30 * sec, 64, 30 * sec},
		{100 * ms, 30 * sec, 65, 30 * sec},
		{100 * ms, 30 * sec, math.MaxInt, 30 * sec},
		{1, never, 63, 1 << 62},
		{1, never, 64, never},
		{3, never, 63, never},
		{sec, sec, 1, sec},
	} {
		if got := (breaker.Config{Base: c.base, Cap: c.limit}).Period(c.n); got != c.want {
			t.Errorf("Period(%v, %v, %d) = %v, want %v", c.base, c.limit, c.n, got, c.want)
		}
	}
}

func TestBackoffSurvivesAClose(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Memory: 10 * sec, Successes: 1})
		now := sec
		trip(t, b, now)
		// fails opens for the level after one more failed probe, asked for an hour late,
		// so that the level is what bounds it.
		fails := func() time.Duration {
			now = refused(t, b, now).Until + time.Hour
			b.Failure(now, admit(t, b, now), true)
			return refused(t, b, now).Until - now
		}
		closes := func() {
			now = refused(t, b, now).Until
			for !b.Closed() {
				b.Success(now, admit(t, b, now))
			}
		}
		for range 3 {
			fails()
		}
		if d := fails(); d != 1600*ms {
			t.Fatalf("%v at level 5", d)
		}
		closes()
		if got := b.Snapshot(now).BackoffLevel; got != 4 {
			t.Fatalf("level %d after the close, want 4: one step down", got)
		}
		now += 10 * sec
		trip(t, b, now)
		if s := b.Snapshot(now); s.Until-now != 100*ms || s.BackoffLevel != 4 {
			t.Fatalf("a trip within Memory opens for %v at level %d, want 100ms at 4", s.Until-now, s.BackoffLevel)
		}
		if d := fails(); d != 1600*ms {
			t.Fatalf("the next level is of %v, want 1.6s: the backoff was forgotten", d)
		}
		closes()
		now += 10*sec + 1
		if got := b.Snapshot(now).BackoffLevel; got != 0 {
			t.Fatalf("level %d after Memory, want 0", got)
		}
		trip(t, b, now)
		if d := fails(); d != 200*ms {
			t.Fatalf("the second level after Memory is of %v, want 200ms", d)
		}
	})
}

func TestJitter(t *testing.T) {
	for _, c := range []struct {
		u    float64
		want time.Duration
	}{{0, 80 * ms}, {0.5, 100 * ms}, {0.75, 110 * ms}} {
		b := must(t, breaker.Config{Jitter: 0.2}, WithRand(func() float64 { return c.u }))
		trip(t, b, 0)
		if got := refused(t, b, 0).Until; got.Round(time.Microsecond) != c.want {
			t.Errorf("u = %v: open for %v, want %v", c.u, got, c.want)
		}
	}
}

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

func TestUnavailable(t *testing.T) {
	b := must(t, breaker.Config{})
	for range 5 {
		state(t, b, 0, breaker.Closed)
		b.Unavailable(0, enter(t, b), false) // one delivery, retried
	}
	if s := b.Snapshot(0); s.State != breaker.Open || s.Cause != breaker.CauseRun {
		t.Fatalf("%+v", s)
	}
	// One of the run is enough, and it belongs to its run.
	b = must(t, breaker.Config{})
	b.Unavailable(0, enter(t, b), true)
	b.Success(0, enter(t, b))
	for range 100 {
		b.FailureOf(0, enter(t, b), false, 7)
	}
	state(t, b, 0, breaker.Closed)
	b.Unavailable(0, enter(t, b), false)
	state(t, b, 0, breaker.Open)
	// It is one failure of the ratio, if it is a first attempt.
	b = must(t, breaker.Config{NoRun: true})
	b.Unavailable(0, enter(t, b), true)
	b.Unavailable(0, enter(t, b), false)
	if s := b.Snapshot(0); s.Failures != 1 || s.Run != 2 {
		t.Fatalf("%+v", s)
	}
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
		if s := b.Snapshot(9 * sec); s.Trial != breaker.TrialFailed {
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

// A token of the closed path has no identity: who settles it says it once.
func TestClosedTokenHasNoIdentity(t *testing.T) {
	b := must(t, breaker.Config{})
	for _, k := range []Token{enter(t, b), admit(t, b, 0)} {
		b.Success(0, k)
		b.Success(0, k)
		b.Failure(0, k, true)
		b.Failure(0, k, true)
	}
	if s := b.Snapshot(0); s.Successes != 4 || s.Failures != 4 || s.Run != 2 {
		t.Fatalf("%+v", s)
	}
}

// At a high rate of calls it takes a longer run.
func TestRunScalesWithTheRate(t *testing.T) {
	for _, c := range []struct {
		perSecond uint64
		run       int
	}{{0, 5}, {10, 5}, {100, 5}, {560, 5}, {580, 6}, {1000, 6}, {10_000, 6}, {18_900, 6}, {19_300, 7}, {100_000, 7}} {
		b := must(t, breaker.Config{NoRun: false, Ratio: 0.99})
		var n uint64
		b.Attach(func() uint64 { return n })
		for i := range 59 {
			n += c.perSecond
			b.Tick(time.Duration(i+1) * sec)
		}
		n += c.perSecond
		failures := 0
		for ; b.Closed() && failures < 100; failures++ {
			b.Failure(59*sec, enter(t, b), true)
		}
		if failures != c.run || b.Snapshot(59*sec).Cause != breaker.CauseRun {
			t.Errorf("%d/s: opened after %d, want %d", c.perSecond, failures, c.run)
		}
	}
	// The surplus goes on top of what was configured, and a window of another length
	// has the same rate.
	for _, c := range []struct {
		run    int
		n      uint64
		window time.Duration
		want   int
	}{
		{2, 60 * 1000, time.Minute, 3}, {10, 60 * 1000, time.Minute, 11}, {5, 1000, sec, 6}, {5, 3600 * 1000, time.Hour, 6},
		{5, 3600 * 100, time.Hour, 5}, {5, 0, time.Hour, 5}, {1e6, 1 << 40, sec, 1e6 + 7},
	} {
		if got := runLength(c.run, c.n, c.window); got != c.want {
			t.Errorf("runLength(%d, %d, %v) = %d, want %d", c.run, c.n, c.window, got, c.want)
		}
	}
}

// By the rule of Run alone, a dependency that fails 3 % of its calls, each by itself,
// opens a breaker no more than once in 20 hours, whatever the rate.
func TestRunIsNoNoiseAtAnyRate(t *testing.T) {
	const bad = 0.03
	worst := 0.0
	for rate := 1.0; rate < 1e6; rate *= 1.01 {
		run := float64(runLength(defaultRun, uint64(rate*60), time.Minute))
		perHour := rate * 3600 * (1 - bad) * math.Pow(bad, run)
		worst = max(worst, perHour)
		if perHour > 0.05 {
			t.Fatalf("%.0f/s: %.3f an hour, by a run of %v", rate, perHour, run)
		}
	}
	if worst < 0.04 {
		t.Errorf("%.3f an hour at the worst rate: the runs are longer than they need be", worst)
	}
}

func TestForce(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		for name, prepare := range map[string]func(b *Breaker) []Token{
			"closed":   func(b *Breaker) []Token { return nil },
			"inflight": func(b *Breaker) []Token { return []Token{enter(t, b), enter(t, b)} },
			"open":     func(b *Breaker) []Token { k := enter(t, b); trip(t, b, 0); return []Token{k} },
			"half-open": func(b *Breaker) []Token {
				k := enter(t, b)
				trip(t, b, 0)
				return []Token{k, admit(t, b, sec), admit(t, b, sec)}
			},
		} {
			b := must(t, breaker.Config{Successes: 2, Probes: 2})
			old := prepare(b)
			b.Force(sec, 10*sec, "storm")
			for range 10 {
				for _, k := range old {
					b.Success(sec, k)
				}
			}
			if _, ok := b.Enter(); ok {
				t.Fatalf("%s: Enter during a force", name)
			}
			if r := refused(t, b, 11*sec-1); r.Until != 11*sec || r.Cause != "storm" {
				t.Fatalf("%s: %+v", name, r)
			}
			for _, k := range old {
				b.Success(11*sec, k)
			}
			state(t, b, 11*sec, breaker.Open)
			if !admit(t, b, 11*sec).Probe() {
				t.Fatalf("%s: not a probe", name)
			}
		}
	})
}

func TestForceExtendsAndNeverShortens(t *testing.T) {
	b := must(t, breaker.Config{})
	b.Force(0, 10*sec, "a")
	b.Force(sec, sec, "b")
	if r := refused(t, b, 5*sec); r.Until != 10*sec || r.Cause != "a" {
		t.Fatalf("%+v", r)
	}
	b.Force(sec, 20*sec, "c")
	if r := refused(t, b, 5*sec); r.Until != 21*sec || r.Cause != "c" {
		t.Fatalf("%+v", r)
	}
	b.Force(2*sec, 0, "d")
	b.Force(2*sec, sec, "e")
	b.Force(2*sec, -1, "f")
	if r := refused(t, b, never-1); r.Until != never || r.Cause != "d" {
		t.Fatalf("%+v", r)
	}
	b.Force(sec, never-1, "overflow")
	refused(t, b, never-1)
	b.Release(3 * sec)
	b.Release(3 * sec)
	state(t, b, 3*sec, breaker.HalfOpen)
	reclose(t, b, 3*sec)
	b.Release(3 * sec)
	state(t, b, 3*sec, breaker.Closed)
	trip(t, b, 4*sec)
	b.Release(4 * sec) // not a force
	state(t, b, 4*sec, breaker.Open)
	// A force over an open period of the same length is a force all the same.
	b.Force(4*sec, 100*ms, "g")
	if s := b.Snapshot(4 * sec); !s.Forced || s.Cause != "g" {
		t.Fatalf("%+v", s)
	}
}

func TestForceClosed(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		b.Failure(0, enter(t, b), true)
		b.ForceClosed(0, "operator")
		if s := b.Snapshot(0); s.State != breaker.Closed || s.Failures != 0 || s.Run != 0 {
			t.Fatalf("%+v", s)
		}
		trip(t, b, 0)
		b.Failure(sec, admit(t, b, sec), true)
		b.ForceClosed(sec, "operator")
		if s := b.Snapshot(sec); s.State != breaker.Closed || s.BackoffLevel != 0 || s.Cause != "" {
			t.Fatalf("%+v", s)
		}
		trip(t, b, sec)
		if got := refused(t, b, sec).Until; got != sec+100*ms {
			t.Fatalf("the backoff went on to %v", got)
		}
		b.Force(sec, 0, "storm")
		b.ForceClosed(2*sec, "operator")
		trip(t, b, 2*sec)
		reclose(t, b, 3*sec)
	})
}

func TestTrip(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		k := enter(t, b)
		b.Trip(0, "witness")
		b.Trip(50*ms, "again")
		b.Success(50*ms, k)
		if r := refused(t, b, 100*ms-1); r.Cause != "witness" || r.Until != 100*ms {
			t.Fatalf("%+v", r)
		}
		p := admit(t, b, 100*ms)
		b.Trip(150*ms, "witness 2")
		b.Success(150*ms, p)
		if r := refused(t, b, 150*ms); r.Cause != "witness 2" || r.Until != 250*ms {
			t.Fatalf("half-open: %+v", r)
		}
		reclose(t, b, 250*ms)
		// Whatever its pace.
		trip(t, b, sec)
		for range 5 {
			b.Success(2*sec, admit(t, b, 2*sec))
		}
		b.Trip(2*sec, "witness")
		if b.Passing() {
			t.Fatal("open, yet passing")
		}
		state(t, b, 2*sec, breaker.Open)
	})
}

func TestRunNeedsTwoDeliveries(t *testing.T) {
	retries := func(b *Breaker, n int) {
		for range n {
			b.Failure(0, enter(t, b), false)
		}
	}
	b := must(t, breaker.Config{})
	b.Failure(0, enter(t, b), true)
	retries(b, 1000)
	state(t, b, 0, breaker.Closed) // one poison message, retried in place
	b.Failure(0, enter(t, b), true)
	if s := b.Snapshot(0); s.State != breaker.Open || s.Cause != breaker.CauseRun {
		t.Fatalf("the second delivery did not trip: %+v", s)
	}

	b = must(t, breaker.Config{})
	retries(b, 4) // of a delivery whose first attempt was before a success
	state(t, b, 0, breaker.Closed)
	b.Failure(0, enter(t, b), true)
	state(t, b, 0, breaker.Open)

	b = must(t, breaker.Config{})
	for range 4 {
		b.FailureOf(0, enter(t, b), false, 7)
	}
	b.FailureOf(0, enter(t, b), false, 8)
	state(t, b, 0, breaker.Open)

	b = must(t, breaker.Config{})
	for range 100 {
		b.FailureOf(0, enter(t, b), false, 7)
	}
	state(t, b, 0, breaker.Closed)

	b = must(t, breaker.Config{NoRun: true, MinSample: 1000})
	for range 999 {
		b.Failure(0, enter(t, b), true)
	}
	state(t, b, 0, breaker.Closed)
}

func TestSuccessEndsARun(t *testing.T) {
	for name, succeed := range map[string]func(*Breaker) func(){
		"token": func(b *Breaker) func() { return func() { b.Success(0, enter(t, b)) } },
		"attached": func(b *Breaker) func() {
			var n uint64
			b.Attach(func() uint64 { return n })
			return func() { n++ }
		},
		"detached": func(b *Breaker) func() {
			return func() {
				var n uint64
				detach := b.Attach(func() uint64 { return n })
				n++
				detach()
				detach()
			}
		},
	} {
		b := must(t, breaker.Config{MinSample: 1000})
		ok := succeed(b)
		for range 20 {
			for range 4 {
				b.Failure(0, enter(t, b), true)
			}
			ok()
			if s := b.Snapshot(0); s.State != breaker.Closed || s.Run != 0 {
				t.Fatalf("%s: %+v", name, s)
			}
		}
		if s := b.Snapshot(0); s.Successes != 20 || s.Failures != 80 {
			t.Fatalf("%s: %+v", name, s)
		}
	}
}

// One poison message in a hundred, tried five times, is 1 % and not 4.8 %.
func TestOnlyFirstAttemptsCountInTheRate(t *testing.T) {
	b := must(t, breaker.Config{Plain: true, Ratio: 0.04})
	for i := range 10_000 {
		now := time.Duration(i) * ms
		if i%100 != 0 {
			b.Success(now, enter(t, b))
			continue
		}
		for attempt := range 5 {
			b.Failure(now, enter(t, b), attempt == 0)
			b.Success(now, enter(t, b)) // of its neighbours, so that there is no run
		}
	}
	if s := b.Snapshot(10 * sec); s.Failures != 100 || s.Ratio > 0.011 {
		t.Fatalf("%+v", s)
	}
}

func TestRate(t *testing.T) {
	// 19 of 20 succeeded: at the limit, not above it.
	b := must(t, breaker.Config{Plain: true})
	for range 19 {
		b.Success(0, enter(t, b))
	}
	b.Failure(0, enter(t, b), true)
	state(t, b, 0, breaker.Closed)
	b.Failure(0, enter(t, b), true)
	if s := b.Snapshot(0); s.State != breaker.Open || s.Cause != breaker.CauseRate {
		t.Fatalf("2 of 21: %+v", s)
	}
	// The same with confidence is noise.
	b = must(t, breaker.Config{})
	for range 18 {
		b.Success(0, enter(t, b))
	}
	for range 3 {
		b.Failure(0, enter(t, b), true)
	}
	if s := b.Snapshot(0); s.State != breaker.Closed || s.Bound > 0.05 || s.Ratio < 0.14 {
		t.Fatalf("3 of 21: %+v", s)
	}
	// Below MinSample nothing is judged.
	b = must(t, breaker.Config{NoRun: true})
	for range 19 {
		b.Failure(0, enter(t, b), true)
	}
	state(t, b, 0, breaker.Closed)
	b.Failure(0, enter(t, b), true)
	state(t, b, 0, breaker.Open)
}

func TestWindowSlides(t *testing.T) {
	b := must(t, breaker.Config{NoRun: true})
	for range 19 {
		b.Failure(sec/2, enter(t, b), true)
	}
	// In the last bucket that still sees it, then in the first that does not.
	if s := b.Snapshot(60*sec - 1); s.Failures != 19 {
		t.Fatalf("%+v", s)
	}
	if s := b.Snapshot(60 * sec); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
	b.Failure(60*sec, enter(t, b), true)
	state(t, b, 60*sec, breaker.Closed)
	if s := b.Snapshot(1000 * time.Hour); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
	// An edge belongs to the bucket it begins.
	b = must(t, breaker.Config{})
	b.Failure(sec, enter(t, b), true)
	if s := b.Snapshot(61*sec - 1); s.Failures != 1 {
		t.Fatalf("%+v", s)
	}
	if s := b.Snapshot(61 * sec); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestAttach(t *testing.T) {
	b := must(t, breaker.Config{NoRun: true})
	var n uint64 = 1000 // what it counted before is not ours
	detach := b.Attach(func() uint64 { return n })
	n += 10
	b.Tick(sec) // booked before the edge
	n += 5
	if s := b.Snapshot(sec); s.Successes != 15 {
		t.Fatalf("%+v", s)
	}
	if s := b.Snapshot(60 * sec); s.Successes != 5 {
		t.Fatalf("a minute on: %+v", s)
	}
	n = 3 // restarted
	b.Tick(2 * sec)
	n = 4
	if s := b.Snapshot(2 * sec); s.Successes != 11 {
		t.Fatalf("after a restart: %+v", s)
	}
	detach()
	n = 1000
	if s := b.Snapshot(2 * sec); s.Successes != 11 {
		t.Fatalf("after detach: %+v", s)
	}
	// What succeeds while the breaker is not closed is not in the next window.
	detach = b.Attach(func() uint64 { return n })
	defer detach()
	b.Trip(3*sec, "test")
	n += 100
	reclose(t, b, 4*sec)
	if s := b.Snapshot(4 * sec); s.Successes != 0 {
		t.Fatalf("after a close: %+v", s)
	}
}

func TestSlow(t *testing.T) {
	b := must(t, breaker.Config{})
	for range 5 {
		k := enter(t, b)
		b.Slow(10*sec, k, true)
		b.Exclude(90*sec, k)
	}
	if s := b.Snapshot(10 * sec); s.State != breaker.Open || s.Cause != breaker.CauseSlow {
		t.Fatalf("%+v", s)
	}
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{Successes: 1})
		trip(t, b, 0)
		p := admit(t, b, sec)
		b.Slow(11*sec, p, false)
		b.Success(12*sec, p)
		if s := b.Snapshot(12 * sec); s.State != breaker.Open || s.Cause != breaker.CauseSlow || s.BackoffLevel != 2 {
			t.Fatalf("%+v", s)
		}
	})
}

// A dependency hangs for 90 s, a hundred calls a second begin for a minute.
// gobreaker alone books each failure at its admission, which has left its
// window by then, and never trips.
func TestHangDifferential(t *testing.T) {
	const gap, hang, n = 10 * ms, 90 * sec, 6000

	synctest.Test(t, func(t *testing.T) {
		raw := gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
			Interval: 60 * sec, BucketPeriod: sec,
			ReadyToTrip: func(c gobreaker.Counts) bool {
				return c.TotalFailures+c.TotalSuccesses >= 20 && c.TotalFailures*20 > c.TotalFailures+c.TotalSuccesses
			},
		})
		var done []func(error)
		for range n {
			f, err := raw.Allow()
			if err != nil {
				t.Fatal("gobreaker tripped on calls that have not returned")
			}
			done = append(done, f)
			time.Sleep(gap)
		}
		time.Sleep(hang - 60*sec)
		for _, f := range done {
			f(errFailed)
			time.Sleep(gap)
		}
		if raw.State() != gobreaker.StateClosed {
			t.Fatal("gobreaker trips on a hang by itself now: the early report may not be needed")
		}
	})

	b := must(t, breaker.Config{Slow: 2 * sec})
	var began []time.Duration
	var tokens []Token
	reported, trippedAt := 0, time.Duration(0)
	for now := gap; now <= 60*sec && trippedAt == 0; now += gap {
		if k, ok := b.Enter(); ok {
			began, tokens = append(began, now), append(tokens, k)
		}
		if now%sec == 0 { // one sweep
			b.Tick(now)
			for ; reported < len(began) && now-began[reported] >= b.Config().Slow; reported++ {
				b.Slow(now, tokens[reported], true)
			}
		}
		if !b.Closed() {
			trippedAt = now
		}
	}
	if trippedAt == 0 || trippedAt > 3*sec || len(began) > 300 {
		t.Fatalf("tripped at %v with %d admitted, want within the slow limit and one sweep", trippedAt, len(began))
	}
}

func TestSnapshotChangesNothing(t *testing.T) {
	b := must(t, breaker.Config{})
	b.Failure(0, enter(t, b), true)
	if s := b.Snapshot(time.Hour); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
	if s := b.Snapshot(0); s.Failures != 1 {
		t.Fatalf("looking ahead rolled the window: %+v", s)
	}
	trip(t, must(t, breaker.Config{}), 0)
	b.Trip(0, "test")
	b.Changes(nil)
	if s := b.Snapshot(time.Hour); s.State != breaker.Open || s.Until != 100*ms || s.Cause != "test" {
		t.Fatalf("%+v", s)
	}
	if c := b.Changes(nil); len(c) != 0 {
		t.Fatalf("looking changed the state: %+v", c)
	}
	b.Admit(time.Hour, 0)
	if s := b.Snapshot(100 * time.Hour); s.State != breaker.HalfOpen || s.ProbesOut != 1 {
		t.Fatalf("looking expired a lease: %+v", s)
	}
}

func TestChanges(t *testing.T) {
	b := must(t, breaker.Config{Successes: 1})
	b.Trip(sec, "x")
	b.Success(2*sec, admit(t, b, 2*sec))
	want := []Change{
		{"scope", 1, sec, breaker.Closed, breaker.Open, "x", 100 * ms, 1},
		{"scope", 2, 2 * sec, breaker.Open, breaker.HalfOpen, "x", 0, 1},
		{"scope", 3, 2 * sec, breaker.HalfOpen, breaker.Closed, breaker.CauseProbe, 0, 0},
	}
	got := b.Changes(nil)
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("change %d: %+v, want %+v", i, got[i], want[i])
		}
	}
	if got = b.Changes(got[:0]); len(got) != 0 {
		t.Fatalf("drained twice: %+v", got)
	}
	for range 100 {
		b.Force(sec, 0, "y")
		b.ForceClosed(sec, "z")
	}
	got = b.Changes(nil)
	if len(got) != maxChanges || got[0].Seq != 3+200-maxChanges+1 || got[maxChanges-1].Seq != 203 {
		t.Fatalf("%d kept, from %d", len(got), got[0].Seq)
	}
}

// Out-of-order clocks must not corrupt the sums.
func TestClockMayLagBehind(t *testing.T) {
	b := must(t, breaker.Config{NoRun: true, MinSample: 1000})
	b.Failure(100*sec, enter(t, b), true)
	b.Failure(99*sec, enter(t, b), true)
	b.Failure(0, enter(t, b), true)
	if s := b.Snapshot(100 * sec); s.Failures != 3 {
		t.Fatalf("%+v", s)
	}
	if s := b.Snapshot(never); s.Failures != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestWilson(t *testing.T) {
	for _, c := range []struct {
		bad, n uint64
		z      float64
		want   float64
	}{
		{0, 0, 3, 0},
		{0, 20, 3, 0},
		{20, 20, 3, 20.0 / 29},
		{1, 20, 0, 0.05},
		{5, 10, 1.96, 0.23659}, // a textbook value
	} {
		if got := wilsonLow(c.bad, c.n, c.z); math.Abs(got-c.want) > 1e-5 {
			t.Errorf("wilsonLow(%d, %d, %v) = %v, want %v", c.bad, c.n, c.z, got, c.want)
		}
	}
}
