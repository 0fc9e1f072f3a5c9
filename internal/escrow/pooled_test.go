// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A pond is pooled limits on a simulated network: packets every 2 ms while there
// is news and every 50 ms at least, one way 0.5 ms and an exponential 0.5 ms more.
type pond struct {
	t        testing.TB
	cfg      Config
	rand     *rand.Rand
	now      time.Duration
	nodes    []*pooled
	ppm      []float64
	queue    pondEvents
	seq      int
	acked    map[[2]int]uint64
	sent     map[[2]int]time.Duration
	cut      func(from, to int) bool
	loss     float64
	admitted []int
	bound    bucket
	over     float64
}

type pondEvent struct {
	at  time.Duration
	seq int
	do  func()
}

type pondEvents []pondEvent

func (e *pondEvents) Len() int { return len(*e) }
func (e *pondEvents) Less(i, j int) bool {
	x, y := &(*e)[i], &(*e)[j]
	return x.at < y.at || x.at == y.at && x.seq < y.seq
}
func (e *pondEvents) Swap(i, j int) { (*e)[i], (*e)[j] = (*e)[j], (*e)[i] }
func (e *pondEvents) Push(x any)    { *e = append(*e, x.(pondEvent)) }
func (e *pondEvents) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func newPond(t testing.TB, seed uint64, n int, limit Limit) *pond {
	w := &pond{
		t: t, cfg: Config{Limit: limit}, rand: rand.New(rand.NewPCG(seed, 1)), now: time.Second,
		acked: map[[2]int]uint64{}, sent: map[[2]int]time.Duration{}, admitted: make([]int, n), ppm: make([]float64, n),
		cut:   func(int, int) bool { return false },
		bound: bucket{rate: limit.Rate, burst: float64(limit.Burst), level: float64(limit.Burst), at: time.Second},
	}
	for i := range n {
		p, err := testPool(crdt.Replica{Name: fmt.Sprint("n", i), Incarnation: 1}, w.cfg, func() time.Duration { return w.clock(i) })
		if err != nil {
			t.Fatal(err)
		}
		w.nodes = append(w.nodes, p)
	}
	for i := range n {
		for k := range n {
			if i != k {
				w.after(time.Duration(w.rand.Int64N(int64(2*ms))), func() { w.flush(i, k) })
			}
		}
	}
	return w
}

func (w *pond) clock(i int) time.Duration { return time.Duration(float64(w.now) * (1 + w.ppm[i]/1e6)) }

func (w *pond) after(d time.Duration, do func()) {
	w.seq++
	heap.Push(&w.queue, pondEvent{w.now + d, w.seq, do})
}

func (w *pond) delay() time.Duration {
	return time.Duration((0.5 + w.rand.ExpFloat64()*0.5) * float64(ms))
}

func (w *pond) flush(i, k int) {
	w.after(2*ms, func() { w.flush(i, k) })
	pair := [2]int{i, k}
	to := w.nodes[k].self
	if w.nodes[i].Mark(to) <= w.acked[pair] && w.now-w.sent[pair] < 50*ms {
		return
	}
	w.sent[pair] = w.now
	b, upto := w.nodes[i].Delta(w.clock(i), nil, to, w.acked[pair], 1200)
	if w.rand.Float64() < w.loss {
		return
	}
	at := w.now
	w.after(w.delay(), func() {
		if w.cut(i, k) {
			return
		}
		if err := w.nodes[k].Merge(crdt.Contact{From: w.nodes[i].self, Now: w.clock(k), Sent: at}, b); err != nil {
			w.t.Fatal(err)
		}
		w.after(w.delay(), func() {
			if !w.cut(k, i) {
				w.acked[pair] = max(w.acked[pair], upto)
			}
		})
	})
}

// load asks at a node, Poisson at a rate.
func (w *pond) load(i int, rate float64, till time.Duration) {
	w.after(time.Duration(w.rand.ExpFloat64()/rate*1e9), func() {
		if w.now >= till {
			return
		}
		w.ask(i)
		w.load(i, rate, till)
	})
}

func (w *pond) ask(i int) {
	if w.nodes[i].Key("k").Allow() {
		w.admitted[i]++
		w.bound.refill(w.now)
		w.bound.level--
		w.over = max(w.over, -w.bound.level)
		w.bound.level = max(w.bound.level, -1e12)
	}
}

func (w *pond) run(d time.Duration) {
	end := w.now + d
	for len(w.queue) > 0 && w.queue[0].at <= end {
		e := heap.Pop(&w.queue).(pondEvent)
		w.now = e.at
		e.do()
	}
	w.now = end
}

func (w *pond) sum() (n int) {
	for _, a := range w.admitted {
		n += a
	}
	return n
}

// testPool is the pooled limits of a process, with the default clock if none is given.
func testPool(self crdt.Replica, cfg Config, clock ...func() time.Duration) (*pooled, error) {
	cfg.Strategy = Pooled
	s, err := New(self, cfg, WithClock(append(clock, monotonic())[0]))
	if err != nil {
		return nil, err
	}
	return s.pool, nil
}

// Allow and Wait are those of one admission, as a [Handle] has them.
func (l *pooledHandle) Allow() bool                    { return l.AllowN(1) }
func (l *pooledHandle) Wait(ctx context.Context) error { return l.WaitN(ctx, 1) }

const pondRate, pondBurst = 10_000, 500

// The rate is reached, evenly or not, at 35 % loss too, and what is over it stays
// below the formula of the package's words.
func TestPooledAccuracy(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	for _, c := range []struct {
		name  string
		loads []float64
		loss  float64
	}{
		{"balanced", []float64{2. / 3, 2. / 3, 2. / 3}, 0},
		{"skew", []float64{1.08, 0.108, 0.012}, 0},
		{"one hot", []float64{1.2, 0, 0}, 0},
		{"balanced, 35 % loss", []float64{0.5, 0.5, 0.5}, 0.35},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newPond(t, 1, 3, Limit{Rate: pondRate, Burst: pondBurst})
			w.loss = c.loss
			w.run(sec)
			for i, l := range c.loads {
				if l > 0 {
					w.load(i, l*pondRate, 20*sec)
				}
			}
			w.run(sec)
			before := w.sum()
			w.run(8 * sec)
			rate := float64(w.sum()-before) / 8 / pondRate
			d := 3 * ms // floor and delay
			if c.loss > 0 {
				d = 9 * ms
			}
			limit := 2*pondRate*d.Seconds() + 2*pondBurst
			t.Logf("%.3f %% of the rate, over %.0f of %.0f", 100*rate, w.over, limit)
			if rate < 0.99 || rate > 1.01 || w.over > limit {
				t.Errorf("%.3f %% of the rate, over %.0f, want about 100 and at most %.0f", 100*rate, w.over, limit)
			}
		})
	}
}

const sec = time.Second

// Who asks for as much gets as much, also with clocks that run fast or slow, and
// who asks for a hundredth is not kept from it.
func TestPooledFairness(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	w := newPond(t, 2, 3, Limit{Rate: pondRate, Burst: pondBurst})
	w.ppm = []float64{200, 0, -200}
	for i := range 3 {
		w.load(i, pondRate, 12*sec)
	}
	w.run(10 * sec)
	for i, n := range w.admitted {
		if part := float64(n) / float64(w.sum()); part < 0.30 || part > 0.37 {
			t.Errorf("%d has %.3f of it: %v", i, part, w.admitted)
		}
	}
	w = newPond(t, 3, 3, Limit{Rate: pondRate, Burst: pondBurst})
	w.load(0, 2*pondRate, 12*sec)
	w.load(1, 2*pondRate, 12*sec)
	w.load(2, 0.01*pondRate, 12*sec)
	w.run(10 * sec)
	if got := float64(w.admitted[2]) / 10 / (0.01 * pondRate); got < 0.9 {
		t.Errorf("who asks for a hundredth gets %.2f of it", got)
	}
}

// In a split the sides share the rate after Silent, and go beyond it by what the
// package's words say; nobody starves afterwards.
func TestPooledSplit(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	w := newPond(t, 4, 3, Limit{Rate: pondRate, Burst: pondBurst})
	for i := range 3 {
		w.load(i, pondRate, 60*sec)
	}
	w.run(2 * sec)
	w.over, w.bound.level = 0, 0
	w.cut = func(i, k int) bool { return (i == 0) != (k == 0) }
	before := w.sum()
	w.run(20 * sec)
	rate := float64(w.sum()-before) / 20 / pondRate
	limit := 1*(pondBurst+pondRate*0.15) + 2*pondRate*0.003
	if rate < 0.98 || rate > 1.02 || w.over > limit || w.over < 0.3*limit {
		t.Errorf("%.3f of the rate, over %.0f, want 1 and %.0f to %.0f", rate, w.over, 0.3*limit, limit)
	}
	t.Logf("split: %.3f of the rate, over %.0f of %.0f", rate, w.over, limit)
	w.cut = func(int, int) bool { return false }
	w.run(sec)
	was := append([]int(nil), w.admitted...)
	w.run(2 * sec)
	for i := range was {
		if n := w.admitted[i] - was[i]; n < 2*pondRate/4 {
			t.Errorf("after the split %d gets %d in 2 s", i, n)
		}
	}
}

// All at once after a rest: the whole burst everywhere, as the formula says, and
// nearly so.
func TestPooledRush(t *testing.T) {
	w := newPond(t, 5, 5, Limit{Rate: pondRate, Burst: pondBurst})
	w.run(sec)
	for i := range 5 {
		for range 2 * pondBurst {
			w.ask(i)
		}
	}
	limit := 4. * pondBurst
	if w.over > limit || w.over < 0.9*limit {
		t.Errorf("over %.0f of %.0f", w.over, limit)
	}
}

// Whatever becomes of packets, once all has come every node knows what the others
// have used, and debt is at most a burst.
func TestPooledKnowsInTheEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := sec
		n := rapid.IntRange(2, 4).Draw(t, "nodes")
		var nodes []*pooled
		for i := range n {
			p, err := testPool(crdt.Replica{Name: fmt.Sprint(i), Incarnation: 1}, Config{Limit: Limit{Rate: 100, Burst: 10}, MaxKeys: 2},
				func() time.Duration { return now })
			if err != nil {
				t.Fatal(err)
			}
			nodes = append(nodes, p)
		}
		type packet struct {
			i, k int
			b    []byte
		}
		var air []packet
		node := rapid.IntRange(0, n-1)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += time.Duration(rapid.IntRange(0, 100).Draw(t, "ms")) * ms
			i, k := node.Draw(t, "i"), node.Draw(t, "k")
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				nodes[i].Key(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "key")).AllowN(rapid.IntRange(0, 11).Draw(t, "n"))
			case 1:
				b, _ := nodes[i].Delta(now, nil, nodes[k].self, rapid.Uint64Range(0, nodes[i].Mark(nodes[k].self)).Draw(t, "since"), rapid.SampledFrom([]int{3, 30, 1400}).Draw(t, "room"))
				if i != k && len(b) > 0 {
					air = append(air, packet{i, k, b})
				}
			case 2:
				if len(air) > 0 {
					p := rapid.SampledFrom(air).Draw(t, "packet")
					if err := nodes[p.k].Merge(crdt.Contact{From: nodes[p.i].self, Now: now, Sent: now}, p.b); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, r := range nodes[i].rows {
				if r.level > float64(r.burst) || r.level < -float64(r.burst) {
					t.Fatalf("level %v of %d", r.level, r.burst)
				}
			}
			if len(nodes[i].rows) > 2 {
				t.Fatalf("%d keys", len(nodes[i].rows))
			}
		}
		for i := range nodes {
			for k := range nodes {
				if i == k {
					continue
				}
				b, upto := nodes[i].Delta(now, nil, nodes[k].self, 0, 1400)
				if upto != nodes[i].Mark(nodes[k].self) {
					t.Fatal("it did not fit")
				}
				if err := nodes[k].Merge(crdt.Contact{From: nodes[i].self, Now: now, Sent: now}, b); err != nil {
					t.Fatal(err)
				}
				for key, r := range nodes[i].rows {
					if r.change.Mark == 0 || nodes[k].rows[key] == nil {
						continue
					}
					if u := nodes[k].peers[nodes[i].self.Name].used[key]; u == nil || u.used != r.used || u.series != r.series {
						t.Fatalf("%s: %d of series %d, known as %+v", key, r.used, r.series, u)
					}
				}
			}
		}
	})
}

// A key that is forgotten and comes back begins a series of its own, and a handle
// of before goes on with it.
func TestPooledForgets(t *testing.T) {
	now := sec
	p, err := testPool(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 10, Burst: 10}, MaxKeys: 1}, func() time.Duration { return now })
	if err != nil {
		t.Fatal(err)
	}
	a, b := p.Key("a"), p.Key("b")
	if !a.AllowN(10) || b.Allow() || p.Key(strings.Repeat("x", MaxKey+1)).Allow() || p.Key("").Allow() {
		t.Fatal("one key too many, or too long, was admitted")
	}
	if err := b.Wait(t.Context()); !errors.Is(err, ErrTooManyKeys) {
		t.Errorf("%v", err)
	}
	now += pooledIdle + sec + 1
	if !b.Allow() {
		t.Fatal("an idle key makes no room")
	}
	series := p.rows["b"].series
	now += pooledIdle + sec + 1
	if d, _ := p.Delta(now, nil, crdt.Replica{Name: "z"}, 0, 1400); len(d) <= pooledHeader {
		t.Error("nothing to tell of b")
	}
	if !a.AllowN(10) || a.Allow() || p.rows["a"].series <= series {
		t.Error("a handle of a key that was forgotten does not go on")
	}
	if b.Allow() {
		t.Error("two keys where one may be")
	}
	d, _ := p.Delta(now, nil, crdt.Replica{Name: "z"}, 0, 1400)
	if strings.Contains(string(d), "b") {
		t.Error("a key that was forgotten is told of")
	}
}

// A packet counts once, however often and late it comes; a series that begins anew
// counts from its beginning; and what a newcomer hears first, which may have been
// used long ago, empties the bucket and makes no debt.
func TestPooledCountsOnce(t *testing.T) {
	now := sec
	clock := func() time.Duration { return now }
	cfg := Config{Limit: Limit{Rate: 10, Burst: 100}}
	a, _ := testPool(crdt.Replica{Name: "a", Incarnation: 1}, cfg, clock)
	b, _ := testPool(crdt.Replica{Name: "b", Incarnation: 1}, cfg, clock)
	ka, kb := a.Key("k"), b.Key("k")
	packet := func() []byte {
		d, _ := a.Delta(now, nil, b.self, 0, 1400)
		return d
	}
	hand := func(d []byte) {
		if err := b.Merge(crdt.Contact{From: a.self, Now: now}, d); err != nil {
			t.Fatal(err)
		}
	}
	level := func(want float64) {
		t.Helper()
		b.rows["k"].at = now // nothing is minted
		if got := b.rows["k"].level / micro; got != want {
			t.Fatalf("level %v, want %v", got, want)
		}
	}
	kb.AllowN(0)
	ka.AllowN(1)
	first := packet()
	hand(first)
	level(99)
	ka.AllowN(20)
	second := packet()
	hand(second)
	level(79)
	hand(first)
	hand(second)
	hand(first)
	level(79)
	now += pooledIdle + 10*sec
	a.lockAt(now)
	a.forgetLocked()
	a.mu.Unlock()
	ka.AllowN(5)
	b.rows["k"].level, b.rows["k"].at = 79*micro, now
	b.peers["a"].heard = now
	hand(packet())
	level(74)
	hand(second) // of the series before
	level(74)

	for range 50 {
		ka.AllowN(10)
		now += sec
	}
	late, _ := testPool(crdt.Replica{Name: "c", Incarnation: 1}, cfg, clock)
	late.Key("k").AllowN(40)
	if err := late.Merge(crdt.Contact{From: a.self, Now: now}, packet()); err != nil {
		t.Fatal(err)
	}
	if got := late.rows["k"].level; got != 0 {
		t.Errorf("a newcomer's level is %v after what it heard first", got/micro)
	}
	now += sec / 2
	if !late.Key("k").AllowN(5) || late.Key("k").Allow() {
		t.Error("half a second later it has other than five")
	}
	now -= 10 * sec // a stale now mints nothing, nor does its return
	late.Key("k").Allow()
	now += 10 * sec
	if late.Key("k").Allow() {
		t.Error("a clock that went back and forth minted")
	}
}

func TestPooledShare(t *testing.T) {
	for _, c := range []struct {
		rate   float64
		others []float64
		want   float64
	}{
		{90, nil, 90},
		{90, []float64{100, 100}, 30},
		{90, []float64{10, 100}, 40},
		{90, []float64{100, 10, 20}, 30},
		{90, []float64{45, 44}, 30},
		{90, []float64{31, 29}, 30.5},
		{90, []float64{0, 0}, 90},
	} {
		if got := share(c.rate, c.others); got != c.want {
			t.Errorf("%v beside %v: %v, want %v", c.rate, c.others, got, c.want)
		}
	}
}

func TestPooledWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := testPool(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 10, Burst: 2}})
		if err != nil {
			t.Fatal(err)
		}
		l := p.Key("k")
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				if err := l.Wait(t.Context()); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i)
			})
			synctest.Wait()
		}
		if l.Allow() || l.Admit() == 0 {
			t.Error("who came later was first")
		}
		wg.Wait()
		if fmt.Sprint(order) != "[0 1 2 3 4 5]" {
			t.Errorf("served in the order %v", order)
		}
		if d := time.Since(start); d < 400*ms || d > 410*ms {
			t.Errorf("six of two at once and ten a second after %v", d)
		}
		time.Sleep(100 * ms)
		wg.Go(func() {
			if err := l.WaitN(t.Context(), 2); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		if l.Allow() {
			t.Error("one of the two that are waited for was given away")
		}
		wg.Wait()
		if err := l.WaitN(t.Context(), 3); !errors.Is(err, ErrBurst) {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
		defer cancel()
		if err := l.WaitN(ctx, 2); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		wg.Go(func() {
			if err := l.WaitN(context.Background(), 2); !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
		synctest.Wait()
		p.Close()
		p.Close()
		wg.Wait()
		if err := l.Wait(t.Context()); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if l.Allow() || l.Admit() != sec || p.rows["k"].waiting != 0 {
			t.Error("closed, and not denied; or somebody still counts as waiting")
		}
	})
}

func TestPooledRefuses(t *testing.T) {
	_, err := New(crdt.Replica{}, Config{
		Limit: Limit{1, 1}, Strategy: Pooled, MaxKeys: -1, UntilJoined: Open, OnSilence: Silence{Policy: TakeOver},
	})
	for _, want := range []string{"MaxKeys: -1", `OnSilence.Policy: "takeover" is not in {hold}`, `UntilJoined: "open" is not in {deny}`} {
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	_, err = New(crdt.Replica{Name: "a"}, Config{Limit: Limit{1, 1}, Strategy: "pool"})
	if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `Strategy: "pool" is not in {escrow, pooled}`) {
		t.Error(err)
	}
	cfg := Config{Limit: Limit{Rate: 10, Burst: 2}}
	a, _ := testPool(crdt.Replica{Name: "a", Incarnation: 2}, cfg)
	b, _ := testPool(crdt.Replica{Name: "b", Incarnation: 1}, cfg)
	told := 0
	a.OnChange(func() { told++ })
	a.Key("k").Allow()
	good, _ := a.Delta(0, nil, b.self, 0, 1400)
	other, _ := testPool(crdt.Replica{Name: "c", Incarnation: 1}, Config{Limit: Limit{Rate: 11, Burst: 2}})
	strict, _ := New(crdt.Replica{Name: "d", Incarnation: 1}, Config{Limit: cfg.Limit, Roster: Roster{Members: []Member{{Name: "d"}, {Name: "a"}}}})
	foreign, _ := strict.Delta(0, nil, a.self, 0, 1400)
	waiting, _ := New(crdt.Replica{Name: "d", Incarnation: 1}, Config{Fleet: "f", Provisional: true, Limit: cfg.Limit, Roster: rosterOf("d a")})
	numbers, _ := waiting.Delta(0, nil, a.self, 0, 1400)
	for _, c := range []struct {
		to   *pooled
		from crdt.Replica
		b    []byte
		want error
	}{
		{other, a.self, good, errMismatch},
		{b, a.self, foreign, errMismatch},
		{b, a.self, numbers, ErrSettings},
		{b, a.self, nil, errMalformed},
		{b, a.self, good[:4], errMalformed},
		{b, a.self, good[:len(good)-1], errMalformed},
		{b, b.self, good, errMalformed},
		{b, a.self, good, nil},
		{b, crdt.Replica{Name: "a", Incarnation: 1}, good, errStale},
	} {
		if err := c.to.Merge(crdt.Contact{From: c.from, Now: sec}, c.b); !errors.Is(err, c.want) {
			t.Errorf("% x from %v: %v, want %v", c.b, c.from, err, c.want)
		}
	}
	if told != 1 {
		t.Errorf("told %d times of one change", told)
	}
	strict.Close()
	waiting.Close()
}

func FuzzPooled(f *testing.F) {
	cfg := Config{Limit: Limit{Rate: 10, Burst: 2}, MaxKeys: 3}
	a, _ := testPool(crdt.Replica{Name: "a", Incarnation: 1}, cfg)
	a.Key("k").AllowN(2)
	a.Key("k").Allow()
	a.Key("other").Allow()
	b, _ := a.Delta(0, nil, crdt.Replica{Name: "b"}, 0, 1400)
	f.Add(b)
	f.Add(b[:5])
	f.Add(b[:len(b)-2])
	f.Fuzz(func(t *testing.T, b []byte) {
		p, _ := testPool(crdt.Replica{Name: "b", Incarnation: 1}, cfg)
		err := p.Merge(crdt.Contact{From: a.self, Now: sec, Sent: 1}, b)
		if err != nil && len(p.rows)+len(p.peers) > 0 {
			t.Fatalf("refused with %v, and took in %d keys", err, len(p.rows))
		}
		if len(p.rows) > 3 {
			t.Fatalf("%d keys", len(p.rows))
		}
		for _, r := range p.rows {
			if r.level < -float64(r.burst) || r.level > float64(r.burst) {
				t.Fatalf("level %v", r.level)
			}
		}
	})
}

func BenchmarkPooledAllow(b *testing.B) {
	p, err := testPool(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 1e9, Burst: 1e9}})
	if err != nil {
		b.Fatal(err)
	}
	l := p.Key("k")
	b.ReportAllocs()
	for b.Loop() {
		l.Allow()
	}
}

// The strategy is chosen by name, and everything that a limit's handle can do works
// with it: the burst anywhere, the peers' use, refunds, configurations, fences, a new incarnation.
// A silent process is assumed to use its part until a configuration takes its name out.
func TestPooledEvicts(t *testing.T) {
	t.Run("silent", func(t *testing.T) { pooledEvicts(t, false) })
	t.Run("heard", func(t *testing.T) { pooledEvicts(t, true) })
}

// heard says that c writes until after it is out.
func pooledEvicts(t *testing.T, heard bool) {
	t.Helper()
	now := sec
	cfg := Config{
		Limit: Limit{Rate: 300, Burst: 30}, Strategy: Pooled, Fleet: "f",
		Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}, {Name: "c"}}},
	}
	s, err := New(crdt.Replica{Name: "a", Incarnation: 1}, cfg, WithClock(func() time.Duration { return now }))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	others := make(map[string]*pooled)
	for _, name := range []string{"b", "c"} {
		others[name] = newPooled(crdt.Replica{Name: name, Incarnation: 1}, cfg, func() time.Duration { return now })
	}
	hear := func(name string) {
		t.Helper()
		d, _ := others[name].Delta(now, nil, s.pool.self, 0, 1400)
		if err := s.Merge(crdt.Contact{From: others[name].self, Now: now}, d); err != nil {
			t.Fatal(err)
		}
	}
	k := s.Key("k")
	admitted := func() (n int) { // in ten seconds
		for end := now + 10*sec; now < end; now += 10 * ms {
			hear("b")
			for k.Allow() {
				n++
			}
		}
		return n
	}
	hear("c")
	admitted()
	if n := admitted(); n < 1950 || n > 2050 {
		t.Errorf("%d of 2000 while one of three is silent", n)
	}
	if heard {
		hear("c")
	}
	c := cfg.Configuration()
	c.Number, c.Roster = 2, Roster{Number: 2, Members: []Member{{Name: "a"}, {Name: "b"}}}
	if err := s.Adopt(now, c); err != nil {
		t.Fatal(err)
	}
	if heard {
		hear("c")
		admitted()
	}
	if n := admitted(); n < 2950 || n > 3050 {
		t.Errorf("%d of 3000 when it is out", n)
	}
}

// A learner that fell silent is assumed to use its part for a while, for it may be behind a
// cut. Nobody can evict it, so that ends by itself. A member's part waits for its name.
func TestPooledForgetsALearner(t *testing.T) {
	now := sec
	cfg := Config{
		Limit: Limit{Rate: 300, Burst: 30}, Strategy: Pooled, Fleet: "f",
		Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}, {Name: "c"}}, Learners: true},
	}
	clock := func() time.Duration { return now }
	s, err := New(crdt.Replica{Name: "a", Incarnation: 1}, cfg, WithClock(clock))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	others := make(map[string]*pooled)
	hear := func(name string) {
		t.Helper()
		o := others[name]
		if o == nil {
			o = newPooled(crdt.Replica{Name: name, Incarnation: 1}, cfg, clock)
			others[name] = o
		}
		d, _ := o.Delta(now, nil, s.pool.self, 0, 1400)
		if err := s.Merge(crdt.Contact{From: o.self, Now: now}, d); err != nil {
			t.Fatal(err)
		}
	}
	k := s.Key("k")
	admitted := func() (n int) { // in ten seconds
		for end := now + 10*sec; now < end; now += 10 * ms {
			hear("b")
			for k.Allow() {
				n++
			}
		}
		return n
	}
	hear("c")
	hear("x")
	fell := now
	admitted()
	if n := admitted(); n < 1450 || n > 1550 {
		t.Errorf("%d of 1500 while two of four are silent", n)
	}
	now = fell + pooledLearner - 10*sec
	if n := admitted(); n < 1450 || n > 1550 {
		t.Errorf("%d of 1500 until the learner has been silent for %v", n, pooledLearner)
	}
	admitted()
	if n := admitted(); n < 1950 || n > 2050 {
		t.Errorf("%d of 2000 from then on, while the member is silent", n)
	}
}

func TestPooledByName(t *testing.T) {
	now := sec
	clock := WithClock(func() time.Duration { return now })
	cfg := Config{
		Limit: Limit{Rate: 10, Burst: 100}, Strategy: Pooled, Fleet: "f",
		Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}}},
	}
	var sets []*Set
	for _, name := range []string{"a", "b"} {
		s, err := New(crdt.Replica{Name: name, Incarnation: 1}, cfg, clock)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		sets = append(sets, s)
	}
	a, b := sets[0].Key("k"), sets[1].Key("k")
	self := func(s *Set) crdt.Replica { return s.pool.self }
	tell := func(from, to *Set) {
		t.Helper()
		d, _ := from.Delta(now, nil, self(to), 0, 1400)
		if err := to.Merge(crdt.Contact{From: self(from), Now: now}, d); err != nil {
			t.Fatal(err)
		}
	}
	left := func(l *Handle, want int) {
		t.Helper()
		if _, got, _ := l.Level(); got != want {
			t.Fatalf("%d left, want %d", got, want)
		}
	}
	kicked := 0
	sets[0].OnChange(func() { kicked++ })
	if !a.AllowN(99) || !a.Allow() || a.Allow() || a.Admit(0) == 0 || kicked == 0 {
		t.Fatal("a full bucket is to be had at once, and no more")
	}
	left(b, 100)
	if !b.Allow() { // or the bucket that it hears of first may be old
		t.Fatal("denied")
	}
	tell(sets[0], sets[1])
	left(b, 0)
	if b.Allow() {
		t.Error("what another has used is there")
	}

	a.Refund(3)
	left(a, 3)
	if mark := sets[0].Counted(); !a.AllowN(3) || sets[0].Counted() != mark || a.Allow() {
		t.Error("what was given back is there once, and nobody is told again")
	}
	a.Refund(1000)
	left(a, 100)
	now += 100 * sec
	left(a, 100) // the burst, whatever was given back
	if !a.AllowN(100) || a.Allow() {
		t.Error("more than a burst")
	}

	if v, ok := sets[0].View("k"); !ok || v.Cap != 100*micro || v.Sums.Own < 100*micro || v.Sums.Denied == 0 {
		t.Errorf("%+v, %v", v, ok)
	}
	if st := sets[0].Stats(); st.Keys != 1 || st.Cap != 100*micro || st.Share != 1 {
		t.Errorf("%+v", st)
	}
	if all := sets[0].Busiest(5); len(all) != 1 || all[0].Key != "k" {
		t.Errorf("%+v", all)
	}

	// A configuration: a smaller burst at once; a wait for more than that ends; a RESET fills.
	c := cfg.Configuration()
	c.Number, c.Limit, c.Resets = 2, Limit{Rate: 10, Burst: 40}, 1
	if err := sets[0].Adopt(now, c); err != nil {
		t.Fatal(err)
	}
	left(a, 40)
	if err := a.WaitN(t.Context(), 41); !errors.Is(err, ErrBurst) {
		t.Error(err)
	}
	sets[0].Complete(now, 2)
	now += 2 * sec
	if sets[0].Applied() != 2 {
		t.Errorf("applied %d", sets[0].Applied())
	}

	sets[0].Mint(now) // evicted, or out of the fleet
	if _, left, _ := a.Level(); a.Allow() || left != 0 {
		t.Error("it admits behind a fence")
	}
	sets[0].Mint(never)
	if !a.AllowN(40) {
		t.Error("it does not admit after a fence")
	}

	// As a new incarnation it has used nothing: its peer takes nothing twice.
	tell(sets[0], sets[1])
	now += 100 * sec
	tell(sets[0], sets[1])
	left(b, 100)
	sets[0].Rejoin(now, crdt.Replica{Name: "a", Incarnation: 2})
	tell(sets[0], sets[1])
	left(b, 100)
	if !a.Allow() {
		t.Fatal("denied")
	}
	tell(sets[0], sets[1])
	left(b, 99)

	other := cfg
	other.Strategy = Escrow
	s, err := New(crdt.Replica{Name: "b", Incarnation: 1}, other, clock)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	d, _ := s.Delta(now, nil, self(sets[0]), 0, 1400)
	if err := sets[0].Merge(crdt.Contact{From: crdt.Replica{Name: "b", Incarnation: 1}, Now: now}, d); !errors.Is(err, errMismatch) {
		t.Errorf("a process with another strategy: %v", err)
	}
	sets[0].Close()
	if a.Allow() || !errors.Is(a.Wait(t.Context()), ErrClosed) {
		t.Error("closed, and it admits")
	}
}

// What was given back and what is there are one amount: a request may take all of it, and a
// waiter for the whole burst is served.
func TestPooledRefundAndTheRest(t *testing.T) {
	now := sec
	p, err := testPool(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 10, Burst: 100}, MaxKeys: 1}, func() time.Duration { return now })
	if err != nil {
		t.Fatal(err)
	}
	a, b := p.Key("a"), p.Key("b")
	if !a.AllowN(100) {
		t.Fatal("a full bucket is denied")
	}
	a.Refund(3)
	now += 100 * sec
	if _, left, _ := a.Level(); left != 100 {
		t.Errorf("%d left", left)
	}
	if !a.AllowN(100) || a.Allow() {
		t.Error("not all that is left, or more")
	}
	if u := p.rows["a"].used; u != 197*micro {
		t.Errorf("%d used", u/micro)
	}
	a.Refund(1) // and its client does not come back
	now += pooledIdle + 20*sec
	if !b.Allow() {
		t.Error("an idle key with a refund makes no room")
	}
	p.mint(now)
	if wait := b.Admit(); wait < 10*time.Millisecond {
		t.Errorf("asks again after %v while nothing may be admitted", wait)
	}
}
