// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// A forger writes packets as a member would, with whatever in them.
type forger struct {
	self   crdt.Replica
	sent   time.Duration
	series uint64
	out    map[string]int64
}

// forgedEntry is one entry of a packet.
type forgedEntry struct {
	key                    string
	series                 uint64
	out                    int64
	borrowed               uint64
	used, returned, wanted int64
}

func (f *forger) packet(n *Node, epoch uint64, renewed time.Duration, entries ...forgedEntry) []byte {
	b := append([]byte(nil), version)
	b = binary.LittleEndian.AppendUint32(b, n.config)
	b = binary.LittleEndian.AppendUint32(b, uint32(n.self.Incarnation))
	b = binary.AppendUvarint(b, epoch)
	b = binary.AppendUvarint(b, uint64(renewed/time.Microsecond))
	for _, e := range entries {
		b = wire.AppendText(b, e.key)
		parts := len(b)
		b = append(b, 0)
		if e.series != 0 {
			b[parts] |= hasLoan
			b = binary.AppendUvarint(binary.AppendUvarint(b, e.series), uint64(e.out))
		}
		if e.borrowed != 0 {
			b[parts] |= hasBorrowed
			b = binary.AppendUvarint(binary.AppendUvarint(binary.AppendUvarint(b, e.borrowed), uint64(e.used)), uint64(e.returned))
		}
		if e.wanted != 0 {
			b[parts] |= hasNeed
			b = binary.AppendUvarint(b, uint64(e.wanted))
		}
	}
	return b
}

func (f *forger) say(n *Node, now time.Duration, b []byte) error {
	f.sent += time.Millisecond
	return n.Merge(crdt.Contact{From: f.self, Now: now, Sent: f.sent, Echo: now}, b)
}

// lend says that tokens were lent.
func (f *forger) lend(n *Node, now time.Duration, key string, tokens int64) error {
	if f.out == nil {
		f.out, f.series = map[string]int64{}, 1
	}
	f.out[key] += tokens * micro
	return f.say(n, now, f.packet(n, 0, now, forgedEntry{key: key, series: f.series, out: f.out[key]}))
}

// A member without a share that "lends" 20,000/s gets nothing admitted; one with a
// share gets its share admitted and no more. Both are named, and the loans go back.
func TestForgedLoans(t *testing.T) {
	const rate, burst, seconds = 1000, 100, 10
	for _, c := range []struct {
		name  string
		share float64
	}{{"learner", 0}, {"idle", 0}, {"b", .5}} {
		n, err := NewNode(crdt.Replica{Name: "a", Incarnation: 1}, Config{
			Limit:  Limit{Rate: rate, Burst: burst},
			Roster: Roster{Learners: true, Members: []Member{{Name: "a"}, {Name: "b"}, {Name: "idle", NoShare: true}}},
		}, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := forger{self: crdt.Replica{Name: c.name, Incarnation: 7}}
		admitted, now := 0, time.Duration(0)
		for ; now < seconds*time.Second; now += 5 * ms {
			if err := f.lend(n, now, "k", 100); err != nil {
				t.Fatal(err)
			}
			n.Tick(now)
			for n.Take(now, "k", 1) {
				admitted++
			}
		}
		most := (.5 + c.share) * (burst + rate*seconds*1.002)
		if float64(admitted) > most {
			t.Errorf("%s: %d admitted, at most %.0f", c.name, admitted, most)
		}
		if c.share > 0 && float64(admitted) < .9*most-burst {
			t.Errorf("%s: %d admitted of %.0f", c.name, admitted, most)
		}
		s := n.Stats(now)
		if s.Broke[c.name] == 0 || s.Refused.Loans == 0 || len(s.Broke) != 1 {
			t.Errorf("%s: not named: %+v", c.name, s)
		}
		e := n.rows["k"].with(n.peers[c.name])
		if lent := f.out["k"]; e == nil || e.borrowed.used+e.borrowed.ret+e.held() != lent || c.share == 0 && e.borrowed.ret != lent {
			t.Errorf("%s: the loans did not go back: %+v of %d", c.name, e, lent)
		}
	}
}

// A lender that begins a new incarnation, a new series or a new epoch with each packet has
// one allowance all the same; and so it has when its entries were forgotten meanwhile.
func TestForgedIncarnations(t *testing.T) {
	const rate, burst = 10, 1000
	for what, turn := range map[string]func(f *forger, i int, now time.Duration) (pause time.Duration, epoch uint64){
		"lives": func(f *forger, i int, _ time.Duration) (time.Duration, uint64) {
			f.self.Incarnation++
			return 5 * ms, 0
		},
		"series": func(f *forger, i int, _ time.Duration) (time.Duration, uint64) { f.series++; return 5 * ms, 0 },
		"epochs": func(f *forger, i int, _ time.Duration) (time.Duration, uint64) { f.series++; return 5 * ms, uint64(i) },
		"pauses": func(f *forger, i int, _ time.Duration) (time.Duration, uint64) { f.series++; return 5 * time.Second, 0 },
	} {
		n, err := NewNode(crdt.Replica{Name: "a", Incarnation: 1}, Config{
			Limit: Limit{Rate: rate, Burst: burst}, Roster: Roster{Learners: true, Members: []Member{{Name: "a", Weight: 1}, {Name: "b", Weight: 9}}},
		}, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := forger{self: crdt.Replica{Name: "b", Incarnation: 7}, series: 1}
		admitted, now := 0, time.Duration(0)
		for i := range 60 {
			pause, epoch := turn(&f, i, now)
			if err := f.say(n, now, f.packet(n, epoch, now, forgedEntry{key: "k", series: f.series, out: maxValue - 1})); err != nil {
				t.Fatal(err)
			}
			for n.rows["k"].held >= micro && n.Take(now, "k", 1) { // own ones stay, so the row comes to rest
				admitted++
			}
			_ = f.say(n, now, f.packet(n, epoch, now, forgedEntry{key: "k"})) // the series is closed
			for until := now + pause; now < until; now += min(50*ms, pause) {
				n.Tick(now)
				n.Delta(now, nil, f.self, n.Mark(f.self), 1200)
			}
		}
		if most := burst + rate*now.Seconds()*1.002; float64(admitted) > most+1 {
			t.Errorf("%s: %d admitted in %v, at most %.0f", what, admitted, now, most)
		}
	}
}

// Whatever rows a forged member sends, admissions here stay within burst and rate, the
// books do not go negative, and nothing panics.
func TestForgedRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.SampledFrom([]float64{1, 1000, 1e9}).Draw(t, "rate")
		burst := rapid.SampledFrom([]int{1, 100, maxBurst}).Draw(t, "burst")
		n, err := NewNode(crdt.Replica{Name: "a", Incarnation: 1}, Config{
			Limit:  Limit{Rate: rate, Burst: burst},
			Roster: Roster{Learners: true, Members: []Member{{Name: "a"}, {Name: "b"}, {Name: "c", NoShare: true}}},
		}, 0)
		if err != nil {
			t.Fatal(err)
		}
		amount := rapid.OneOf(rapid.Int64Range(0, 1e9), rapid.SampledFrom([]int64{0, 1, micro, maxValue / 2, maxValue - 1, 1 << 40}))
		forgers := []*forger{{self: crdt.Replica{Name: "b", Incarnation: 7}}, {self: crdt.Replica{Name: "c", Incarnation: 7}}, {self: crdt.Replica{Name: "x", Incarnation: 7}}}
		keys := []string{"k", "l"}
		admitted := map[string]int64{}
		now := time.Duration(0)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.SampledFrom([]time.Duration{0, ms, 50 * ms, time.Second, 3 * time.Second}).Draw(t, "pause")
			f := rapid.SampledFrom(forgers).Draw(t, "from")
			if rapid.IntRange(0, 9).Draw(t, "new incarnation") == 0 {
				f.self.Incarnation++
			}
			var entries []forgedEntry
			for range rapid.IntRange(0, 3).Draw(t, "entries") {
				key := rapid.SampledFrom(keys).Draw(t, "key")
				e := forgedEntry{
					key: key, series: uint64(rapid.IntRange(0, 3).Draw(t, "series")), out: amount.Draw(t, "out"),
					used: amount.Draw(t, "used"), returned: amount.Draw(t, "returned"), wanted: amount.Draw(t, "need"),
				}
				if r := n.rows[key]; r != nil && rapid.Bool().Draw(t, "of ours") {
					for _, of := range r.entries {
						if of != nil && of.peer.id.Name == f.self.Name {
							e.borrowed = of.lent.series
						}
					}
				}
				entries = append(entries, e)
			}
			_ = f.say(n, now, f.packet(n, uint64(rapid.IntRange(0, 2).Draw(t, "epoch")), now, entries...))
			n.Tick(now)
			for _, key := range keys {
				for _, tokens := range []int{burst, max(burst/2, 1), 1} {
					for range 3 {
						if n.Take(now, key, tokens) {
							admitted[key] += int64(tokens)
						}
					}
				}
				most := float64(burst) + rate*now.Seconds()*1.002 + 1
				if float64(admitted[key]) > most {
					t.Fatalf("admitted more than burst and rate allow")
				}
			}
			for _, r := range n.rows {
				if r.level < 0 || r.lent < 0 || r.held < 0 || r.level+r.lent > r.cap ||
					min(r.sum.Minted, r.sum.Lent, r.sum.Got, r.sum.Own, r.sum.Borrowed, r.sum.Denied) < 0 {
					t.Fatalf("negative books")
				}
			}
			if s := n.Stats(now); min(s.Level, s.Lent, s.Held, s.Pinned) < 0 || s.Broke["b"]+s.Broke["c"]+s.Broke["x"] != s.Refused.Loans {
				t.Fatalf("stats")
			}
		}
	})
}

// A borrower that says first that all came back, and then that all was used, accounts
// for no more than was lent.
func TestForgedAccounts(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := 2 * time.Second
	for range 4 {
		_, _ = say(now, a, b)
		b.Demand(now, "k", 20)
		b.Tick(now)
		_, _ = say(now, b, a)
		a.Tick(now)
		now += 50 * ms
	}
	e := a.rows["k"].with(a.peers["b"])
	if e == nil || e.lent.open() <= 0 {
		t.Fatalf("nothing lent: %+v", e)
	}
	out := e.lent.out
	f := forger{self: b.self, sent: now}
	for _, s := range []forgedEntry{{returned: out}, {used: out}} {
		s.key, s.borrowed = "k", e.lent.series
		if err := f.say(a, now, f.packet(a, 0, 0, s)); err != nil {
			t.Fatal(err)
		}
	}
	if r := a.rows["k"]; e.lent.open() != 0 || r.lent != 0 || r.level+r.lent > r.cap {
		t.Errorf("%+v; %d lent, level %d of %d", e.lent, r.lent, r.level, r.cap)
	}
}

// What a peer may have known here is bounded, and leaves room for own keys.
func TestForgedKeys(t *testing.T) {
	cfg := Config{Limit: Limit{Rate: 1000, Burst: 100}, MaxKeys: 20_000, Roster: Roster{Learners: true, Members: []Member{{Name: "a"}, {Name: "b"}}}}
	n, err := NewNode(crdt.Replica{Name: "a", Incarnation: 1}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for peer := range 10 {
		f := forger{self: crdt.Replica{Name: fmt.Sprint("x", peer), Incarnation: 1}}
		for i := range 5000 {
			_ = f.say(n, time.Second, f.packet(n, 0, 0, forgedEntry{key: fmt.Sprint(peer, " ", i), wanted: 1}))
		}
		if got := n.Keys(); got > min((peer+1)*cfg.MaxKeys/namedBy, cfg.MaxKeys/namedByAll) {
			t.Fatalf("%d keys after %d peers", got, peer+1)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	t.Logf("%d bytes for each key", (after.HeapAlloc-before.HeapAlloc)/uint64(n.Keys()))
	if n.Stats(time.Second).Refused.Needs == 0 {
		t.Error("not counted")
	}
	for i := range cfg.MaxKeys * 3 / 4 {
		if !n.Demand(time.Second, fmt.Sprint("own ", i), 1) {
			t.Fatalf("own key %d is refused", i)
		}
	}
	// A key that is used here counts no more as a peer's.
	if named := n.named; !n.Demand(time.Second, "0 1", 1) || n.named != named-1 {
		t.Errorf("%d named after %d", n.named, named)
	}
}

// So are the keys that they bring by loans that nobody asked for.
func TestForgedLoansOfManyKeys(t *testing.T) {
	cfg := Config{Limit: Limit{Rate: 1000, Burst: 100}, MaxKeys: 20_000, Roster: Roster{Learners: true, Members: []Member{{Name: "a"}, {Name: "b"}}}}
	n, err := NewNode(crdt.Replica{Name: "a", Incarnation: 1}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	for peer := range 10 {
		f := forger{self: crdt.Replica{Name: fmt.Sprint("x", peer), Incarnation: 1}}
		for i := range 8000 {
			_ = f.lend(n, time.Second, fmt.Sprint(peer, " ", i), 1)
		}
		if got := n.Keys(); got > min((peer+1)*2*cfg.MaxKeys/namedBy, 2*cfg.MaxKeys/namedByAll) {
			t.Fatalf("%d keys after %d peers", got, peer+1)
		}
	}
	if n.Keys() == 0 || n.Stats(time.Second).Refused.TooManyKeys == 0 {
		t.Errorf("%d keys, none refused", n.Keys())
	}
}

func TestTotals(t *testing.T) {
	var sum total
	for range 4 {
		sum.add(math.MaxInt64)
	}
	if !sum.some() || sum.value() != math.MaxInt64 {
		t.Error(sum)
	}
	for range 4 {
		sum.add(-math.MaxInt64)
	}
	if sum.some() || sum.value() != 0 {
		t.Error(sum)
	}
	if sum.add(5); !sum.some() || sum.value() != 5 {
		t.Error(sum)
	}
	if plus(math.MaxInt64-1, 5) != math.MaxInt64 || plus(3, -2) != 1 {
		t.Error("plus")
	}
}
