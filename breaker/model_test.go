// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// model is the breaker again, without gobreaker, atomics or sums: a list of
// events and the rules as the documentation states them.
type model struct {
	cfg     Config
	state   State
	gen     int
	until   time.Duration
	forced  bool
	held    bool // by Hold; half-open by Permit
	trial   Trial
	rung    int
	retrip  time.Duration // the ladder is remembered until then
	began   time.Duration // of the window
	events  []event
	run     []event
	out     []*modelToken
	passed  int
	head    uint64
	fails   int
	promise time.Duration // nothing may be admitted before, by a force
}

type event struct {
	at         time.Duration
	bad, first bool
}

type modelToken struct {
	gen      int
	probe    bool
	settled  bool
	head     uint64
	deadline time.Duration
}

func (m *model) open(now, d time.Duration, forced bool) {
	m.state, m.gen, m.until, m.forced, m.out, m.passed = Open, m.gen+1, now+d, forced, nil, 0
	m.held, m.trial = false, NoTrial
	if d == never {
		m.until = never
	}
}

func (m *model) period() time.Duration {
	return time.Duration(min(float64(m.cfg.Cap), float64(m.cfg.Base)*math.Pow(2, float64(m.rung-1))))
}

func (m *model) fail(now time.Duration, head uint64) {
	if head == m.head {
		m.fails++
	} else {
		m.head, m.fails = head, 1
	}
	m.climb(now)
}

func (m *model) hold(now time.Duration, t Trial) {
	m.open(now, never, false)
	m.held, m.trial = true, t
}

func (m *model) climb(now time.Duration) {
	if m.held {
		m.hold(now, TrialFailed)
		return
	}
	if m.rung == 0 || m.period() < m.cfg.Cap {
		m.rung++
	}
	m.open(now, m.period(), false)
}

func (m *model) trip(now time.Duration) {
	if now > m.retrip {
		m.rung = 0
	}
	m.rung = max(m.rung, 1)
	m.open(now, m.period(), false)
}

func (m *model) close(now time.Duration) {
	m.state, m.gen, m.began, m.events, m.run, m.forced = Closed, m.gen+1, now, nil, nil, false
	m.held, m.trial = false, NoTrial
	m.out, m.passed = nil, 0
	m.rung = max(m.rung-1, 0)
	m.retrip = now + m.cfg.Memory
}

func (m *model) expire(now time.Duration) {
	for _, p := range m.out {
		if p.deadline <= now {
			m.fail(now, p.head)
			return
		}
	}
}

func (m *model) counts(now time.Duration) (ok, bad int) {
	width := m.cfg.Window / buckets
	for _, e := range m.events {
		if (now-m.began)/width-(e.at-m.began)/width >= buckets {
			continue
		}
		if !e.bad {
			ok++
		} else if e.first {
			bad++
		}
	}
	return ok, bad
}

func (m *model) admit(now time.Duration, head uint64) *modelToken {
	m.expire(now)
	if m.state == Closed {
		return &modelToken{gen: m.gen}
	}
	if m.state == Open {
		if now < m.until {
			return nil
		}
		m.state, m.gen, m.forced = HalfOpen, m.gen+1, false
	}
	if m.held && len(m.out) > 0 {
		return nil
	}
	if len(m.out) >= m.cfg.Probes || len(m.out) >= m.cfg.Successes-m.passed {
		return nil
	}
	p := &modelToken{gen: m.gen, probe: true, head: head, deadline: now + m.cfg.Lease}
	m.out = append(m.out, p)
	return p
}

func (m *model) settle(now time.Duration, t *modelToken, o outcome, first bool) {
	if t.probe {
		m.expire(now)
		if t.settled || t.gen != m.gen {
			return
		}
		t.settled = true
		for i, p := range m.out {
			if p == t {
				m.out = append(m.out[:i:i], m.out[i+1:]...)
				break
			}
		}
		switch o {
		case passed:
			m.head, m.fails = 0, 0
			if m.held {
				m.hold(now, TrialPassed)
				return
			}
			if m.passed++; m.passed == m.cfg.Successes {
				m.close(now)
			}
		case excluded:
		default:
			m.fail(now, t.head)
		}
		return
	}
	if t.gen != m.gen {
		return
	}
	switch o {
	case passed:
		m.events = append(m.events, event{at: now})
		m.run = nil
		return
	case excluded:
		return
	}
	m.events = append(m.events, event{at: now, bad: true, first: first})
	m.run = append(m.run, event{first: first})
	deliveries := 0
	for i, e := range m.run {
		if e.first || i == 0 {
			deliveries++
		}
	}
	ok, bad := m.counts(now)
	n, z := float64(ok+bad), m.cfg.Z
	p := float64(bad) / n
	low := (n*p + z*z/2 - z*math.Sqrt(n*p*(1-p)+z*z/4)) / (n + z*z)
	if len(m.run) >= m.cfg.Run && deliveries >= 2 || ok+bad >= m.cfg.MinSample && low > m.cfg.Ratio+1e-12 {
		m.trip(now)
	}
}

// harness drives breaker and model side by side.
type harness struct {
	b      *Breaker
	m      *model
	now    time.Duration
	tokens []pair
	msg    string
}

type pair struct {
	t Token
	m *modelToken
}

func newHarness(t testing.TB, cfg Config) *harness {
	return &harness{b: must(t, cfg), m: &model{cfg: cfg.WithDefaults(), retrip: -1}}
}

// advance ticks at every bucket, as a sweeper would.
func (h *harness) advance(d time.Duration) {
	for end := h.now + d; h.now < end; {
		h.now = min(end, h.now+h.m.cfg.Window/buckets)
		h.b.Tick(h.now)
		h.m.expire(h.now)
	}
}

func (h *harness) admit(head uint64) {
	want := h.m.admit(h.now, head)
	got, r := h.b.Admit(h.now, head)
	if r.OK() != (want != nil) || want != nil && got.Probe() != want.probe {
		h.msg = fmt.Sprintf("Admit(%v) = %+v, model %+v", h.now, r, want)
		return
	}
	if r.OK() {
		if h.now < h.m.promise {
			h.msg = fmt.Sprintf("admitted at %v, forced until %v", h.now, h.m.promise)
		}
		h.tokens = append(h.tokens, pair{got, want})
	}
}

func (h *harness) settle(i int, o outcome, first bool) {
	p := h.tokens[i]
	h.m.settle(h.now, p.m, o, first)
	switch o {
	case passed:
		h.b.Success(h.now, p.t)
	case excluded:
		h.b.Exclude(h.now, p.t)
	case tooSlow:
		h.b.Slow(h.now, p.t, first)
	default:
		h.b.Failure(h.now, p.t, first)
	}
}

func (h *harness) force(d time.Duration) {
	until := h.now + d
	if d <= 0 {
		d, until = never, never
	}
	if h.m.state != Open || h.m.held || h.m.until < until || h.m.until == until && !h.m.forced {
		h.m.open(h.now, d, true)
	}
	h.b.Force(h.now, d, "force")
	h.m.promise = max(h.m.promise, until)
}

func (h *harness) forceClosed() {
	h.b.ForceClosed(h.now, "operator")
	h.m.rung = 0
	h.m.close(h.now)
	h.m.head, h.m.fails, h.m.retrip, h.m.promise = 0, 0, -1, 0
}

func (h *harness) release() {
	h.b.Release(h.now)
	if h.m.state == Open && h.m.forced {
		h.m.state, h.m.gen, h.m.forced = HalfOpen, h.m.gen+1, false
		h.m.promise = 0
	}
}

func (h *harness) hold(rung int) {
	h.b.Hold(h.now, rung, "fleet")
	m := h.m
	if h.now < m.promise {
		return
	}
	if m.state == Closed && h.now > m.retrip {
		m.rung = 0
	}
	m.rung = max(m.rung, min(rung, topRung(m.cfg.Base, m.cfg.Cap)))
	if m.state != Open || !m.held || m.trial != NoTrial {
		m.hold(h.now, NoTrial)
	}
}

// endHold is Permit, Unhold or CloseHeld.
func (h *harness) endHold(how int) {
	m := h.m
	switch how {
	case 0:
		h.b.Permit(h.now)
		if m.held && m.state == Open {
			m.state, m.gen, m.trial = HalfOpen, m.gen+1, NoTrial
		}
	case 1:
		h.b.Unhold(h.now)
		if m.held {
			m.state, m.gen, m.held, m.trial, m.out, m.passed = HalfOpen, m.gen+1, false, NoTrial, nil, 0
		}
	case 2:
		h.b.CloseHeld(h.now, "fleet")
		if m.held {
			m.close(h.now)
		}
	}
}

func (h *harness) trip() {
	h.b.Trip(h.now, "judge")
	h.m.expire(h.now)
	switch h.m.state {
	case Closed:
		h.m.trip(h.now)
	case HalfOpen:
		h.m.climb(h.now)
	}
}

// check compares what can be seen.
func (h *harness) check() string {
	if h.msg != "" {
		return h.msg
	}
	s, m := h.b.Snapshot(h.now), h.m
	ok, bad := 0, 0
	if m.state == Closed {
		ok, bad = m.counts(h.now)
	}
	rung := m.rung
	if m.state == Closed && h.now > m.retrip {
		rung = 0
	}
	switch {
	case s.State != m.state, s.Rung != rung, s.Forced != (m.forced && m.state == Open), s.Barred != (h.now < m.promise), s.Held != m.held, s.Trial != m.trial,
		m.state == Open && s.Until != m.until,
		m.state == Closed && (int(s.Successes) != ok || int(s.Failures) != bad || s.Run != len(m.run)),
		m.state == HalfOpen && (s.ProbesOut != len(m.out) || s.ProbesPassed != m.passed),
		m.head != 0 && h.b.Suspect(m.head) != (m.fails >= m.cfg.PoisonAfter):
		return fmt.Sprintf("at %v: breaker %+v, model %v until %v rung %d forced %v ok %d bad %d run %d out %d passed %d head %d fails %d",
			h.now, s, m.state, m.until, rung, m.forced, ok, bad, len(m.run), len(m.out), m.passed, m.head, m.fails)
	case s.ProbesOut > m.cfg.Probes:
		return "too many probes"
	}
	if _, ok := h.b.Enter(); ok != (m.state == Closed) {
		return fmt.Sprintf("Enter %v while %v", ok, m.state)
	}
	return ""
}

func checkModel(t *rapid.T, tb testing.TB) {
	cfg := Config{
		Window:      60 * sec,
		MinSample:   rapid.IntRange(1, 8).Draw(t, "minSample"),
		Run:         rapid.IntRange(2, 6).Draw(t, "run"),
		Ratio:       rapid.SampledFrom([]float64{0.05, 0.3, 0.6}).Draw(t, "ratio"),
		Z:           rapid.SampledFrom([]float64{0.5, 1, 3}).Draw(t, "z"),
		Cap:         rapid.SampledFrom([]time.Duration{100 * ms, 700 * ms, 30 * sec}).Draw(t, "cap"),
		Memory:      rapid.SampledFrom([]time.Duration{sec, 20 * sec}).Draw(t, "memory"),
		Successes:   rapid.IntRange(1, 4).Draw(t, "successes"),
		Probes:      rapid.IntRange(1, 3).Draw(t, "probes"),
		Lease:       rapid.SampledFrom([]time.Duration{500 * ms, 5 * sec}).Draw(t, "lease"),
		PoisonAfter: rapid.IntRange(1, 3).Draw(t, "poison"),
	}
	h := newHarness(tb, cfg)
	settle := func(o outcome) func(*rapid.T) {
		return func(t *rapid.T) {
			if len(h.tokens) == 0 {
				t.Skip("no token")
			}
			// Mostly the youngest; sometimes one of any age, settled or not.
			i := len(h.tokens) - 1
			if rapid.IntRange(0, 3).Draw(t, "old") == 0 {
				i = rapid.IntRange(0, i).Draw(t, "i")
			}
			h.settle(i, o, rapid.Bool().Draw(t, "first"))
		}
	}
	admit := func(t *rapid.T) { h.admit(rapid.Uint64Range(1, 2).Draw(t, "head")) }
	t.Repeat(map[string]func(*rapid.T){
		"admit":  admit,
		"admit2": admit,
		"advance": func(t *rapid.T) {
			h.advance(rapid.SampledFrom([]time.Duration{1, 99 * ms, 100 * ms, 700 * ms, 5 * sec, 31 * sec}).Draw(t, "d"))
		},
		"deadline": func(t *rapid.T) {
			if h.m.state != Open || h.m.until == never || h.m.until <= h.now {
				t.Skip("no deadline")
			}
			h.advance(h.m.until - h.now - rapid.SampledFrom([]time.Duration{0, 1}).Draw(t, "early"))
		},
		"probes": func(t *rapid.T) { // a phase, or the beginning of one
			if h.m.state == Open && h.m.until != never && h.m.until > h.now {
				h.advance(h.m.until - h.now)
			}
			o := rapid.SampledFrom([]outcome{passed, passed, passed, failed}).Draw(t, "last")
			for n := rapid.IntRange(1, cfg.Successes).Draw(t, "n"); n > 0 && h.m.state != Closed; n-- {
				was := len(h.tokens)
				if h.admit(1); len(h.tokens) == was {
					return
				}
				if n > 1 {
					h.settle(was, passed, true)
				} else {
					h.settle(was, o, true)
				}
			}
		},
		"success":  settle(passed),
		"failure":  settle(failed),
		"failure2": settle(failed),
		"slow":     settle(tooSlow),
		"exclude":  settle(excluded),
		"force": func(t *rapid.T) {
			h.force(rapid.SampledFrom([]time.Duration{0, 50 * ms, sec, 40 * sec}).Draw(t, "d"))
		},
		"forceClosed": func(*rapid.T) { h.forceClosed() },
		"release":     func(*rapid.T) { h.release() },
		"trip":        func(*rapid.T) { h.trip() },
		"hold":        func(t *rapid.T) { h.hold(rapid.IntRange(0, 12).Draw(t, "rung")) },
		"endHold":     func(t *rapid.T) { h.endHold(rapid.IntRange(0, 2).Draw(t, "how")) },
		"permit": func(t *rapid.T) { // a permit and its probe
			h.endHold(0)
			if was := len(h.tokens); h.m.held {
				if h.admit(1); len(h.tokens) > was {
					h.settle(was, rapid.SampledFrom([]outcome{passed, failed, tooSlow, excluded}).Draw(t, "o"), true)
				}
			}
		},
		"": func(t *rapid.T) {
			if msg := h.check(); msg != "" {
				t.Fatal(msg)
			}
		},
	})
}

func TestModel(t *testing.T) {
	t.Run("clock runs", func(t *testing.T) {
		rapid.Check(t, func(rt *rapid.T) { checkModel(rt, t) })
	})
	t.Run("clock stands", func(t *testing.T) {
		rapid.Check(t, func(rt *rapid.T) {
			rapid.SyncTest(rt, func(rt *rapid.T) { checkModel(rt, t) })
		})
	})
}

// Every sequence of seven steps over a small alphabet, from closed.
func TestModelExhaustive(t *testing.T) {
	depth := 7
	if testing.Short() {
		depth = 5
	}
	cfg := Config{Run: 2, Successes: 1, Lease: 200 * ms}
	steps := []func(h *harness){
		func(h *harness) { h.admit(1) },
		func(h *harness) { settleAt(h, 0, passed) },
		func(h *harness) { settleAt(h, len(h.tokens)-1, failed) },
		func(h *harness) { settleAt(h, len(h.tokens)-1, passed) },
		func(h *harness) { h.force(150 * ms) },
		func(h *harness) { h.advance(100 * ms) },
	}
	synctest.Test(t, func(t *testing.T) {
		total := 1
		for range depth {
			total *= len(steps)
		}
		for seq := range total {
			h := newHarness(t, cfg)
			for n, k := seq, 0; k < depth; n, k = n/len(steps), k+1 {
				steps[n%len(steps)](h)
			}
			if msg := h.check(); msg != "" {
				t.Fatalf("sequence %d (base %d, first step lowest): %s", seq, len(steps), msg)
			}
		}
	})
}

func settleAt(h *harness, i int, o outcome) {
	if i >= 0 && i < len(h.tokens) {
		h.settle(i, o, true)
	}
}
