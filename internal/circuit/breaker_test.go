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
