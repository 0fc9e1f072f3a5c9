// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
)

// Whoever carries a set must hear of each rise of a mark, or what it says waits
// for the next keep-alive.
func TestSetSaysWhenItHasChanged(t *testing.T) {
	roster := Roster{Members: []Member{{Name: "a"}, {Name: "b"}}}
	now := time.Duration(0)
	s, err := New(crdt.Replica{Name: "a", Incarnation: 1}, Config{Limit: Limit{Rate: 1000, Burst: 100}, Roster: roster},
		WithClock(func() time.Duration { return now }))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	told := 0
	s.OnChange(func() { told++ })
	b := crdt.Replica{Name: "b", Incarnation: 1}
	s.Delta(0, nil, b, 0, 1000) // they meet
	key := s.Key("k")
	seen := s.Mark(b)
	rises := 0
	for range 200 {
		now += 10 * time.Millisecond
		before := told
		key.Allow()
		if mark := s.Mark(b); mark > seen {
			seen = mark
			rises++
			if told == before {
				t.Fatalf("the mark is %d and nobody was told", mark)
			}
		}
	}
	if rises == 0 {
		t.Fatal("no mark rose")
	}
	s.OnChange(nil)
	for range 200 {
		now += 10 * time.Millisecond
		before := told
		key.Allow()
		if told != before {
			t.Fatal("told after it was ended")
		}
	}
}
