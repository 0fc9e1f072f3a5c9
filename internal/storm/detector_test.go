// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
)

func newDetector(t testing.TB, c dlq.StormConfig) *Detector {
	t.Helper()
	d, err := NewDetector(c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func fail(d *Detector, now time.Duration, n int) {
	for range n {
		d.Failure(now)
	}
}

// rounds checks a property twenty times as often as rapid's default: most of
// these sequences are short, and a fault of the windows needs a rare one.
func rounds(t *testing.T, property func(*rapid.T)) {
	t.Helper()
	n := 20
	if testing.Short() {
		n = 1
	}
	for i := range n {
		t.Run(strconv.Itoa(i), rapid.MakeCheck(property))
	}
}

// over is a reading past both of the default thresholds that are not rates.
var over = Reading{Attempts: 4, Age: 60*time.Second + 1}

// Every combination of each threshold being under, met exactly and exceeded,
// for each place that the error rate can come from.
func TestStormNeedsAllThree(t *testing.T) {
	const now = 30 * time.Second
	rates := []struct {
		name       string
		failed, ok int
		over       bool
	}{
		{"no outcomes", 0, 0, false},
		{"all failed, one under the sample", 19, 0, false},
		{"all succeeded", 0, 100, false},
		{"at the threshold", 5, 95, false},
		{"over it", 6, 94, true},
		{"all failed", 20, 0, true},
	}
	attempts := []struct {
		n    int
		over bool
	}{{0, false}, {1, false}, {3, false}, {4, true}, {1 << 20, true}}
	ages := []struct {
		d    time.Duration
		over bool
	}{{0, false}, {time.Second, false}, {60 * time.Second, false}, {60*time.Second + 1, true}, {24 * time.Hour, true}}
	breakers := []struct {
		name string
		trip func(*Detector, int, int)
		// sample is whether fewer than MinSample outcomes are no rate.
		sample bool
	}{
		{"off", func(d *Detector, failed, ok int) {
			fail(d, now, failed)
			d.Successes(now, uint64(ok))
		}, true},
		{"open", func(d *Detector, failed, ok int) {
			fail(d, now, failed)
			d.Successes(now, uint64(ok))
			d.Freeze(now)
		}, true},
		{"probing", func(d *Detector, failed, ok int) {
			d.Freeze(now)
			for i := range failed + ok {
				d.Probe(now, i >= failed)
			}
		}, false},
	}
	for _, b := range breakers {
		for _, r := range rates {
			for _, a := range attempts {
				for _, g := range ages {
					d := newDetector(t, dlq.StormConfig{})
					b.trip(d, r.failed, r.ok)
					rateOver := r.over || !b.sample && r.failed == 19
					want := rateOver && a.over && g.over
					changed := d.Step(now, Reading{Attempts: a.n, Age: g.d})
					s := d.Storm()
					if changed != want || s.Active != want {
						t.Errorf("breaker %s, %s, attempts %d, age %v: changed %v, active %v, want %v: %v",
							b.name, r.name, a.n, g.d, changed, s.Active, want, s)
					}
					if s.Attempts != a.n || s.Age != g.d || want && s.Since != now {
						t.Errorf("readings: %+v", s)
					}
				}
			}
		}
	}
}

// With one of the three kept at or under its threshold all along, no sequence
// of events makes a storm, whatever the other two do.
func TestNoStormOnAnyTwo(t *testing.T) {
	rounds(t, func(t *rapid.T) {
		kept := rapid.SampledFrom([]string{"rate", "attempts", "age"}).Draw(t, "kept under")
		d, _ := NewDetector(dlq.StormConfig{})
		var now time.Duration
		var total uint64
		for range rapid.IntRange(1, 80).Draw(t, "events") {
			now += time.Duration(rapid.Int64Range(0, int64(40*time.Second)).Draw(t, "dt"))
			switch rapid.SampledFrom([]string{"outcomes", "outcomes", "freeze", "probe", "thaw", "divert"}).Draw(t, "event") {
			case "outcomes":
				n := rapid.IntRange(0, 50).Draw(t, "failures")
				if kept == "rate" {
					// The live rate must be within bounds whatever slides out:
					// successes come no earlier than their failures and share
					// their bucket.
					total += uint64(19 * n)
					d.Successes(now, total)
				}
				fail(d, now, n)
			case "freeze":
				d.Freeze(now)
			case "probe":
				d.Probe(now, kept == "rate" || rapid.Bool().Draw(t, "ok"))
			case "thaw":
				d.Thaw(now)
			case "divert":
				d.Diverted(now, 1000)
			}
			r := Reading{Attempts: rapid.IntRange(4, 99).Draw(t, "attempts"), Age: time.Minute + time.Duration(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "age"))}
			switch kept {
			case "attempts":
				r.Attempts = rapid.IntRange(0, 3).Draw(t, "few attempts")
			case "age":
				r.Age = time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "young"))
			}
			if d.Step(now, r) || d.Storm().Active {
				t.Fatalf("storm with the %s not over its threshold", kept)
			}
		}
	})
}

// A dead dependency under a breaker: twenty failures, then all is held and
// each probe fails. The window is long empty when the age is crossed.
func TestStormSeenWhileHeld(t *testing.T) {
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("probes=%v", first), func(t *testing.T) {
			d := newDetector(t, dlq.StormConfig{})
			fail(d, time.Second, 20)
			d.Freeze(time.Second)
			var fired time.Duration
			probe, period := 1100*time.Millisecond, 100*time.Millisecond
			for now := time.Second; now <= 10*time.Minute; now += 10 * time.Millisecond {
				d.Diverted(now, 10)
				if first && now >= probe {
					d.Probe(now, false)
					d.Freeze(now)
					period = min(2*period, 30*time.Second)
					probe = now + period
				}
				d.Successes(now, 0)
				if d.Step(now, Reading{Attempts: 5, Age: now - time.Second}) {
					if fired != 0 {
						t.Fatalf("changed again at %v: %v", now, d.Storm())
					}
					fired = now
				}
			}
			if want := 61*time.Second + 10*time.Millisecond; fired != want {
				t.Errorf("fired at %v, want %v", fired, want)
			}
			if s := d.Storm(); !s.Active || s.ErrorRate() != 1 || s.Diverted < 59000 {
				t.Errorf("after ten minutes: %v", s)
			}
		})
	}
}

// The same without a breaker: the retry set fills within a tenth of a second,
// intake stops, and no first attempt is made any more. A single step at the
// end must see it too.
func TestStormSeenWithoutBreaker(t *testing.T) {
	for _, tick := range []time.Duration{10 * time.Millisecond, 700 * time.Millisecond, 2 * time.Second, 65 * time.Second} {
		t.Run(tick.String(), func(t *testing.T) {
			d := newDetector(t, dlq.StormConfig{})
			d.Successes(500*time.Millisecond, 5000)
			d.Step(500*time.Millisecond, Reading{Attempts: 1, Age: time.Millisecond})
			const outage = 100 * time.Second
			fail(d, outage, 100)
			d.Successes(outage, 5001) // the last to get through
			fail(d, outage+100*time.Millisecond, 100)
			for now := outage; now < outage+5*time.Minute; now += tick {
				d.Successes(now, 5001)
				if d.Step(now, Reading{Attempts: 4, Age: now - outage}) {
					if late := now - outage - 60*time.Second; late > tick {
						t.Errorf("fired %v late", late)
					}
				}
			}
			if s := d.Storm(); !s.Active || s.Basis != basisKept && s.Basis != basisWindow {
				t.Errorf("%v", s)
			}
		})
	}
}

// A rate kept after its window ran empty is forgotten when something newer is
// known, or nothing from then is left.
func TestKeptRateStands(t *testing.T) {
	const later = 90 * time.Second
	tests := []struct {
		name string
		do   func(*Detector)
		age  time.Duration // at later
		want bool
	}{
		{"nothing happened", func(*Detector) {}, later, true},
		{"received just after the failures, within their bucket", func(*Detector) {}, later - time.Second + 1, true},
		{"oldest was received later", func(*Detector) {}, later - time.Second, false},
		{"a first attempt succeeded", func(d *Detector) { d.Successes(later, 1) }, later, false},
		{"a first attempt failed", func(d *Detector) { d.Failure(later) }, later, true},
	}
	for _, tt := range tests {
		d := newDetector(t, dlq.StormConfig{})
		fail(d, 0, 30)
		d.Successes(later, 0)
		tt.do(d)
		if got := d.Step(later, Reading{Attempts: 9, Age: tt.age}); got != tt.want {
			t.Errorf("%s: fired %v, want %v: %v", tt.name, got, tt.want, d.Storm())
		}
	}
}

func TestFreeze(t *testing.T) {
	high := func(d *Detector) { fail(d, 0, 30) }
	low := func(d *Detector) { fail(d, 0, 1); d.Successes(0, 99) }
	tests := []struct {
		name  string
		do    func(*Detector)
		basis string
		rate  float64
		fires bool
	}{
		{"a high rate is kept", func(d *Detector) { high(d); d.Freeze(1) }, basisTrip, 1, true},
		{"a low rate is kept", func(d *Detector) { low(d); d.Freeze(1) }, basisTrip, 0.01, false},
		{"too few for a rate", func(d *Detector) { fail(d, 0, 5); d.Freeze(1) }, basisNone, 0, false},
		{"a failed probe is a rate", func(d *Detector) { fail(d, 0, 5); d.Freeze(1); d.Probe(2, false) }, basisProbes, 1, true},
		{"a failed probe replaces a low rate", func(d *Detector) { low(d); d.Freeze(1); d.Probe(2, false) }, basisProbes, 1, true},
		{"a good probe replaces a high rate", func(d *Detector) { high(d); d.Freeze(1); d.Probe(2, true) }, basisProbes, 0, false},
		{"a second freeze keeps the probe's rate", func(d *Detector) { high(d); d.Freeze(1); d.Probe(2, true); d.Freeze(3) }, basisProbes, 0, false},
		{"a second freeze keeps the first rate", func(d *Detector) { low(d); d.Freeze(1); fail(d, 2, 99); d.Freeze(3) }, basisTrip, 0.01, false},
		{"outcomes of calls that were running do not move it", func(d *Detector) { high(d); d.Freeze(1); d.Successes(2, 9999) }, basisTrip, 1, true},
		{"a probe of an earlier trip does not count", func(d *Detector) {
			high(d)
			d.Freeze(1)
			d.Probe(2, true)
			d.Thaw(3)
			d.Freeze(4)
		}, basisTrip, 1, true},
		{"a probe after the thaw does not count", func(d *Detector) { low(d); d.Freeze(1); d.Thaw(2); d.Probe(3, false) }, basisWindow, 0.01, false},
		{"a thaw counts the live window", func(d *Detector) { high(d); d.Freeze(1); d.Successes(2, 70); d.Probe(3, true); d.Thaw(4) }, basisWindow, 0.3, true},
		{"a thaw without a freeze", func(d *Detector) { high(d); d.Thaw(1) }, basisWindow, 1, true},
		{"after a long hold the probes' rate stands in for the window", func(d *Detector) {
			high(d)
			d.Freeze(1)
			d.Probe(100*time.Second, false)
			d.Probe(101*time.Second, true)
			d.Thaw(102 * time.Second)
		}, basisProbes, 0.5, true},
		{"a probe older than the window leaves the rate", func(d *Detector) {
			high(d)
			d.Freeze(1)
			d.Probe(2*time.Second, false)
			d.Probe(30*time.Second, true)
			d.Diverted(70*time.Second, 1)
		}, basisProbes, 0, false},
		{"the first probe ever comes late", func(d *Detector) {
			high(d)
			d.Freeze(500 * time.Second)
			d.Probe(500*time.Second, false)
			d.Probe(530*time.Second, true)
		}, basisProbes, 0.5, true},
		{"a probe of a second trip comes late", func(d *Detector) {
			d.Freeze(1)
			d.Probe(1, true)
			d.Thaw(2)
			d.Freeze(500 * time.Second)
			d.Probe(500*time.Second, false)
			d.Probe(530*time.Second, true)
		}, basisProbes, 0.5, true},
		{"the last probe's rate stands when none is in the window", func(d *Detector) {
			high(d)
			d.Freeze(1)
			d.Probe(2*time.Second, true)
			d.Probe(30*time.Second, false)
			d.Diverted(70*time.Second, 1)
			d.Diverted(10*time.Minute, 1)
		}, basisProbes, 1, true},
		{"a rate kept from an emptied window is frozen", func(d *Detector) {
			high(d)
			d.Step(5*time.Minute, Reading{Attempts: 1, Age: 5 * time.Minute})
			d.Freeze(5 * time.Minute)
			d.Successes(6*time.Minute, 1)
		}, basisTrip, 1, true},
	}
	for _, tt := range tests {
		d := newDetector(t, dlq.StormConfig{})
		tt.do(d)
		const now = 20 * time.Minute
		s := d.Storm()
		if s.Basis != tt.basis || s.ErrorRate() != tt.rate {
			t.Errorf("%s: rate %v of %v, want %v of %v", tt.name, s.ErrorRate(), s.Basis, tt.rate, tt.basis)
		}
		d.oldest = 0
		at := d.live.end - 1 // nothing slides
		if got := d.Step(at, Reading{Attempts: 4, Age: max(at, time.Minute+1)}); got != tt.fires {
			t.Errorf("%s: fired %v, want %v: %v", tt.name, got, tt.fires, d.Storm())
		}
		if d.frozen && tt.basis != basisNone && !d.lastProbe {
			// A frozen rate stands however long the hold lasts.
			d.Diverted(now, 1)
			if s := d.Storm(); s.ErrorRate() != tt.rate {
				t.Errorf("%s: faded to %v", tt.name, s.ErrorRate())
			}
		}
	}
}

// storming returns a detector whose storm began at 100s, on a rate of 40 %.
func storming(t testing.TB) *Detector {
	d := newDetector(t, dlq.StormConfig{})
	const now = 100 * time.Second
	fail(d, now, 40)
	d.Successes(now, 60)
	if !d.Step(now, over) {
		t.Fatalf("no storm: %v", d.Storm())
	}
	return d
}

func TestHysteresis(t *testing.T) {
	const s, start = time.Second, 100 * time.Second
	young := func(time.Duration) time.Duration { return time.Minute }
	old := func(time.Duration) time.Duration { return time.Minute + 1 }
	tests := []struct {
		name  string
		total uint64 // successes from 101s on, the failures being 40
		age   func(now time.Duration) time.Duration
		clear time.Duration
	}{
		// The failures leave the window at 161s.
		{"calm at once", 1560, young, 111 * s},
		{"rate stays just over ClearRate until the failures slide out", 1559, young, 171 * s},
		{"rate between ClearRate and ErrorRate until they slide out", 1000, young, 171 * s},
		{"calm at once, one delivery stays old", 1560, old, 161 * s},
		{"rate over until they slide out, one delivery stays old", 1000, old, 221 * s},
		{"age comes back", 1560, func(now time.Duration) time.Duration {
			if now < 120*s {
				return time.Hour
			}
			return 0
		}, 130 * s},
		{"age comes back for less than ClearFor at a time", 1560, func(now time.Duration) time.Duration {
			if now/s%10 == 9 {
				return time.Hour
			}
			return 0
		}, 161 * s},
	}
	for _, tt := range tests {
		d := storming(t)
		total, cleared := tt.total, time.Duration(0)
		for now := start + s; now <= 10*time.Minute && cleared == 0; now += s {
			if now > start+s {
				total++ // traffic goes on
			}
			if tt.clear > 161*s && now < 161*s {
				total = tt.total // but must not dilute the failures
			}
			d.Successes(now, total)
			if d.Step(now, Reading{Attempts: 4, Age: tt.age(now)}) {
				cleared = now
			}
		}
		if cleared != tt.clear {
			t.Errorf("%s: cleared at %v, want %v: %v", tt.name, cleared, tt.clear, d.Storm())
		}
		if st := d.Storm(); st.Active || st.Since != tt.clear {
			t.Errorf("%s: %v", tt.name, st)
		}
	}
}

func TestRelapseRestartsTheCalm(t *testing.T) {
	const s = time.Second
	d := storming(t)
	d.Successes(101*s, 4000)
	d.Step(101*s, Reading{})
	fail(d, 110*s, 200)
	d.Step(110*s, Reading{})
	d.Successes(111*s, 40000)
	for now := 111 * s; now < 121*s; now += s {
		if d.Step(now, Reading{}) {
			t.Fatalf("cleared at %v", now)
		}
	}
	if !d.Step(121*s, Reading{}) {
		t.Error("not cleared ten seconds after the relapse")
	}
}

// All traffic ends during a storm, and what was unsettled is settled.
func TestStormClearsWithoutTraffic(t *testing.T) {
	d := storming(t)
	var cleared time.Duration
	for now := 100 * time.Second; cleared == 0 && now < time.Hour; now += time.Second {
		if d.Step(now, Reading{}) {
			cleared = now
		}
	}
	// The failures are in the window up to 161s; with nothing left from then
	// the kept rate does not stand.
	if want := 171 * time.Second; cleared != want {
		t.Errorf("cleared at %v, want %v", cleared, want)
	}
	if s := d.Storm(); s.Basis != basisNone {
		t.Errorf("%v", s)
	}
}

// One poison message may not be dead-lettered during the storm, so it is old
// for as long as the storm lasts. That must not be for ever.
func TestPoisonCannotKeepStormUp(t *testing.T) {
	for _, perMinute := range []int{0, 5, 6000} {
		d := newDetector(t, dlq.StormConfig{})
		fail(d, 0, 20)
		d.Freeze(0)
		d.Probe(2*time.Second, false)
		if !d.Step(61*time.Second, Reading{Attempts: 5, Age: 61 * time.Second}) {
			t.Fatal("no storm")
		}
		// The dependency is back; ten probes close the breaker.
		for i := range 10 {
			d.Probe(90*time.Second+time.Duration(i), true)
		}
		d.Thaw(91 * time.Second)
		var total uint64
		var cleared time.Duration
		for now := 91 * time.Second; now < time.Hour && cleared == 0; now += time.Second {
			total = uint64((now - 90*time.Second).Seconds() * float64(perMinute) / 60)
			d.Successes(now, total)
			if d.Step(now, Reading{Attempts: 5, Age: now}) {
				cleared = now
			}
		}
		if cleared == 0 || cleared > 91*time.Second+61*time.Second {
			t.Errorf("%d a minute: cleared at %v, want within a Window", perMinute, cleared)
		}
	}
}

func TestRateCountsFirstAttempts(t *testing.T) {
	// 1 % poison, each tried five times: a delivery is reported once.
	d := newDetector(t, dlq.StormConfig{})
	var ok uint64
	for i := range 6000 {
		now := time.Duration(i) * 10 * time.Millisecond
		for attempt := 1; attempt <= 5; attempt++ {
			if i%100 != 0 {
				ok++
				break
			}
			if attempt == 1 {
				d.Failure(now)
			}
		}
		d.Successes(now, ok)
		if d.Step(now, over) {
			t.Fatalf("storm at 1 %% poison: %v", d.Storm())
		}
	}
	if r := d.Storm().ErrorRate(); r != 0.01 {
		t.Errorf("rate %v, want 0.01", r)
	}
}

// A source under MinSample has no rate without a breaker, and gets one from
// the first probe when the breaker's own rule trips.
func TestSlowSource(t *testing.T) {
	d := newDetector(t, dlq.StormConfig{})
	now := time.Duration(0)
	for range 200 {
		now += 3500 * time.Millisecond // 18 in the longest window
		d.Failure(now)
		if d.Step(now, over) {
			t.Fatalf("storm without a sample: %v", d.Storm())
		}
	}
	d.Freeze(now)
	if d.Step(now, over) {
		t.Fatalf("storm at the trip: %v", d.Storm())
	}
	d.Probe(now, false)
	if !d.Step(now, over) {
		t.Errorf("no storm after a failed probe: %v", d.Storm())
	}
}

func TestDivertedIsNoOutcome(t *testing.T) {
	d := newDetector(t, dlq.StormConfig{})
	d.Diverted(0, 100000)
	d.Diverted(0, -1)
	if s := d.Storm(); s.Basis != basisNone || s.Diverted != 100000 {
		t.Errorf("%v", s)
	}
	d.Successes(0, 99)
	d.Failure(0)
	d.Diverted(0, math.MaxInt)
	if s := d.Storm(); s.ErrorRate() != 0.01 || s.Outcomes != 100 {
		t.Errorf("%v", s)
	}
	if d.Step(0, over) {
		t.Error("storm on diverted deliveries")
	}
	d.Diverted(2*time.Minute, 1)
	if s := d.Storm(); s.Diverted != 1 {
		t.Errorf("diverted %d after the window slid, want 1", s.Diverted)
	}
}

func TestSuccessesIgnoresSmallerTotals(t *testing.T) {
	d := newDetector(t, dlq.StormConfig{})
	for _, total := range []uint64{100, 98, 0, 100, 105} {
		d.Successes(0, total)
	}
	if s := d.Storm(); s.Outcomes != 105 || d.Ignored() != 2 {
		t.Errorf("outcomes %d, ignored %d; want 105, 2", s.Outcomes, d.Ignored())
	}
	// More than a bucket can hold saturates, and slides out whole.
	d.Successes(0, math.MaxUint64)
	if s := d.Storm(); s.Outcomes != math.MaxUint32 {
		t.Errorf("outcomes %d, want %d", s.Outcomes, uint32(math.MaxUint32))
	}
	d.Diverted(10*time.Minute, 1)
	if n := d.live.sum.outcomes(); n != 0 {
		t.Errorf("%d left", n)
	}
}

func TestTimeGoingBackwards(t *testing.T) {
	d := newDetector(t, dlq.StormConfig{})
	d.Failure(time.Hour)
	fail(d, -time.Hour, 19)
	if s := d.Storm(); s.Failed != 20 {
		t.Errorf("%v", s)
	}
	d.Step(-time.Hour, over)
	d.Freeze(-time.Hour)
	d.Probe(-time.Hour, true)
	d.Thaw(-time.Hour)
}

func TestDetectorOff(t *testing.T) {
	d := newDetector(t, dlq.StormConfig{Off: true})
	fail(d, 0, 100)
	d.Successes(0, 1)
	d.Diverted(0, 1)
	d.Freeze(0)
	d.Probe(0, false)
	if d.Step(0, over) {
		t.Error("fired")
	}
	d.Thaw(0)
	d.Probe(0, false)
	if d.Step(0, over) {
		t.Error("fired")
	}
	if got := d.Storm().String(); !strings.HasPrefix(got, "detector off: error rate unknown") {
		t.Error(got)
	}
}

// A detector says its settings, defaults filled in, and refuses those that
// dlq.StormConfig refuses.
func TestNewDetector(t *testing.T) {
	if s := newDetector(t, dlq.StormConfig{MinSample: 7}).Storm(); s.Config != (dlq.StormConfig{MinSample: 7}).WithDefaults() || s.Basis != "" {
		t.Errorf("%+v", s)
	}
	if d, err := NewDetector(dlq.StormConfig{Attempts: -1}); err == nil || d != nil {
		t.Errorf("%v, %v", d, err)
	}
}

func TestDetectorAllocs(t *testing.T) {
	d := newDetector(t, dlq.StormConfig{})
	d.Freeze(0)
	d.Probe(0, true) // the one allocation
	d.Thaw(0)
	var now time.Duration
	var total uint64
	if n := testing.AllocsPerRun(1000, func() {
		now += 700 * time.Millisecond
		total += 5
		d.Successes(now, total)
		d.Failure(now)
		d.Diverted(now, 1)
		d.Freeze(now)
		d.Probe(now, false)
		d.Step(now, over)
		d.Thaw(now)
		_ = d.Storm()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
