// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
)

// model is the detector without a window, a bucket or an incremental sum: a
// list of all calls, from which each answer is worked out anew. It shares with
// the detector the rule that time is counted in sixtieths of a window.
type model struct {
	c     dlq.StormConfig
	calls []call
}

type call struct {
	at     time.Duration
	kind   string // fail, ok, divert, freeze, probe ok, probe fail, thaw, step
	n      uint64
	r      Reading
	active bool // verdict after a step
	slid   bool // the call looked at the window
}

func (m *model) bucket(at time.Duration) int64 { return int64(at / (m.c.Window / 60)) }

// count adds up the calls of a kind in calls[from:to] as a window at instant
// now shows them.
func (m *model) count(kind string, from, to int, now time.Duration) (n uint64) {
	for _, c := range m.calls[from:to] {
		if c.kind == kind && m.bucket(c.at) >= m.bucket(now)-60 {
			n += c.n
		}
	}
	return n
}

// frozen returns the index of the freeze in force before calls[i], or -1.
func (m *model) frozen(i int) int {
	for j := i - 1; j >= 0; j-- {
		switch m.calls[j].kind {
		case "freeze":
			return j
		case "thaw":
			return -1
		}
	}
	return -1
}

type evidence struct {
	failed, n uint64
	basis     string
	seen      time.Duration
	since     int // index of the first call after it was seen
}

// rate is what is known at instant now from calls[:i].
func (m *model) rate(i int, now, oldest time.Duration) evidence {
	fz := m.frozen(i)
	live := func(i int, now time.Duration) evidence {
		f, ok := m.count("fail", 0, i, now), m.count("ok", 0, i, now)
		return evidence{failed: f, n: f + ok, basis: basisWindow}
	}
	if fz < 0 {
		if e := live(i, now); e.n >= uint64(m.c.MinSample) {
			return e
		}
	}
	// The newest thing seen that is no longer in the live window.
	var last evidence
	prev := -1 // last call that looked at the window
	for j := 0; j <= i; j++ {
		c := call{at: now, slid: true}
		if j < i {
			c = m.calls[j]
		}
		if !c.slid {
			continue
		}
		f := m.frozen(j)
		if f < 0 && prev >= 0 {
			was, is := live(j, m.calls[prev].at), live(j, c.at)
			if was.n >= uint64(m.c.MinSample) && is.n < uint64(m.c.MinSample) {
				last = was
				last.basis, last.since = basisKept, j
				last.seen = time.Duration(m.bucket(m.calls[prev].at)+1)*(m.c.Window/60) - 1
			}
		}
		if j < i && c.kind == "freeze" {
			o := time.Duration(0)
			for _, s := range m.calls[:j] {
				if s.kind == "step" {
					o = s.at - s.r.Age
				}
			}
			last = m.rate(j, c.at, o)
			if last.n > 0 {
				last.basis = basisTrip
			}
			last.seen, last.since = c.at, j+1
		}
		if f >= 0 {
			to := j
			if j < i {
				to++ // a probe counts itself
			}
			pf, pok := m.count("probe fail", f, to, c.at), m.count("probe ok", f, to, c.at)
			if pf+pok > 0 {
				seen, since := last.seen, last.since
				if strings.HasPrefix(c.kind, "probe") {
					seen, since = c.at, j+1
				}
				last = evidence{pf, pf + pok, basisProbes, seen, since}
			}
		}
		prev = j
	}
	if last.n == 0 {
		return evidence{}
	}
	if fz < 0 {
		if last.basis == basisTrip {
			last.basis = basisKept
		}
		for _, c := range m.calls[last.since:i] {
			if c.kind == "ok" && c.n > 0 {
				return evidence{}
			}
		}
		if oldest > last.seen {
			return evidence{}
		}
	}
	return last
}

func (e evidence) over(rate float64) bool { return e.n > 0 && float64(e.failed)/float64(e.n) > rate }

func (m *model) step(now time.Duration, r Reading) (changed bool) {
	c := call{at: now, kind: "step", r: r}
	fired := -1
	for _, v := range slices.Backward(m.calls) {
		if s := v; s.kind == "step" {
			c.active = s.active
			break
		}
	}
	was := c.active
	if !was {
		three := r.Attempts > m.c.Attempts && r.Age > m.c.Age
		c.slid = three
		c.active = three && m.rate(len(m.calls), now, now-r.Age).over(m.c.ErrorRate)
	} else {
		c.slid = true
		for j := len(m.calls) - 1; j >= 0 && (m.calls[j].kind != "step" || m.calls[j].active); j-- {
			if m.calls[j].kind == "step" {
				fired = j
			}
		}
		m.calls = append(m.calls, c)
		// Walk back over the steps after the one that fired, as long as all is calm.
		calmFrom, settledFrom, settled := time.Duration(-1), time.Duration(-1), true
		for j := len(m.calls) - 1; j > fired; j-- {
			s := m.calls[j]
			if s.kind != "step" {
				continue
			}
			if m.rate(j, s.at, s.at-s.r.Age).over(m.c.ClearRate) {
				break
			}
			calmFrom = s.at
			if settled = settled && s.r.Age <= m.c.Age; settled {
				settledFrom = s.at
			}
		}
		m.calls = m.calls[:len(m.calls)-1]
		if settledFrom >= 0 && now-settledFrom >= m.c.ClearFor || calmFrom >= 0 && now-calmFrom >= max(m.c.Window, m.c.ClearFor) {
			c.active = false
		}
	}
	m.calls = append(m.calls, c)
	return c.active != was
}

func TestDetectorAgainstModel(t *testing.T) {
	rounds(t, func(t *rapid.T) {
		c := dlq.StormConfig{
			ErrorRate: rapid.SampledFrom([]float64{0.05, 0.3, 0.5}).Draw(t, "error rate"),
			Attempts:  3,
			Age:       rapid.SampledFrom([]time.Duration{time.Second, 6 * time.Second, 20 * time.Second}).Draw(t, "age"),
			Window:    6 * time.Second,
			MinSample: rapid.IntRange(1, 6).Draw(t, "min sample"),
			ClearFor:  rapid.SampledFrom([]time.Duration{time.Second, 9 * time.Second}).Draw(t, "clear for"),
		}
		d, err := NewDetector(c)
		if err != nil {
			t.Fatal(err)
		}
		m := &model{c: c.WithDefaults()}
		var now, oldest time.Duration
		var total uint64
		add := func(kind string, n uint64) {
			m.calls = append(m.calls, call{at: now, kind: kind, n: n, slid: true})
		}
		spans := rapid.SampledFrom([]int64{0, 1, 30, 100, 900, 2500, 7000})
		t.Repeat(map[string]func(*rapid.T){
			"wait": func(t *rapid.T) {
				now += time.Duration(rapid.Int64Range(0, spans.Draw(t, "up to")).Draw(t, "ms")) * time.Millisecond
			},
			"fail": func(t *rapid.T) {
				n := rapid.IntRange(1, 6).Draw(t, "n")
				fail(d, now, n)
				add("fail", uint64(n))
			},
			"ok": func(t *rapid.T) {
				n := rapid.Uint64Range(0, 12).Draw(t, "n")
				total += n
				d.Successes(now, total)
				add("ok", n)
			},
			"divert": func(t *rapid.T) {
				d.Diverted(now, 3)
				add("divert", 3)
			},
			"freeze": func(*rapid.T) {
				d.Freeze(now)
				if m.frozen(len(m.calls)) < 0 {
					add("freeze", 1)
				}
			},
			"probe": func(t *rapid.T) {
				ok := rapid.Bool().Draw(t, "ok")
				d.Probe(now, ok)
				if m.frozen(len(m.calls)) < 0 {
					return
				}
				if ok {
					add("probe ok", 1)
				} else {
					add("probe fail", 1)
				}
			},
			"thaw": func(*rapid.T) {
				d.Thaw(now)
				if m.frozen(len(m.calls)) >= 0 {
					add("thaw", 1)
				}
			},
			"step": func(t *rapid.T) {
				age := time.Duration(0)
				switch rapid.IntRange(0, 2).Draw(t, "oldest") {
				case 0: // unchanged
					age = now - oldest
				case 1:
					age = time.Duration(rapid.Int64Range(0, int64(now)).Draw(t, "age"))
				}
				oldest = now - age
				r := Reading{Attempts: rapid.SampledFrom([]int{0, 3, 4, 4, 4}).Draw(t, "attempts"), Age: age}
				if got, want := d.Step(now, r), m.step(now, r); got != want {
					t.Fatalf("changed: got %v, want %v", got, want)
				}
				active := m.calls[len(m.calls)-1].active
				if s := d.Storm(); s.Active != active {
					t.Fatalf("active: got %v, want %v", s.Active, active)
				}
			},
			"": func(t *rapid.T) {
				if len(m.calls) == 0 {
					return
				}
				// Storm speaks as of the last call that looked at the window.
				at := time.Duration(0)
				for _, c := range m.calls {
					if c.slid {
						at = c.at
					}
				}
				s := d.Storm()
				o := time.Duration(0)
				for _, c := range m.calls {
					if c.kind == "step" {
						o = c.at - c.r.Age
					}
				}
				want := m.rate(len(m.calls), at, o)
				if s.Failed != want.failed || s.Outcomes != want.n || s.Basis != want.basis {
					t.Fatalf("rate: got %d of %d (%v), want %d of %d (%v)", s.Failed, s.Outcomes, s.Basis, want.failed, want.n, want.basis)
				}
				if n := m.count("divert", 0, len(m.calls), at); s.Diverted != n {
					t.Fatalf("diverted: got %d, want %d", s.Diverted, n)
				}
			},
		})
	})
}
