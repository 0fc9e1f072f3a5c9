// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"math"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A fleet of clocks on one true time. Its instants have no monotonic reading.
type clocks struct {
	true   time.Time
	offset []time.Duration // of each wall clock
	at     []*Clock
}

func newClocks(offset ...time.Duration) *clocks {
	f := &clocks{true: time.UnixMilli(1_700_000_000_000), offset: offset}
	for i := range offset {
		f.at = append(f.at, NewClock(func() time.Time { return f.wall(i) }))
	}
	return f
}

func (f *clocks) wall(i int) time.Time { return f.true.Add(f.offset[i]) }

func (f *clocks) name(i int) Replica { return Replica{Name: string(rune('a' + i))} }

// ping lets i learn j's offset over a link with these delays there and back.
func (f *clocks) ping(i, j int, there, back time.Duration) {
	sent := f.wall(i)
	f.true = f.true.Add(there)
	received := f.wall(j)
	f.true = f.true.Add(back)
	f.at[i].Sample(f.name(j), sent, received, received.Add(-back).Add(back), f.wall(i))
}

// Healthy clocks up to 174 ms apart accept each other's stamps from the first
// sample on, also those that carry a third clock's time, and stamps follow cause.
func TestClockAcceptsHealthyFleet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		off := rapid.IntRange(-87, 87)
		f := newClocks(-87*time.Millisecond, 87*time.Millisecond,
			time.Duration(off.Draw(t, "offset"))*time.Millisecond, time.Duration(off.Draw(t, "offset"))*time.Millisecond)
		delay := func() time.Duration {
			return time.Duration(rapid.IntRange(100, 5000).Draw(t, "delay")) * time.Microsecond
		}
		for i := range f.at {
			for j := range f.at {
				if i != j {
					d := delay()
					f.ping(i, j, d, d)
				}
			}
		}
		type flying struct {
			from int
			s    Stamp
		}
		var sent []flying
		last := make([]Stamp, len(f.at))
		node := rapid.IntRange(0, len(f.at)-1)
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			f.true = f.true.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "µs")) * time.Microsecond)
			i := node.Draw(t, "at")
			switch {
			case rapid.Bool().Draw(t, "send") || len(sent) == 0:
				s := f.at[i].Now()
				if s.Compare(last[i]) <= 0 {
					t.Fatalf("%v after %v", s, last[i])
				}
				last[i] = s
				sent = append(sent, flying{i, s})
			default:
				p := rapid.SampledFrom(sent).Draw(t, "packet") // any, again and out of order
				if p.from == i {
					continue
				}
				if !f.at[i].Observe(f.name(p.from), p.s) {
					t.Fatalf("%v refused from %d, wall %d", p.s, p.from, f.wall(i).UnixMilli())
				}
				if s := f.at[i].Now(); s.Compare(p.s) <= 0 || s.Compare(last[i]) <= 0 {
					t.Fatalf("%v after %v was observed and %v stamped", s, p.s, last[i])
				} else {
					last[i] = s
				}
			}
		}
		for i := range f.at {
			for j := range f.at {
				if n := f.at[i].Violations(f.name(j)); n != 0 {
					t.Fatalf("%d counts %d violations of %d", i, n, j)
				}
			}
		}
	})
}

// A clock that is wrong by 10 s is refused, and stays so when its offset is
// known: no stamp of ours comes near it, and nobody else's is believed for it.
func TestClockRefusesAJump(t *testing.T) {
	f := newClocks(0, 20*time.Millisecond, 0)
	for range 20 {
		f.ping(0, 1, time.Millisecond, time.Millisecond)
		f.ping(0, 2, time.Millisecond, time.Millisecond)
	}
	if !f.at[0].Observe(f.name(1), f.at[1].Now()) {
		t.Fatal("refused while it was right")
	}
	f.offset[1] += 10 * time.Second
	for n := uint64(1); n <= 400; n++ {
		if f.at[0].Observe(f.name(1), f.at[1].Now()) {
			t.Fatalf("accepted after %d samples of the jump", n-1)
		}
		if got := f.at[0].Violations(f.name(1)); got != n {
			t.Fatalf("%d violations, want %d", got, n)
		}
		f.ping(0, 1, time.Millisecond, time.Millisecond)
		if ahead := f.at[0].Now().Time().Sub(f.wall(0)); ahead > time.Second {
			t.Fatalf("our stamps are %v ahead", ahead)
		}
	}
	if off, ok := f.at[0].Offset(f.name(1)); !ok || off < 9*time.Second {
		t.Fatalf("offset %v: the jump was to be known by now", off)
	}
	// The third one relays a stamp of the wrong clock: refused as well.
	if f.at[0].Observe(f.name(2), f.at[1].Now()) {
		t.Fatal("accepted by way of another")
	}
	if f.at[0].Violations(f.name(2)) != 1 || f.at[2].Violations(f.name(0)) != 0 {
		t.Fatal("counted for the wrong peer")
	}
	// A peer that stepped within what is corrected for is accepted once known.
	f.offset[2] += 300 * time.Millisecond
	if f.at[0].Observe(f.name(2), f.at[2].Now()) {
		t.Fatal("accepted before it was known")
	}
	for range 200 {
		f.ping(0, 2, time.Millisecond, time.Millisecond)
	}
	if !f.at[0].Observe(f.name(2), f.at[2].Now()) {
		t.Fatal("refused although known")
	}
	f.at[0].Forget(f.name(2))
	if _, ok := f.at[0].Offset(f.name(2)); ok || f.at[0].Violations(f.name(2)) != 0 {
		t.Fatal("not forgotten")
	}
	if f.at[0].Observe(f.name(2), Stamp{Physical: f.at[0].Now().Physical + 10}) {
		t.Fatal("accepted without a sample")
	}
}

// The edges of the rule, to the millisecond.
func TestClockRule(t *testing.T) {
	const wall = 1_700_000_000_000
	for name, tc := range map[string]struct {
		offsets []time.Duration // of the sender, and of others
		ahead   uint64
		ok      bool
	}{
		"no sample":                     {nil, 1, false},
		"below 50 ms":                   {[]time.Duration{0}, 49, true},
		"50 ms":                         {[]time.Duration{0}, 50, false},
		"ahead, corrected":              {[]time.Duration{174 * time.Millisecond}, 223, true},
		"ahead, corrected, 50 ms":       {[]time.Duration{174 * time.Millisecond}, 224, false},
		"behind is not taken off":       {[]time.Duration{-174 * time.Millisecond}, 49, true},
		"carries the fastest clock":     {[]time.Duration{0, 174 * time.Millisecond}, 223, true},
		"at the largest offset":         {[]time.Duration{maxOffset}, 549, true},
		"beyond the largest offset":     {[]time.Duration{maxOffset + time.Millisecond}, 50, false},
		"another beyond it":             {[]time.Duration{0, maxOffset + time.Millisecond}, 50, false},
		"another beyond it, and right":  {[]time.Duration{0, time.Hour}, 49, true},
		"the sender far behind, relays": {[]time.Duration{-time.Hour}, 49, true},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.UnixMilli(wall)
			c := NewClock(func() time.Time { return now })
			for i, off := range tc.offsets {
				if !c.Sample(Replica{Name: string(rune('a' + i))}, now, now.Add(off), now.Add(off), now) {
					t.Fatal("sample not used")
				}
			}
			first := c.Now()
			s := Stamp{Physical: wall + tc.ahead, Logical: 7}
			if got := c.Observe(Replica{Name: "a"}, s); got != tc.ok {
				t.Fatalf("accepted: %v", got)
			}
			want, violations := Stamp{wall, 1}, uint64(1)
			if tc.ok {
				want, violations = Stamp{wall + tc.ahead, 8}, 0
			}
			if got := c.Now(); got != want || first != (Stamp{Physical: wall}) {
				t.Fatalf("next stamp is %v, want %v", got, want)
			}
			if got := c.Violations(Replica{Name: "a"}); got != violations {
				t.Fatalf("%d violations, want %d", got, violations)
			}
		})
	}
}

// A peer that is ignored does not widen the rule for others, until a sample or a stamp of it
// comes. What was known of it stays.
func TestClockIgnores(t *testing.T) {
	f := newClocks(0, 300*time.Millisecond, 400*time.Millisecond)
	f.ping(0, 1, 0, 0)
	f.ping(0, 2, 0, 0)
	rule := func(lead time.Duration) {
		t.Helper()
		if got := f.at[0].lead; got != lead {
			t.Errorf("the lead is %v, want %v", got, lead)
		}
	}
	rule(400 * time.Millisecond)
	f.at[0].Ignore(f.name(2))
	f.at[0].Ignore(Replica{Name: "nobody"})
	rule(300 * time.Millisecond)
	if off, ok := f.at[0].Offset(f.name(2)); !ok || off != 400*time.Millisecond || len(f.at[0].peers) != 2 {
		t.Errorf("%v, %t: %d peers", off, ok, len(f.at[0].peers))
	}
	if !f.at[0].Observe(f.name(2), f.at[2].Now()) {
		t.Error("a stamp of one that is back is refused")
	}
	rule(400 * time.Millisecond)
	f.at[0].Ignore(f.name(2))
	f.ping(0, 2, 0, 0)
	rule(400 * time.Millisecond)
}

func TestClockGoesOnlyForward(t *testing.T) {
	now := time.UnixMilli(10_000)
	c := NewClock(func() time.Time { return now })
	a := c.Now()
	now = now.Add(-5 * time.Second)
	b := c.Now()
	if b != (Stamp{a.Physical, 1}) {
		t.Fatal(b)
	}
	// An old stamp, of an unknown peer too, is no news and no violation.
	if !c.Observe(origin1, Stamp{Physical: 1}) || !c.Observe(origin1, b) || c.Violations(origin1) != 0 {
		t.Fatal("an old stamp was refused")
	}
	now = now.Add(6 * time.Second)
	if got := c.Now(); got != (Stamp{Physical: 11_000}) {
		t.Fatal(got)
	}
	now = time.UnixMilli(-5)
	if got := NewClock(func() time.Time { return now }).Now(); got != (Stamp{0, 1}) {
		t.Fatal(got)
	}
}

func TestClockConcurrently(t *testing.T) {
	c := NewClock(time.Now)
	var wg sync.WaitGroup
	var mu sync.Mutex
	all := make(map[Stamp]bool)
	for range 4 {
		wg.Go(func() {
			for range 500 {
				s := c.Now()
				c.Observe(origin1, s)
				now := time.Now()
				c.Sample(origin1, now, now, now, now)
				mu.Lock()
				if all[s] {
					t.Errorf("%v twice", s)
				}
				all[s] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if c.Violations(origin1) != 0 || len(all) != 2000 {
		t.Error(c.Violations(origin1), len(all))
	}
}

func TestStampNext(t *testing.T) {
	for s, want := range map[Stamp]Stamp{
		{1, 1}:                           {1, 2},
		{1, math.MaxUint64}:              {2, 0},
		{math.MaxUint64, math.MaxUint64}: {math.MaxUint64, math.MaxUint64},
	} {
		if got := s.next(); got != want {
			t.Errorf("%v.next() = %v, want %v", s, got, want)
		}
	}
	if got := (Stamp{Physical: math.MaxUint64}).Time(); got.Year() < 9999 {
		t.Error(got)
	}
	if got := (Stamp{Physical: 1_700_000_000_123, Logical: 4}); !got.Time().Equal(time.UnixMilli(1_700_000_000_123)) || got.String() != "1700000000123.4" {
		t.Error(got, got.Time())
	}
}

func sampleOffset(e *offsetEstimator, off, there, back time.Duration) bool {
	sent := time.UnixMilli(1_700_000_000_000)
	at := sent.Add(there + off)
	return e.Add(sent, at, at, sent.Add(there+back))
}

func TestOffsetEstimator(t *testing.T) {
	var e offsetEstimator
	if _, ok := e.Offset(); ok {
		t.Fatal("an estimate without a sample")
	}
	is := func(want time.Duration) {
		t.Helper()
		if got, ok := e.Offset(); got != want || !ok {
			t.Fatalf("%v, %v, want %v", got, ok, want)
		}
	}
	ms := time.Millisecond
	sampleOffset(&e, 100*ms, 10*ms, 30*ms) // the midpoint errs by half the difference
	is(90 * ms)
	sampleOffset(&e, 100*ms, 50*ms, 10*ms) // a longer trip is not better
	is(90 * ms)
	sampleOffset(&e, 100*ms, 2*ms, 2*ms)
	is(100 * ms)
	for range offsetWindow - 3 {
		sampleOffset(&e, 100*ms, 30*ms, 3*ms)
	}
	is(100 * ms)
	for range offsetWindow - 1 {
		sampleOffset(&e, 180*ms, ms, ms)
	}
	is(100 * ms) // the window is not complete
	sampleOffset(&e, 999*ms, 5*ms, 5*ms)
	is(120 * ms) // 100 + (180 − 100)/4
	for range offsetWindow {
		sampleOffset(&e, -40*ms, ms, ms)
	}
	is(80 * ms)
}

func TestOffsetEstimatorRefuses(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_000)
	for name, tc := range map[string]struct {
		sent, received, replied, heard time.Time
		ok                             bool
	}{
		"no time at all":             {at, at, at, at, true},
		"answer before the request":  {at, at, at, at.Add(-1), false},
		"peer took longer than both": {at, at, at.Add(3), at.Add(2), false},
		"peer took all of it":        {at, at, at.Add(2), at.Add(2), true},
		"wall clock was set":         {time.Now(), at, at, time.Now().Round(0).Add(time.Hour), true}, // no monotonic reading to see it by
		"the peer's time is absurd":  {at, time.Unix(1<<40, 0), time.Unix(1<<40, 0), at, true},
		"its absurd time went back":  {at, time.Unix(1<<40, 0), time.Unix(-1<<40, 0), at, false},
	} {
		var e offsetEstimator
		if got := e.Add(tc.sent, tc.received, tc.replied, tc.heard); got != tc.ok {
			t.Errorf("%s: %v", name, got)
		}
		if off, _ := e.Offset(); off < -offsetMost || off > offsetMost {
			t.Errorf("%s: offset %v", name, off)
		}
	}
}
