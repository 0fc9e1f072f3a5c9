// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever is done to them, ranks are what a sorted list is, and no longer than it has
// different numbers.
func TestRanks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type member struct {
			v     int64
			place int32
		}
		var r ranks
		var all []member
		most := 0
		number := rapid.Int64Range(-5, 15)
		pick := func(t *rapid.T) int { return rapid.IntRange(0, len(all)-1).Draw(t, "which") }
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				v := number.Draw(t, "v")
				all = append(all, member{v, r.add(v)})
				most = max(most, len(all))
			},
			"move": func(t *rapid.T) {
				if len(all) > 0 {
					m := &all[pick(t)]
					m.v = number.Draw(t, "v")
					m.place = r.move(m.place, m.v)
				}
			},
			"drop": func(t *rapid.T) {
				if len(all) > 0 {
					i := pick(t)
					r.drop(all[i].place)
					all = slices.Delete(all, i, i+1)
				}
			},
			"": func(t *rapid.T) {
				var want, got []int64
				for _, m := range all {
					want = append(want, m.v)
					if v := r.at(m.place).v; v != m.v {
						t.Fatalf("%d at the place of %d", v, m.v)
					}
				}
				before := int32(0)
				for p := r.first; p != 0; p = r.at(p).next {
					if r.at(p).prev != before {
						t.Fatalf("behind %d, and before it %d", before, r.at(p).prev)
					}
					for range r.at(p).n {
						got = append(got, r.at(p).v)
					}
					before = p
				}
				slices.Sort(want)
				if !slices.Equal(got, want) || r.last != before || r.empty() != (len(all) == 0) {
					t.Fatalf("%v instead of %v", got, want)
				}
				if len(all) > 0 && (r.least() != want[0] || r.most() != want[len(want)-1]) {
					t.Fatalf("%d to %d instead of %v", r.least(), r.most(), want)
				}
				if len(r.nodes) > most+1 { // a move needs one more
					t.Fatalf("%d nodes for at most %d", len(r.nodes), most)
				}
			},
		})
	})
}

// The storm's reading looks at no message and at no lane: 250,000 lanes took most of a
// processor, since it is taken four times a second.
func TestReadingLooksAtNoLane(t *testing.T) {
	s := newSim(t, Policy{Order: OrderKey, NoBreaker: true, Retry: Retry{Base: time.Second}})
	for m := range 3 {
		s.put(s.now, m, uint64(m), 1)
		s.now += time.Second
	}
	for calls := 0; calls < 6; s.now += time.Second {
		if st := s.next(s.now); st.kind == stepHandle {
			s.finish(st.it, errBad)
			calls++
		}
	}
	want := s.reading(s.now)
	if want.Attempts < 2 || want.Age < 8*time.Second {
		t.Fatalf("%+v", want)
	}
	lanes := s.lanes
	s.lanes = nil
	got := s.reading(s.now)
	if s.lanes = lanes; got != want {
		t.Errorf("%+v, and without the lanes %+v", want, got)
	}
}

// What was large does not stay so once it is empty.
func TestRanksGiveMemoryBack(t *testing.T) {
	var r ranks
	var places []int32
	for v := range int64(10 * smallRanks) {
		places = append(places, r.add(v))
	}
	for _, p := range places {
		r.drop(p)
	}
	if cap(r.nodes) > smallRanks || !r.empty() {
		t.Errorf("room for %d", cap(r.nodes))
	}
}
