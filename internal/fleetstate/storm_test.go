// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// weather is a few processes' Storms on one clock, and a network that a test
// cuts. Each acknowledges what arrives, as a session would.
type weather struct {
	t     *testing.T
	now   time.Duration
	nodes []*Storms
	acked [][]uint64
	echo  [][]time.Duration // the latest Sent of a that b heard
	cut   func(a, b int) bool
	loss  func() bool
}

func newWeather(t *testing.T, n int) *weather {
	w := &weather{t: t, now: 1000 * sec, cut: whole, loss: func() bool { return false }}
	for i := range n {
		s, err := NewStorms(StormConfig{}, crdt.Replica{Name: fmt.Sprint(i), Incarnation: 1})
		if err != nil {
			t.Fatal(err)
		}
		w.nodes = append(w.nodes, s)
		w.acked = append(w.acked, make([]uint64, n))
		w.echo = append(w.echo, make([]time.Duration, n))
	}
	return w
}

// step is a quarter of a second, in which each reports and tells the others.
func (w *weather) step(report func(i int) Report) {
	w.now += 250 * ms
	for i, s := range w.nodes {
		if r := report(i); r != (Report{Age: -1}) {
			if err := s.Report(w.now, "orders", r); err != nil {
				w.t.Fatal(err)
			}
		}
		s.Tick(w.now)
		for j, to := range w.nodes {
			if i == j {
				continue
			}
			b, upto := s.Delta(w.now, nil, to.self, w.acked[i][j], 1200)
			if w.cut(i, j) || w.loss() {
				continue
			}
			c := crdt.Contact{From: s.self, Now: w.now, Sent: w.now, Echo: w.echo[j][i]}
			if err := to.Merge(c, b); err != nil {
				w.t.Fatal(err)
			}
			w.acked[i][j] = upto // a kind network: the acknowledgement arrives
			w.echo[i][j] = w.now
		}
	}
}

func (w *weather) active() (n int) {
	for _, s := range w.nodes {
		if s.Storm(w.now, "orders").Active {
			n++
		}
	}
	return n
}

var (
	calm    = Report{Outcomes: 1200, Age: sec, Attempts: 1}
	inStorm = Report{Active: true, Crossed: crossedAll, Failed: 1200, Outcomes: 1200, Attempts: 9, Age: 70 * sec, Reason: "down"}
)

func TestStormQuorum(t *testing.T) {
	w := newWeather(t, 4)
	stormy := 0
	report := func(i int) Report {
		if i < stormy {
			return inStorm
		}
		return calm
	}
	for _, c := range []struct{ stormy, active int }{{0, 0}, {1, 0}, {2, 4}, {1, 0}, {4, 4}, {0, 0}} {
		stormy = c.stormy
		for range 8 {
			w.step(report)
		}
		if got := w.active(); got != c.active {
			t.Errorf("%d of 4 in storm: %d say that the fleet is", c.stormy, got)
		}
	}
	got := w.nodes[3].Changes(nil)
	var said []bool
	for _, c := range got {
		if c.Key != "orders" || c.Reporters != 4 || c.Need != 2 {
			t.Errorf("%+v", c)
		}
		said = append(said, c.Active)
	}
	if fmt.Sprint(said) != "[true false true false]" {
		t.Errorf("changes %v", said)
	}
}

// Two sides, apart for ten minutes, and in storm for a while each, at other
// times. When they meet again all is well, and nobody sees a storm: nothing that
// was counted meanwhile comes across.
func TestStormHeal(t *testing.T) {
	w := newWeather(t, 4)
	until := func(d time.Duration, r Report) {
		for end := w.now + d; w.now < end; {
			w.step(func(int) Report { return r })
		}
	}
	until(5*sec, calm)
	until(5*sec, inStorm)
	if w.active() != 4 {
		t.Fatal("no storm to begin with")
	}
	w.cut = islands(0, 0, 1, 1)
	until(10*time.Minute, inStorm)
	until(10*sec, calm)
	for _, s := range w.nodes {
		s.Changes(nil)
	}
	if w.active() != 0 {
		t.Fatal("the storm is not over")
	}
	w.cut = whole
	for range 100 {
		w.step(func(int) Report { return calm })
		if w.active() > 0 {
			t.Fatal("the heal made a storm")
		}
	}
	for i, s := range w.nodes {
		if got := s.Storm(w.now, "orders"); got.Reporters != 4 || got.Outcomes != 4*calm.Outcomes {
			t.Errorf("node %d sees %+v", i, got)
		}
		if c := s.Changes(nil); len(c) != 0 {
			t.Errorf("node %d was told of %+v", i, c)
		}
	}
}

// A process that falls silent in a storm takes it along after five seconds, and
// what it says again when it is back is what it says then.
func TestStormSilence(t *testing.T) {
	w := newWeather(t, 3)
	report := func(i int) Report {
		if i > 0 {
			return inStorm
		}
		return calm
	}
	for range 8 {
		w.step(report)
	}
	if !w.nodes[0].Storm(w.now, "orders").Active {
		t.Fatal("no storm")
	}
	w.cut = islands(0, 1, 1)
	began := w.now
	for w.nodes[0].Storm(w.now, "orders").Active {
		w.step(report)
	}
	if took := w.now - began; took < 5*sec || took > 5500*ms {
		t.Errorf("dropped after %v", took)
	}
	for range 100 {
		w.step(report)
	}
	// It comes back unchanged: the others have nothing new, and tell all the same.
	w.cut = whole
	for range 8 {
		w.step(report)
	}
	if got := w.nodes[0].Storm(w.now, "orders"); !got.Active || got.Reporters != 3 || got.Reason != "down" {
		t.Errorf("after the heal: %+v", got)
	}

	// An old packet, on its way since before the silence, brings nothing back.
	s, _ := NewStorms(StormConfig{}, crdt.Replica{Name: "x", Incarnation: 1})
	old := appendSnapshot([]byte{wireVersion}, &snapshot{key: "orders", num: 3, Report: inStorm})
	c := crdt.Contact{From: crdt.Replica{Name: "y", Incarnation: 1}, Now: sec, Sent: sec, Echo: sec}
	if err := s.Merge(c, old); err != nil {
		t.Fatal(err)
	}
	s.Tick(2 * sec)
	if !s.Storm(2*sec, "orders").Active {
		t.Fatal("the only one that reports is in storm")
	}
	s.Tick(10 * sec)
	c.Now, c.Sent, c.Echo = 11*sec, 11*sec, 11*sec
	if err := s.Merge(c, []byte{wireVersion}); err != nil {
		t.Fatal(err)
	}
	if err := s.Merge(c, old); err != nil {
		t.Fatal(err)
	}
	if s.Storm(11*sec, "orders").Active {
		t.Error("an old packet made a storm")
	}
}

func TestStormWithdraw(t *testing.T) {
	w := newWeather(t, 2)
	none := func(int) Report { return Report{Age: -1} }
	for range 4 {
		w.step(func(int) Report { return inStorm })
	}
	w.nodes[0].Withdraw(w.now, "orders")
	w.step(none)
	for i, s := range w.nodes {
		if got := s.Storm(w.now, "orders"); got.Reporters != 1 || !got.Active {
			t.Errorf("node %d: %+v", i, got)
		}
	}
	w.nodes[1].Withdraw(w.now, "orders")
	w.step(none)
	if w.active() != 0 {
		t.Error("a storm that nobody reports")
	}
	for range 4 * 51 {
		w.step(none)
	}
	if n := len(w.nodes[0].own); n != 0 {
		t.Errorf("%d snapshots are kept", n)
	}
}

// A later incarnation replaces an earlier one, and Gone removes it.
func TestStormIncarnations(t *testing.T) {
	s, _ := NewStorms(StormConfig{}, crdt.Replica{Name: "x", Incarnation: 1})
	say := func(incarnation uint64, r Report, num uint64) {
		t.Helper()
		b := appendSnapshot([]byte{wireVersion}, &snapshot{key: "k", num: num, Report: r})
		c := crdt.Contact{From: crdt.Replica{Name: "y", Incarnation: incarnation}, Now: sec, Sent: sec, Echo: sec}
		if err := s.Merge(c, b); err != nil {
			t.Fatal(err)
		}
	}
	say(1, inStorm, 9)
	say(2, calm, 1)
	say(1, inStorm, 10)
	if s.Storm(sec, "k").Active {
		t.Error("the earlier incarnation counts")
	}
	say(2, inStorm, 2)
	if !s.Storm(sec, "k").Active {
		t.Error("the later does not")
	}
	s.Gone(sec, crdt.Replica{Name: "y", Incarnation: 1})
	if !s.Storm(sec, "k").Active {
		t.Error("the end of the earlier took the later along")
	}
	s.Gone(sec, crdt.Replica{Name: "y", Incarnation: 2})
	if got := s.Storm(sec, "k"); got.Active || got.Reporters != 0 {
		t.Errorf("after its end: %+v", got)
	}
}

// What changes little is told every second; what changes the verdict, at once.
func TestStormPacing(t *testing.T) {
	s, _ := NewStorms(StormConfig{}, crdt.Replica{Name: "x", Incarnation: 1})
	r := calm
	for i := range 40 {
		r.Outcomes++
		if err := s.Report(time.Duration(i)*250*ms, "k", r); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.Mark(crdt.Replica{}); n < 9 || n > 11 {
		t.Errorf("%d changes in ten seconds", n)
	}
	n := s.Mark(crdt.Replica{})
	r.Active = true
	_ = s.Report(10*sec, "k", r)
	r.Active = false
	_ = s.Report(10*sec, "k", r)
	if got := s.Mark(crdt.Replica{}); got != n+2 {
		t.Errorf("two changes of verdict are %d changes", got-n)
	}
}

func TestStormBounds(t *testing.T) {
	s, _ := NewStorms(StormConfig{Keys: 2}, crdt.Replica{Name: "x", Incarnation: 1})
	for _, k := range []string{"a", "b"} {
		if err := s.Report(0, k, calm); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Report(0, "c", calm); !errors.Is(err, ErrTooManyScopes) {
		t.Errorf("a third key: %v", err)
	}
	if err := s.Report(0, strings.Repeat("k", 256), calm); !errors.Is(err, ErrScope) {
		t.Errorf("a long key: %v", err)
	}
	b := []byte{wireVersion}
	for i := range 3 {
		b = appendSnapshot(b, &snapshot{key: fmt.Sprint(i), num: uint64(i + 1), Report: calm})
	}
	if err := s.Merge(crdt.Contact{From: crdt.Replica{Name: "y"}, Sent: 1}, b); err != nil {
		t.Fatal(err)
	}
	if s.Refused() != 1 {
		t.Errorf("%d refused", s.Refused())
	}
	if err := s.Merge(crdt.Contact{From: s.self, Sent: 1}, b); !errors.Is(err, ErrSelf) {
		t.Errorf("own packet: %v", err)
	}
}

// Neither order nor repetition of reports matters to the verdict, one bad
// process is none, and the sums are the sums.
func TestJudgeStormLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		reports := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Report {
			return Report{
				Active: rapid.Bool().Draw(t, "active"), Failed: rapid.Uint64Range(0, 9).Draw(t, "failed"),
				Age: time.Duration(rapid.IntRange(0, 3).Draw(t, "age")), Reason: rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "reason"),
			}
		}), 0, 9).Draw(t, "reports")
		got := JudgeStorm(0.5, reports)
		if other := JudgeStorm(0.5, rapid.Permutation(reports).Draw(t, "order")); other != got {
			t.Fatalf("%+v and %+v", got, other)
		}
		active := 0
		for _, r := range reports {
			if r.Active {
				active++
			}
		}
		want := active > 0 && active*2 >= len(reports) && (active > 1 || len(reports) == 1)
		if got.Active != want || got.Affected != active || got.Reporters != len(reports) {
			t.Fatalf("%+v with %d of %d", got, active, len(reports))
		}
	})
}

// A report says what the detector says.
func TestReportOf(t *testing.T) {
	d, err := storm.NewDetector(dlq.StormConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		d.Failure(time.Duration(i) * 100 * ms)
	}
	d.Freeze(10 * sec)
	d.Step(70*sec, storm.Reading{Attempts: 4, Age: 70 * sec})
	r := ReportOf(d.Storm(), "timeout")
	if want := (Report{true, crossedAll, 100, 100, 4, 70 * sec, 0, "timeout"}); r != want {
		t.Errorf("%+v, want %+v", r, want)
	}
	d.Probe(71*sec, true)
	d.Step(71*sec, storm.Reading{Attempts: 4, Age: 71 * sec})
	if r := ReportOf(d.Storm(), ""); !r.Active || r.Crossed != CrossedAttempts|CrossedAge {
		t.Errorf("in its hysteresis: %+v", r)
	}
}
