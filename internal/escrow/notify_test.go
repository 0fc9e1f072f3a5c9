// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"sync/atomic"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Whoever carries a set must hear of each rise of a mark, or what it says waits
// for the next keep-alive.
func TestSetSaysWhenItHasChanged(t *testing.T) {
	roster := Roster{Members: []Member{{Name: "a"}, {Name: "b"}}}
	var now hand
	var told atomic.Int64 // counted by the set's goroutine too
	s, err := New(crdt.Replica{Name: "a", Incarnation: 1}, Config{Limit: Limit{Rate: 1000, Burst: 100}, Roster: roster},
		WithClock(now.read))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.OnChange(func() { told.Add(1) })
	b := crdt.Replica{Name: "b", Incarnation: 1}
	s.Delta(0, nil, b, 0, 1000) // they meet
	key := s.Key("k")
	before, seen := told.Load(), s.Mark(b)
	rises := 0
	for range 200 {
		now.move(10 * ms)
		key.Allow()
		heard := told.Load()
		mark := s.Mark(b)
		if mark > seen {
			rises++
			if told.Load() == before {
				t.Fatalf("the mark is %d and nobody was told", mark)
			}
		}
		before, seen = heard, mark
	}
	if rises == 0 {
		t.Fatal("no mark rose")
	}
	s.OnChange(nil)
	for range 200 {
		now.move(10 * ms)
		before := told.Load()
		key.Allow()
		if told.Load() != before {
			t.Fatal("told after it was ended")
		}
	}
}
