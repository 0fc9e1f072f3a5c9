// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

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
			if s.Tripped != began {
				t.Fatalf("tripped at %v after %v, want %v: it is one outage", s.Tripped, now-began, began)
			}
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
		now += 30 * sec
		reclose(t, b, now)
		if s := b.Snapshot(now + sec); s.Since != now || s.Tripped != 0 {
			t.Errorf("closed since %v, want %v; tripped at %v", s.Since, now, s.Tripped)
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
