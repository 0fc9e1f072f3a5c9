// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
	"github.com/stormguard-mq/stormguard/internal/quarantine"
)

func tenant(name string) dlq.Rule {
	return dlq.Rule{Kind: dlq.RuleHeader, Header: "tenant", Value: name}
}

func rulesOf(q *Quarantine) string {
	var all []string
	for _, e := range q.Entries() {
		all = append(all, e.Rule.Value)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

func mustNot(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// lists is a fleet of nine over simnet, some of whose clocks are wrong by an hour.
type lists struct {
	t   *testing.T
	net *simnet.Net
	all []*Quarantine
}

func newLists(t *testing.T, seed uint64, wrong map[int]time.Duration) *lists {
	t.Helper()
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	w := &lists{t: t, net: simnet.New(simnet.Config{Seed: seed, Link: simnet.Link{Base: 500 * time.Microsecond, Jitter: 500 * time.Microsecond, Loss: 0.05}})}
	for i := range 9 {
		w.net.Add(func(incarnation int, rng *rand.Rand) simnet.Process {
			self := crdt.Replica{Name: fmt.Sprint("n", i), Incarnation: uint64(incarnation)}
			q, err := NewQuarantine(self, func() time.Time {
				_, wall := w.net.Clock(i)
				return time.Unix(0, wall)
			})
			mustNot(t, err)
			w.all = append(w.all, q)
			s, err := gossip.New(gossip.Config{Self: self}, gossip.WithRand(rng.Float64), gossip.WithSection("quarantine", q))
			mustNot(t, err)
			return simnet.Member(s, simnet.Addr(0))
		})
	}
	for i, by := range wrong {
		w.net.StepWall(i, by)
	}
	for i, q := range w.all {
		var look func()
		look = func() { // as a process does each second
			now, _ := w.net.Clock(i)
			var offsets []time.Duration
			for _, p := range w.net.Process(i).(interface {
				Peers(time.Duration, []gossip.Peer) []gossip.Peer
			}).Peers(now, nil) {
				if p.HasOffset {
					offsets = append(offsets, p.Offset)
				}
			}
			q.Offset(offsets)
			w.net.At(w.net.Now()+time.Second, look)
		}
		w.net.At(0, look)
	}
	w.net.Run(10 * time.Second)
	return w
}

// within waits until every list, or those given, has these rules.
func (w *lists) within(d time.Duration, want string, of ...int) {
	w.t.Helper()
	if of == nil {
		of = slices.Collect(maps.Keys(maps.Collect(slices.All(w.all))))
	}
	done := func() bool {
		return !slices.ContainsFunc(of, func(i int) bool { return rulesOf(w.all[i]) != want })
	}
	if !w.net.RunUntil(w.net.Now()+d, done) && !done() {
		for _, i := range of {
			w.t.Errorf("%d has %q, want %q", i, rulesOf(w.all[i]), want)
		}
		w.t.FailNow()
	}
}

// One command is in force everywhere within a second; what is taken off during a split
// is off when it has healed, and what was put on is on; times are the same everywhere.
func TestQuarantineOfNine(t *testing.T) {
	for _, wrong := range []map[int]time.Duration{nil, {0: time.Hour, 8: -time.Hour}, {0: -time.Hour, 8: time.Hour}} {
		for seed := range uint64(3) {
			t.Run(fmt.Sprint(wrong, seed), func(t *testing.T) {
				w := newLists(t, seed, wrong)
				mustNot(t, w.all[0].Add(dlq.QuarantineEntry{Rule: tenant("acme"), By: "ann", Why: "it breaks us"}))
				w.within(time.Second, "acme")
				for i, q := range w.all {
					if e := q.Entries()[0]; e.By != "ann" || e.Why != "it breaks us" || (e.Until.Sub(q.wall())-24*time.Hour).Abs() > 3*time.Second {
						t.Errorf("%d: %+v, its clock says %v", i, e, q.wall())
					}
				}

				w.net.Split([]int{0, 1, 2, 3}, []int{4, 5, 6, 7, 8})
				w.net.Run(w.net.Now() + 5*time.Second)
				mustNot(t, w.all[8].Remove(tenant("acme"), "bob"))
				mustNot(t, w.all[1].Add(dlq.QuarantineEntry{Rule: tenant("other")}))
				w.within(time.Second, "", 4, 5, 6, 7, 8)
				w.within(time.Second, "acme other", 0, 1, 2, 3)
				w.net.Run(w.net.Now() + 20*time.Second)
				w.net.Heal()
				w.within(5*time.Second, "other")
				w.net.Run(w.net.Now() + 5*time.Second)
				w.within(0, "other")

				// It can be put on again at once, by whoever has heard.
				mustNot(t, w.all[4].Add(dlq.QuarantineEntry{Rule: tenant("acme")}))
				w.within(time.Second, "acme other")
				mustNot(t, w.all[0].Remove(tenant("acme"), ""))
				w.within(time.Second, "other")

				// Half a minute of a clock that is wrong is the half minute of all.
				q := w.all[8]
				mustNot(t, q.Add(dlq.QuarantineEntry{Rule: tenant("short"), Until: q.wall().Add(30 * time.Second)}))
				w.within(time.Second, "other short")
				w.net.Run(w.net.Now() + 25*time.Second)
				w.within(0, "other short")
				w.within(8*time.Second, "other")
			})
		}
	}
}

// tellAll hands what each has to all others, whole, in some order.
func tellAll(t *rapid.T, all []*Quarantine) {
	for _, i := range rapid.Permutation([]int{0, 1, 2}).Draw(t, "order") {
		b, _ := all[i].Delta(0, nil, crdt.Replica{}, 0, math.MaxInt)
		for k, q := range all {
			if k != i {
				if err := q.Merge(crdt.Contact{From: all[i].self}, b); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// Whatever the clocks say, within an hour of the right time: lists that have heard all
// of each other are the same, and what was written last, by whoever had heard what was
// written before, is what they say.
func TestQuarantineConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_800_000_000, 0)
		var all []*Quarantine
		for i := range 3 {
			off := time.Duration(rapid.Int64Range(-3600, 3600).Draw(t, "clock")) * time.Second
			q, err := NewQuarantine(crdt.Replica{Name: fmt.Sprint(i), Incarnation: 1}, func() time.Time { return now.Add(off) })
			if err != nil {
				t.Fatal(err)
			}
			q.Offset([]time.Duration{-off, -off}) // the peers are right
			all = append(all, q)
		}
		want := map[string]bool{} // written since all had heard all, by one process alone; absent if by several
		const several = -1
		writer := map[string]int{}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 60_000).Draw(t, "ms")) * time.Millisecond)
			i := rapid.IntRange(0, 2).Draw(t, "at")
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant")
			write := func(on bool, err error) {
				if err != nil {
					t.Fatal(err)
				}
				if w, ok := writer[name]; ok && w != i {
					delete(want, name)
					i = several
				} else {
					want[name] = on
				}
				writer[name] = i
			}
			switch rapid.IntRange(0, 3).Draw(t, "do") {
			case 0:
				write(true, all[i].Add(dlq.QuarantineEntry{Rule: tenant(name), By: fmt.Sprint(i)}))
			case 1:
				write(false, all[i].Remove(tenant(name), ""))
			case 2:
				k := (i + 1) % 3
				b, _ := all[i].Delta(0, nil, crdt.Replica{}, 0, rapid.SampledFrom([]int{200, crdt.MinRoom}).Draw(t, "room"))
				if err := all[k].Merge(crdt.Contact{From: all[i].self}, b); err != nil {
					t.Fatal(err)
				}
			default:
				all[i].Rejoin(0, crdt.Replica{Name: all[i].self.Name, Incarnation: all[i].self.Incarnation + 1})
				tellAll(t, all)
				for name, on := range want {
					if got := slices.Contains(strings.Fields(rulesOf(all[0])), name); got != on {
						t.Fatalf("%s: on %v, want %v", name, got, on)
					}
				}
				clear(writer)
				clear(want)
			}
		}
		tellAll(t, all)
		tellAll(t, all)
		for _, q := range all[1:] {
			if got, want := rulesOf(q), rulesOf(all[0]); got != want {
				t.Fatalf("%q and %q", got, want)
			}
		}
	})
}

// What cannot be is refused by name, the list is bounded, entries end, and what was
// removed is forgotten when nobody can have it any more, and no sooner.
func TestQuarantineBounds(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	made := func(name string) *Quarantine {
		q, err := NewQuarantine(crdt.Replica{Name: name, Incarnation: 1}, func() time.Time { return now })
		mustNot(t, err)
		q.Offset([]time.Duration{0})
		return q
	}
	q, peer := made("a"), made("b")
	for want, e := range map[string]dlq.QuarantineEntry{
		`Rule.Kind: "" is not in {key, header, cause}`:   {},
		"header and value of 257 bytes are not in [1, ":  {Rule: tenant(strings.Repeat("x", 251))},
		"By: 65 bytes are not in [0, 64]":                {Rule: tenant("x"), By: strings.Repeat("x", 65)},
		"Why: 129 bytes are not in [0, 128]":             {Rule: tenant("x"), Why: strings.Repeat("x", 129)},
		"Until: -1s from now is not in (0, 168h0m0s]":    {Rule: tenant("x"), Until: now.Add(-time.Second)},
		"Until: 169h0m0s from now is not in (0, 168h0m0": {Rule: tenant("x"), Until: now.Add(169 * time.Hour)},
		"Rule.Value: must not be empty":                  {Rule: dlq.Rule{Kind: dlq.RuleKey}},
	} {
		if err := q.Add(e); !errors.Is(err, dlq.ErrQuarantine) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	told := 0
	q.OnChange(func() { told++ })
	watched := 0
	stop := q.Watch(func() { watched++ })
	for i := range quarantine.Max {
		mustNot(t, q.Add(dlq.QuarantineEntry{Rule: tenant(fmt.Sprint(i))}))
	}
	stop()
	if err := q.Add(dlq.QuarantineEntry{Rule: tenant("more")}); !errors.Is(err, dlq.ErrQuarantine) || !strings.Contains(err.Error(), "the list has 10000 entries") {
		t.Error(err)
	}
	mustNot(t, q.Add(dlq.QuarantineEntry{Rule: tenant("7"), Why: "again"})) // it is there
	mustNot(t, q.Remove(tenant("8"), ""))
	mustNot(t, q.Add(dlq.QuarantineEntry{Rule: tenant("more")}))
	if told != quarantine.Max+3 || watched != quarantine.Max {
		t.Errorf("told %d, watched %d", told, watched)
	}

	stale := made("c") // it has all, and hears nothing any more
	whole, _ := q.Delta(0, nil, crdt.Replica{}, 0, math.MaxInt)
	mustNot(t, stale.Merge(crdt.Contact{From: q.self}, whole))
	mustNot(t, peer.Merge(crdt.Contact{From: q.self}, whole))
	mustNot(t, q.Remove(tenant("9"), ""))
	now = now.Add(6 * time.Hour) // who still has it cannot bring it back
	_, _ = q.Delta(0, nil, crdt.Replica{}, 0, 1024)
	still, _ := stale.Delta(0, nil, crdt.Replica{}, 0, math.MaxInt)
	mustNot(t, q.Merge(crdt.Contact{From: stale.self}, still))
	now = now.Add(18*time.Hour - time.Second)
	if n := len(q.Entries()); n != quarantine.Max-1 {
		t.Errorf("%d entries a second before they end", n)
	}
	now = now.Add(time.Second)
	if n := len(q.Entries()); n != 0 {
		t.Errorf("%d entries when they have ended", n)
	}
	now = now.Add(2 * time.Hour)
	_, _ = q.Delta(0, nil, crdt.Replica{}, 0, 1024)
	if q.set.Len() != quarantine.Max-1 || q.set.Tombstones() != 2 {
		t.Errorf("%d and %d removed are remembered", q.set.Len(), q.set.Tombstones())
	}
	whole, _ = stale.Delta(0, nil, crdt.Replica{}, 0, math.MaxInt)
	mustNot(t, q.Merge(crdt.Contact{From: stale.self}, whole))
	if len(q.Entries()) != 0 {
		t.Errorf("%d came back", len(q.Entries()))
	}

	// Those that have ended take none of the room for new ones, and at most half of all.
	full := func() {
		t.Helper()
		for i := range quarantine.Max {
			mustNot(t, q.Add(dlq.QuarantineEntry{Rule: tenant(fmt.Sprint("now ", now.Unix(), " ", i)), Until: now.Add(time.Minute)}))
		}
		if err := q.Add(dlq.QuarantineEntry{Rule: tenant("7")}); !errors.Is(err, dlq.ErrQuarantine) || !strings.Contains(err.Error(), "the list has 10000 entries") {
			t.Error("one that has ended, again:", err)
		}
	}
	full()
	now = now.Add(2 * time.Hour)
	full()
	if n := q.set.Len() + q.set.Tombstones(); n != maxElements/2 {
		t.Errorf("%d are remembered", n)
	}
	now = now.Add(8 * 24 * time.Hour)
	_, _ = q.Delta(0, nil, crdt.Replica{}, 0, 1024)
	if q.set.Len()+q.set.Tombstones() != 0 {
		t.Errorf("%d and %d after all", q.set.Len(), q.set.Tombstones())
	}

	// A peer cannot fill the memory.
	evil, _ := crdt.NewLWWSet(crdt.Replica{Name: "evil", Incarnation: 1})
	for i := range maxElements {
		if _, err := evil.Remove(fmt.Sprint("x", i), crdt.Stamp{Physical: uint64(now.UnixMilli())}); err != nil {
			t.Fatal(err)
		}
	}
	refusals := 0
	for since := uint64(0); since < evil.Mark(); {
		b, upto := evil.Delta(nil, since, 1200)
		if err := q.Merge(crdt.Contact{From: crdt.Replica{Name: "evil", Incarnation: 1}}, b); errors.Is(err, ErrBusy) {
			refusals++
		} else if err != nil {
			t.Fatal(err)
		}
		since = upto
	}
	b, _ := evil.Delta(nil, 0, 1200)
	if err := q.Merge(crdt.Contact{From: stale.self}, b); !errors.Is(err, ErrBusy) || q.Refused() == 0 {
		t.Errorf("%v, after %d refusals, %d and %d", err, refusals, q.set.Len(), q.set.Tombstones())
	}
	if err := q.Merge(crdt.Contact{From: q.self}, b); !errors.Is(err, ErrSelf) {
		t.Error(err)
	}
	if err := peer.Merge(crdt.Contact{From: q.self}, []byte{0x41, 1}); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	if _, err := NewQuarantine(crdt.Replica{}, nil); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
	if _, err := NewQuarantine(crdt.Replica{Name: "a"}, nil); !errors.Is(err, ErrConfig) {
		t.Error(err)
	}
}

func FuzzQuarantine(f *testing.F) {
	now := func() time.Time { return time.Unix(1_800_000_000, 0) }
	a, _ := NewQuarantine(crdt.Replica{Name: "a", Incarnation: 1}, now)
	a.Offset([]time.Duration{0})
	_ = a.Add(dlq.QuarantineEntry{Rule: tenant("acme"), By: "ann", Why: "why"})
	_ = a.Remove(tenant("other"), "")
	b, _ := a.Delta(0, nil, crdt.Replica{}, 0, 1200)
	f.Add(b)
	f.Add(b[:len(b)-3])
	f.Fuzz(func(t *testing.T, b []byte) {
		q, _ := NewQuarantine(crdt.Replica{Name: "b", Incarnation: 1}, now)
		if err := q.Merge(crdt.Contact{From: a.self}, b); err != nil && q.set.Mark() != 0 {
			t.Fatalf("refused with %v, and taken in", err)
		}
		for _, e := range q.Entries() {
			if err := e.Rule.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
