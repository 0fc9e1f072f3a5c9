// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
)

// model is the breaker again, without gobreaker, atomics or sums: a list of
// events and the rules as the documentation states them.
type model struct {
	cfg     breaker.Config
	state   breaker.State
	gen     int
	until   time.Duration
	forced  bool
	held    bool // by Hold; half-open by Permit
	trial   Trial
	level   int
	left    time.Duration // when the breaker was last closed, or half-open at half its pace
	flaps   int           // trips in a row, each soon after a close
	retrip  time.Duration // the backoff is remembered until then
	began   time.Duration // of the window
	events  []event
	run     []event
	down    bool // one of the run says that the dependency is down
	out     []*modelToken
	passed  int // in a row
	pace    int
	stretch []event       // probes that were evidence, over a Memory
	head    uint64        // that failed while others passed
	promise time.Duration // nothing may be admitted before, by a force
	life    uint64
}

type event struct {
	at         time.Duration
	bad, first bool
	n          int // so many
}

type modelToken struct {
	gen      int
	probe    bool
	settled  bool
	head     uint64
	deadline time.Duration
}

func (m *model) phase(s breaker.State) {
	m.state, m.gen, m.forced, m.held, m.trial = s, m.gen+1, false, false, NoTrial
	m.out, m.passed, m.pace, m.head, m.stretch = nil, 0, 0, 0, nil
}

func (m *model) open(now, d time.Duration, forced bool) {
	if m.state == breaker.Closed {
		m.left = now
	}
	m.phase(breaker.Open)
	m.until, m.forced = now+d, forced
	if d == never {
		m.until = never
	}
}

func (m *model) nominal(level int) time.Duration {
	return time.Duration(min(float64(m.cfg.Cap), float64(m.cfg.Base)*math.Pow(2, float64(level-1))))
}

// period is that of a level, unless a tenth of the time open is less, and Base at
// least.
func (m *model) period(now time.Duration, level int) time.Duration {
	d := m.nominal(level)
	if tenth := (now - m.left) / 10; m.state != breaker.Closed && tenth < d {
		d = tenth
	} else if m.state == breaker.Closed {
		d = 0
	}
	if d < m.cfg.Base {
		d = m.cfg.Base
	}
	return d
}

// fail is a failed probe that is evidence.
func (m *model) fail(now time.Duration, head uint64) {
	if m.held || m.pace == 0 {
		m.climb(now)
		return
	}
	m.pace--
	m.passed, m.head = 0, head
	m.probed(now, true)
}

// probed counts a probe. One flap is forgotten for a Memory in which few failed.
func (m *model) probed(now time.Duration, bad bool) {
	m.stretch = append(m.stretch, event{at: now, bad: bad})
	if now < m.stretch[0].at+m.cfg.Memory {
		return
	}
	failed := 0
	for _, e := range m.stretch {
		if e.bad {
			failed++
		}
	}
	if m.flaps > 0 && len(m.stretch) >= m.cfg.Successes && float64(failed)/float64(len(m.stretch)) <= m.cfg.Ratio {
		m.flaps--
	}
	m.stretch = nil
}

// slots is how many probes may be out.
func (m *model) slots() int {
	if m.held {
		return 1
	}
	n := 1
	for p := m.pace; p >= 2; p -= 2 {
		n *= 2
	}
	return max(n, m.cfg.Probes)
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
	// A level is left once the next period may be as long as it, at least.
	if m.level == 0 || m.nominal(m.level) < m.cfg.Cap && m.period(now, m.level+1) >= m.nominal(m.level) {
		m.level++
	}
	m.open(now, m.period(now, m.level), false)
}

func (m *model) trip(now time.Duration) {
	if now > m.retrip {
		m.level, m.flaps = 0, 0
	} else if m.flaps < 6 {
		m.flaps++
	}
	m.level = max(m.level, 1)
	m.open(now, m.period(now, m.level), false)
}

func (m *model) close(now time.Duration) {
	m.phase(breaker.Closed)
	m.began, m.events, m.run, m.down = now, nil, nil, false
	m.level = max(m.level-1, 0)
	m.retrip = now + m.cfg.Memory
}

func (m *model) expire(now time.Duration) {
	gen := m.gen
	for _, p := range append([]*modelToken(nil), m.out...) {
		if m.gen == gen && p.deadline <= now {
			m.take(p)
			m.fail(now, p.head)
		}
	}
}

// take settles a probe.
func (m *model) take(t *modelToken) {
	t.settled = true
	m.out = slices.DeleteFunc(m.out, func(p *modelToken) bool { return p == t })
}

func (m *model) renew(now time.Duration, t *modelToken) bool {
	m.expire(now)
	if !t.probe || t.settled || t.gen != m.gen {
		return false
	}
	t.deadline = now + m.cfg.Lease
	return true
}

// bulk is successes of an attached counter.
func (m *model) bulk(now time.Duration, n int) {
	m.life += uint64(n)
	if m.state == breaker.Closed {
		m.events = append(m.events, event{at: now, n: n})
		m.run, m.down = nil, false
	}
}

func (m *model) counts(now time.Duration) (ok, bad int) {
	width := m.cfg.Bucket()
	for _, e := range m.events {
		if (now-m.began)/width-(e.at-m.began)/width >= buckets {
			continue
		}
		if !e.bad {
			ok += e.n
		} else if e.first {
			bad += e.n
		}
	}
	return ok, bad
}

func (m *model) admit(now time.Duration, head uint64) *modelToken {
	m.expire(now)
	if m.state == breaker.Closed {
		return &modelToken{gen: m.gen}
	}
	if m.state == breaker.Open {
		if now < m.until {
			return nil
		}
		m.phase(breaker.HalfOpen)
	}
	if len(m.out) >= m.slots() {
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
		m.take(t)
		switch {
		case o == excluded:
		case o == passed && m.held:
			m.hold(now, TrialPassed)
		case o == passed:
			m.passed++
			m.probed(now, false)
			m.pace = min(m.pace+2, 12)
			if m.pace >= 6 { // eight at once: it was back
				m.left = now
			}
			need := m.cfg.Successes
			for range m.flaps {
				need *= 2
			}
			if m.passed >= need {
				m.close(now)
			}
		case o == failed && m.pace > 0 && t.head != 0 && t.head == m.head:
			// The same message once more.
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
		m.events = append(m.events, event{at: now, n: 1})
		m.run, m.down = nil, false
		return
	case excluded:
		return
	}
	m.events = append(m.events, event{at: now, bad: true, first: first, n: 1})
	m.run = append(m.run, event{first: first})
	m.down = m.down || o == down
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
	// At this rate, and if 3 % fail, no more than one run in 20 hours is chance.
	run := m.cfg.Run
	for hourly := n * float64(time.Hour/m.cfg.Window) * math.Pow(0.03, 5); hourly > 0.05; hourly *= 0.03 {
		run++
	}
	if len(m.run) >= run && (deliveries >= 2 || m.down) || ok+bad >= m.cfg.MinSample && low > m.cfg.Ratio+1e-12 {
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
	n      uint64 // an attached counter of successes
	detach func()
}

type pair struct {
	t Token
	m *modelToken
}

func newHarness(t testing.TB, cfg breaker.Config) *harness {
	h := &harness{b: must(t, cfg), m: &model{cfg: cfg.WithDefaults(), retrip: -1}}
	h.attach()
	return h
}

func (h *harness) attach() { h.detach = h.b.Attach(func() uint64 { return h.n }) }

// advance ticks at every bucket, as a sweeper would.
func (h *harness) advance(d time.Duration) {
	for end := h.now + d; h.now < end; {
		h.now = min(end, h.now+h.m.cfg.Bucket())
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
	case down:
		h.b.Unavailable(h.now, p.t, first)
	default:
		h.b.Failure(h.now, p.t, first)
	}
}

func (h *harness) force(d time.Duration) {
	until := h.now + d
	if d <= 0 {
		d, until = never, never
	}
	if h.m.state != breaker.Open || h.m.held || h.m.until < until || h.m.until == until && !h.m.forced {
		h.m.open(h.now, d, true)
	}
	h.b.Force(h.now, d, "force")
	h.m.promise = max(h.m.promise, until)
}

func (h *harness) renew(i int) {
	p := h.tokens[i]
	if got, want := h.b.Renew(h.now, p.t), h.m.renew(h.now, p.m); got != want {
		h.msg = fmt.Sprintf("at %v: Renew %v, model %v", h.now, got, want)
	}
}

func (h *harness) bulk(n int) {
	h.n += uint64(n)
	h.m.bulk(h.now, n)
}

func (h *harness) hasten() {
	h.b.Hasten(h.now)
	if m := h.m; m.state == breaker.Open && !m.forced && !m.held && h.now >= m.promise {
		m.phase(breaker.HalfOpen)
	}
}

func (h *harness) forceClosed() {
	h.b.ForceClosed(h.now, "operator")
	h.m.level = 0
	h.m.close(h.now)
	h.m.flaps, h.m.retrip, h.m.promise = 0, -1, 0
}

func (h *harness) release() {
	h.b.Release(h.now)
	if h.m.state == breaker.Open && h.m.forced {
		h.m.phase(breaker.HalfOpen)
		h.m.promise = 0
	}
}

func (h *harness) hold(level int) {
	h.b.Hold(h.now, level, "fleet")
	m := h.m
	if h.now < m.promise {
		return
	}
	if m.state == breaker.Closed && h.now > m.retrip {
		m.level = 0
	}
	m.level = max(m.level, min(level, topLevel(m.cfg.Base, m.cfg.Cap)))
	if m.state != breaker.Open || !m.held || m.trial != NoTrial {
		m.hold(h.now, NoTrial)
	}
}

// endHold is Permit, Unhold or CloseHeld.
func (h *harness) endHold(how int) {
	m := h.m
	switch how {
	case 0:
		h.b.Permit(h.now)
		if m.held && m.state == breaker.Open {
			m.phase(breaker.HalfOpen)
			m.held = true
		}
	case 1:
		h.b.Unhold(h.now)
		if m.held {
			m.phase(breaker.HalfOpen)
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
	case breaker.Closed:
		h.m.trip(h.now)
	case breaker.HalfOpen:
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
	if m.state == breaker.Closed {
		ok, bad = m.counts(h.now)
	}
	level := m.level
	if m.state == breaker.Closed && h.now > m.retrip {
		level = 0
	}
	switch {
	case s.State != m.state, s.BackoffLevel != level, s.Forced != (m.forced && m.state == breaker.Open), s.Barred != (h.now < m.promise), s.Held != m.held, s.Trial != m.trial,
		m.state == breaker.Open && s.Until != m.until,
		m.state == breaker.Closed && (int(s.Successes) != ok || int(s.Failures) != bad || s.Run != len(m.run)),
		m.state == breaker.HalfOpen && (s.ProbesOut != len(m.out) || s.ProbesPassed != m.passed),
		h.b.Passing() != (m.pace > 0), h.b.Life() != m.life:
		return fmt.Sprintf("at %v: breaker %+v passing %v life %d, model %v until %v level %d forced %v ok %d bad %d run %d out %d passed %d pace %d flaps %d life %d",
			h.now, s, h.b.Passing(), h.b.Life(), m.state, m.until, level, m.forced, ok, bad, len(m.run), len(m.out), m.passed, m.pace, m.flaps, m.life)
	}
	if _, ok := h.b.Enter(); ok != (m.state == breaker.Closed) {
		return fmt.Sprintf("Enter %v while %v", ok, m.state)
	}
	return ""
}

func checkModel(t *rapid.T, tb testing.TB) {
	cfg := breaker.Config{
		Window:    60 * sec,
		MinSample: rapid.IntRange(1, 8).Draw(t, "minSample"),
		Run:       rapid.IntRange(2, 6).Draw(t, "run"),
		Ratio:     rapid.SampledFrom([]float64{0.05, 0.3, 0.6}).Draw(t, "ratio"),
		Z:         rapid.SampledFrom([]float64{0.5, 1, 3}).Draw(t, "z"),
		Cap:       rapid.SampledFrom([]time.Duration{100 * ms, 700 * ms, 30 * sec}).Draw(t, "cap"),
		Memory:    rapid.SampledFrom([]time.Duration{sec, 20 * sec}).Draw(t, "memory"),
		Successes: rapid.SampledFrom([]int{1, 2, 3, 4, 10}).Draw(t, "successes"),
		Probes:    rapid.IntRange(1, 3).Draw(t, "probes"),
		Lease:     rapid.SampledFrom([]time.Duration{500 * ms, 5 * sec}).Draw(t, "lease"),
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
	admit := func(t *rapid.T) {
		head := rapid.Uint64Range(0, 2).Draw(t, "head")
		for range rapid.SampledFrom([]int{1, 1, 4, 20}).Draw(t, "many") {
			h.admit(head)
		}
	}
	open := func() { // to the end of the open period
		if h.m.state == breaker.Open && h.m.until != never && h.m.until > h.now {
			h.advance(h.m.until - h.now)
		}
	}
	t.Repeat(map[string]func(*rapid.T){
		"admit":  admit,
		"admit2": admit,
		"advance": func(t *rapid.T) {
			h.advance(rapid.SampledFrom([]time.Duration{1, 99 * ms, 100 * ms, 700 * ms, 5 * sec, 31 * sec, 400 * sec}).Draw(t, "d"))
		},
		"deadline": func(t *rapid.T) {
			if h.m.state != breaker.Open || h.m.until == never || h.m.until <= h.now {
				t.Skip("no deadline")
			}
			h.advance(h.m.until - h.now - rapid.SampledFrom([]time.Duration{0, 1}).Draw(t, "early"))
		},
		"probes": func(t *rapid.T) { // a phase, or the beginning of one
			open()
			o := rapid.SampledFrom([]outcome{passed, passed, passed, failed}).Draw(t, "last")
			for n := rapid.IntRange(1, 4*cfg.Successes).Draw(t, "n"); n > 0 && h.m.state != breaker.Closed; n-- {
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
		"outage": func(t *rapid.T) { // probes fail as soon as they may, or late
			late := rapid.SampledFrom([]time.Duration{0, 0, 10 * sec}).Draw(t, "late")
			for range rapid.IntRange(1, 30).Draw(t, "n") {
				open()
				h.advance(late)
				was := len(h.tokens)
				if h.admit(1); h.m.state != breaker.HalfOpen || len(h.tokens) == was {
					return
				}
				h.settle(was, failed, true)
			}
		},
		"rejoin": func(t *rapid.T) { // settles many at once, in a random mix
			rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
			for i := max(0, len(h.tokens)-64); i < len(h.tokens); i++ {
				h.settle(i, []outcome{passed, passed, passed, failed}[rng.IntN(4)], true)
			}
		},
		"run": func(t *rapid.T) {
			o := rapid.SampledFrom([]outcome{failed, down}).Draw(t, "o")
			first := rapid.Bool().Draw(t, "first")
			for range cfg.Run + 2 {
				was := len(h.tokens)
				if h.m.state != breaker.Closed {
					return
				}
				h.admit(3)
				h.settle(was, o, first)
			}
		},
		"bulk": func(t *rapid.T) {
			h.bulk(rapid.SampledFrom([]int{1, 7, 34_000, 40_000, 1_200_000}).Draw(t, "n"))
		},
		"reattach": func(*rapid.T) {
			h.detach()
			h.detach()
			h.attach()
		},
		"renew": func(t *rapid.T) {
			if len(h.tokens) == 0 {
				t.Skip("no token")
			}
			h.renew(len(h.tokens) - 1 - rapid.IntRange(0, min(3, len(h.tokens)-1)).Draw(t, "i"))
		},
		"hasten":   func(*rapid.T) { h.hasten() },
		"down":     settle(down),
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
		"hold":        func(t *rapid.T) { h.hold(rapid.IntRange(0, 12).Draw(t, "level")) },
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
	if raceEnabled {
		t.Skip("it has one goroutine: the run without the race detector has it")
	}
	depth := 7
	if testing.Short() {
		depth = 5
	}
	cfg := breaker.Config{Run: 2, Successes: 2, Lease: 200 * ms}
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
