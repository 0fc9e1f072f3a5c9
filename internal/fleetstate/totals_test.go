// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func newTotals(t interface{ Fatal(...any) }, name string, incarnation uint64) *Totals {
	n, err := NewTotals(crdt.Replica{Name: name, Incarnation: incarnation})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// census is a few processes that count, each by a clock of its own, and packets that are
// lost, repeated, delayed and overtake each other.
type census struct {
	t       *rapid.T
	now     time.Duration
	nodes   []*Totals
	offset  []time.Duration
	heard   [][]time.Duration // by whom, of whom: the latest Sent
	under   []posted
	sum     map[string]*[totalKinds]uint64
	success map[string][]time.Duration // by key: each process's latest, in true time
}

type posted struct {
	from, to int
	c        crdt.Contact
	b        []byte
}

func (y *census) clock(i int) time.Duration { return y.now + y.offset[i] }

func (y *census) count(i int, key string, n [totalKinds]uint64) {
	if err := y.nodes[i].Count(y.clock(i), key, n[0], n[1], n[2]); err != nil {
		y.t.Fatal(err)
	}
	for k := range n {
		y.sum[key][k] += n[k]
	}
}

func (y *census) send(i, j int) posted {
	b, _ := y.nodes[i].Delta(y.clock(i), nil, y.nodes[j].self, 0, 1<<20)
	return posted{i, j, crdt.Contact{From: y.nodes[i].self, Sent: y.clock(i), Echo: y.heard[i][j]}, b}
}

func (y *census) deliver(p posted) {
	p.c.Now = y.clock(p.to)
	if err := y.nodes[p.to].Merge(p.c, p.b); err != nil {
		y.t.Fatal(err)
	}
	y.heard[p.to][p.from] = max(y.heard[p.to][p.from], p.c.Sent)
}

// Whatever becomes of packets, totals never fall, processes that have heard each other
// have the same, and no success is taken for younger than it is, or for news when it is
// old.
func TestTotalsLaws(t *testing.T) {
	keys := []string{"orders", "mails"}
	rapid.Check(t, func(t *rapid.T) {
		y := &census{t: t, now: 1000 * sec, sum: map[string]*[totalKinds]uint64{}, success: map[string][]time.Duration{}}
		const n = 3
		for i := range n {
			y.nodes = append(y.nodes, newTotals(t, fmt.Sprint(i), 1))
			y.offset = append(y.offset, time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "offset")))
			y.heard = append(y.heard, make([]time.Duration, n))
		}
		for _, k := range keys {
			y.sum[k], y.success[k] = new([totalKinds]uint64), make([]time.Duration, n)
		}
		last := map[string]uint64{}
		check := func() {
			for i, node := range y.nodes {
				for _, one := range node.All(nil) {
					id := fmt.Sprint(i, one.Key)
					if one.Handled < last[id] || one.Handled > y.sum[one.Key][totalHandled] {
						t.Fatalf("%s was %d and is %d of %d", id, last[id], one.Handled, y.sum[one.Key][totalHandled])
					}
					last[id] = one.Handled
				}
				for _, k := range keys {
					ago, ok := node.OthersSucceeded(y.clock(i), k)
					if !ok {
						continue
					}
					latest := time.Duration(0)
					for j, at := range y.success[k] {
						if j != i {
							latest = max(latest, at)
						}
					}
					if latest == 0 || ago < y.now-latest {
						t.Fatalf("%d: %s succeeded elsewhere %v ago, and was said to have %v ago", i, k, y.now-latest, ago)
					}
				}
			}
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			y.now += time.Duration(rapid.SampledFrom([]int{1, 50, 250, 1000, 20000}).Draw(t, "ms")) * ms
			i, j := rapid.IntRange(0, n-1).Draw(t, "i"), rapid.IntRange(0, n-1).Draw(t, "j")
			k := rapid.SampledFrom(keys).Draw(t, "key")
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0, 1: // a success happened now, or since it was counted last
				if rapid.Bool().Draw(t, "succeeded") {
					y.success[k][i] = y.now
					y.now += time.Duration(rapid.IntRange(0, 300).Draw(t, "later")) * ms
					y.count(i, k, [totalKinds]uint64{uint64(rapid.IntRange(1, 5).Draw(t, "n")), 1})
				} else {
					y.count(i, k, [totalKinds]uint64{0, uint64(rapid.IntRange(0, 2).Draw(t, "failed")), 1})
				}
			case 2:
				if i != j {
					y.under = append(y.under, y.send(i, j))
				}
			case 3, 4:
				if len(y.under) > 0 {
					p := rapid.SampledFrom(y.under).Draw(t, "packet") // and again, perhaps
					before, had := y.nodes[p.to].OthersSucceeded(y.clock(p.to), k)
					y.deliver(p)
					if ago, ok := y.nodes[p.to].OthersSucceeded(y.clock(p.to), k); ok && (!had || ago < before) && ago >= successFresh {
						t.Fatalf("news of %v ago", ago)
					}
				}
			}
			check()
		}
		y.now += sec
		for i := range n { // what was held back is told by the next call
			for _, k := range keys {
				y.count(i, k, [totalKinds]uint64{})
			}
		}
		for i := range n {
			for j := range n {
				if i != j {
					y.deliver(y.send(i, j))
				}
			}
		}
		check()
		for i, node := range y.nodes {
			for _, one := range node.All(nil) {
				if got := [totalKinds]uint64{one.Handled, one.Failed, one.DeadLettered}; got != *y.sum[one.Key] {
					t.Fatalf("%d: %s is %v, want %v", i, one.Key, got, *y.sum[one.Key])
				}
			}
		}
	})
}

// tell has b hear what a has to say, after a while on the way.
func tell(t *testing.T, now time.Duration, a, b *Totals, way, echo time.Duration) {
	t.Helper()
	p, _ := a.Delta(now, nil, b.self, 0, 1<<20)
	c := crdt.Contact{From: a.self, Now: now + way, Sent: now, Echo: echo}
	if err := b.Merge(c, p); err != nil {
		t.Fatal(err)
	}
}

// A success is news only while it is fresh: by when it was counted, and by how long the
// packet can have been on its way.
func TestTotalsFreshness(t *testing.T) {
	for name, c := range map[string]struct {
		waits, way, echo time.Duration // echo: the packet's, before it was sent; -1 for none
		ago              time.Duration // -1 for no news
	}{
		"at once":                      {0, 0, 0, 250 * ms},
		"on its way for a second":      {0, sec, 0, 1250 * ms},
		"sent again after four":        {4 * sec, 0, 0, 4250 * ms},
		"sent again after five":        {5 * sec, 0, 0, -1},
		"delayed for five":             {0, 5 * sec, 0, -1},
		"an echo from long before":     {0, 0, 5 * sec, -1},
		"an echo from a second before": {0, 0, sec, 1250 * ms},
		"no echo":                      {0, 0, -1, -1},
	} {
		t.Run(name, func(t *testing.T) {
			const now = 1000 * sec
			a, b := newTotals(t, "a", 1), newTotals(t, "b", 1)
			for i, n := range []uint64{0, 3} {
				if err := a.Count(now+time.Duration(i)*250*ms-250*ms, "orders", n, 0, 0); err != nil {
					t.Fatal(err)
				}
			}
			echo := now + c.waits - c.echo
			if c.echo < 0 {
				echo = 0
			}
			tell(t, now+c.waits, a, b, c.way, echo)
			ago, ok := b.OthersSucceeded(now+c.waits+c.way, "orders")
			if ok != (c.ago >= 0) || ok && ago != c.ago {
				t.Errorf("%v, %v; want %v", ago, ok, c.ago)
			}
			if got := b.All(nil); len(got) != 1 || got[0].Handled != 3 {
				t.Errorf("%+v", got)
			}
			tell(t, now+c.waits+c.way, a, b, 0, now+c.waits+c.way) // the same again is no news
			if again, _ := b.OthersSucceeded(now+c.waits+c.way, "orders"); again != ago {
				t.Errorf("repeated, it became %v ago", again)
			}
		})
	}
}

// A packet that echoes nothing may be of any age, also at a process that has only begun.
func TestTotalsWithoutEcho(t *testing.T) {
	a, b := newTotals(t, "a", 1), newTotals(t, "b", 1)
	for i := range uint64(2) {
		if err := a.Count(time.Duration(i)*sec, "orders", i, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	tell(t, sec, a, b, 0, 0)
	if ago, ok := b.OthersSucceeded(sec, "orders"); ok {
		t.Errorf("%v", ago)
	}
}

// What a process counts at first, or after it has not looked for long, may be old.
func TestTotalsOfAProcessThatSlept(t *testing.T) {
	const now = 1000 * sec
	a, b := newTotals(t, "a", 1), newTotals(t, "b", 1)
	count := func(at time.Duration, n uint64) {
		if err := a.Count(at, "orders", n, 0, 0); err != nil {
			t.Fatal(err)
		}
		tell(t, at, a, b, 0, at)
	}
	count(now, 5)
	if ago, ok := b.OthersSucceeded(now, "orders"); ok {
		t.Errorf("at first: %v", ago)
	}
	count(now+6*sec, 5) // it was stopped, or its guard did not look
	if ago, ok := b.OthersSucceeded(now+6*sec, "orders"); ok {
		t.Errorf("after a pause: %v", ago)
	}
	count(now+6*sec+250*ms, 1)
	if ago, ok := b.OthersSucceeded(now+6*sec+250*ms, "orders"); !ok || ago != 250*ms {
		t.Errorf("then: %v, %v", ago, ok)
	}
}

// A row is told four times a second at most, and only if it has changed.
func TestTotalsAreQuiet(t *testing.T) {
	const now = 1000 * sec
	a := newTotals(t, "a", 1)
	for i := range 1000 {
		if err := a.Count(now+time.Duration(i)*10*ms, "orders", 1, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	if n := a.Counted(); n < 36 || n > 42 {
		t.Errorf("told %d times in 10s", n)
	}
	_ = a.Count(now+20*sec, "orders", 0, 0, 0)
	mark := a.Mark(crdt.Replica{})
	for i := range 1000 {
		_ = a.Count(now+21*sec+time.Duration(i)*10*ms, "orders", 0, 0, 0)
	}
	if a.Counted() != mark {
		t.Error("told though nothing has changed")
	}
	if b, upto := a.Delta(now, nil, crdt.Replica{}, mark, 1200); len(b) != 0 || upto != mark {
		t.Errorf("%d bytes of no news, complete up to %d of %d", len(b), upto, mark)
	}
}

// Each incarnation has a row of its own; the rows of incarnations that are over are folded, and the
// sum never falls.
func TestTotalsOfManyIncarnations(t *testing.T) {
	const now = 1000 * sec
	b := newTotals(t, "b", 1)
	want := uint64(0)
	for incarnation := range uint64(1000) {
		a := newTotals(t, "a", incarnation+1)
		for i, n := range []uint64{0, incarnation + 1} {
			if err := a.Count(now+time.Duration(i)*sec, "orders", n, 1, 0); err != nil {
				t.Fatal(err)
			}
		}
		if incarnation > 0 {
			b.Gone(now, crdt.Replica{Name: "a", Incarnation: incarnation})
			b.Gone(now, crdt.Replica{Name: "a", Incarnation: incarnation})
		}
		tell(t, now+sec, a, b, 0, now)
		want += incarnation + 1
		if got := b.All(nil)[0]; got.Handled != want || got.Failed != 2*(incarnation+1) || got.Processes > maxDepartedRows+1 {
			t.Fatalf("after %d incarnations: %+v, want %d handled", incarnation+1, got, want)
		}
	}
	if b.rows != maxDepartedRows+1 || len(b.departed) != maxDepartedRows {
		t.Errorf("%d rows, %d departed", b.rows, len(b.departed))
	}
}

func TestTotalsBounds(t *testing.T) {
	const now = 1000 * sec
	a, b := newTotals(t, "a", 1), newTotals(t, "b", 1)
	for _, key := range []string{"", strings.Repeat("k", maxScope+1)} {
		if err := a.Count(now, key, 1, 0, 0); !errors.Is(err, ErrScope) {
			t.Error(err)
		}
	}
	for i := range maxTotals {
		if err := a.Count(now, fmt.Sprint(i), 1, 0, 0); err != nil {
			t.Fatal(err)
		}
		if err := b.Count(now, fmt.Sprint("b", i), 1, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Count(now, "more", 1, 0, 0); !errors.Is(err, ErrTooManyScopes) {
		t.Error(err)
	}
	for since := uint64(0); since < a.Counted(); {
		p, upto := a.Delta(now, nil, b.self, since, 512)
		if len(p) > 512 || upto == since {
			t.Fatalf("%d bytes, complete up to %d", len(p), upto)
		}
		if err := b.Merge(crdt.Contact{From: a.self, Now: now, Sent: now, Echo: now}, p); err != nil {
			t.Fatal(err)
		}
		since = upto
	}
	if b.Refused() != 0 || len(b.keys) != 2*maxTotals || b.rows != maxTotals {
		t.Errorf("%d refused, %d keys, %d rows", b.Refused(), len(b.keys), b.rows)
	}
	p := appendTotal([]byte{wireVersion}, &totalRecord{key: "more", counts: [totalKinds]uint64{1}})
	if err := b.Merge(crdt.Contact{From: a.self, Now: now, Sent: now, Echo: now}, p); err != nil || b.Refused() != 1 {
		t.Errorf("one more key: %v, %d refused", err, b.Refused())
	}
	full, _ := a.Delta(now, nil, b.self, 0, 1<<20)
	for i := range 20 {
		c := crdt.Contact{From: crdt.Replica{Name: fmt.Sprint("x", i), Incarnation: 1}, Now: now, Sent: now, Echo: now}
		if err := b.Merge(c, full); err != nil {
			t.Fatal(err)
		}
	}
	if b.rows != maxTotalRows || b.Refused() == 1 {
		t.Errorf("%d rows, %d refused", b.rows, b.Refused())
	}
	if err := b.Merge(crdt.Contact{From: crdt.Replica{Name: "b", Incarnation: 7}}, nil); !errors.Is(err, ErrSelf) {
		t.Error(err)
	}
	if _, err := NewTotals(crdt.Replica{}); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
}

// Sums and rows that are absurd are cut, and never wrap.
func TestTotalsOverflow(t *testing.T) {
	const now = 1000 * sec
	b := newTotals(t, "b", 1)
	most := [totalKinds]uint64{math.MaxUint64, math.MaxUint64, 1}
	for i := range uint64(3) {
		c := crdt.Contact{From: crdt.Replica{Name: "a", Incarnation: i + 1}, Now: now, Sent: now, Echo: now}
		if err := b.Merge(c, appendTotal([]byte{wireVersion}, &totalRecord{key: "k", counts: most})); err != nil {
			t.Fatal(err)
		}
		b.Gone(now, c.From)
	}
	if got := b.All(nil)[0]; got.Handled != math.MaxUint64 || got.DeadLettered != 3 {
		t.Errorf("%+v", got)
	}
}

func FuzzTotals(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newTotals(t, "x", 1)
		c := crdt.Contact{From: crdt.Replica{Name: "y", Incarnation: 1}, Now: sec, Sent: sec, Echo: sec}
		if err := s.Merge(c, b); err != nil {
			if !errors.Is(err, ErrMalformed) || len(s.keys) != 0 {
				t.Fatalf("refused with %v, and %d keys", err, len(s.keys))
			}
			return
		}
		once := fmt.Sprint(s.All(nil))
		if err := s.Merge(c, b); err != nil || fmt.Sprint(s.All(nil)) != once {
			t.Fatalf("taken again: %v\n%s\n%v", err, once, s.All(nil))
		}
		all, err := readTotals(b)
		if err != nil {
			t.Fatal(err)
		}
		if len(all) == 0 {
			return
		}
		again := []byte{wireVersion}
		for i := range all {
			again = appendTotal(again, &all[i])
		}
		other, err := readTotals(again)
		if err != nil || fmt.Sprint(other) != fmt.Sprint(all) {
			t.Fatalf("%v became %v: %v", all, other, err)
		}
	})
}

// A process that goes on under a higher incarnation has counted what it had, here and at
// its peers, and goes on from there.
func TestTotalsRejoin(t *testing.T) {
	const key = "g/t"
	a, b := newTotals(t, "a", 1), newTotals(t, "b", 1)
	tell := func(from, to *Totals, now time.Duration) {
		t.Helper()
		d, _ := from.Delta(now, nil, to.self, 0, 1<<20)
		if err := to.Merge(crdt.Contact{From: from.self, Now: now, Sent: now, Echo: now}, d); err != nil {
			t.Fatal(err)
		}
	}
	count := func(n *Totals, now time.Duration, handled uint64) {
		t.Helper()
		if err := n.Count(now, key, handled, 0, 0); err != nil {
			t.Fatal(err)
		}
	}
	count(a, time.Second, 5)
	count(b, time.Second, 2)
	tell(a, b, time.Second)
	tell(b, a, time.Second)
	was := a.self
	a.Rejoin(2*time.Second, crdt.Replica{Name: "a", Incarnation: 9})
	b.Gone(2*time.Second, was)
	tell(a, b, 2*time.Second)
	count(a, 3*time.Second, 10)
	tell(a, b, 3*time.Second)
	for _, n := range []*Totals{a, b} {
		if all := n.All(nil); len(all) != 1 || all[0].Handled != 17 {
			t.Errorf("%s: %+v", n.self.Name, all)
		}
	}
}
