// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"
)

func set(t *testing.T, self Replica) *LWWSet {
	t.Helper()
	s, err := NewLWWSet(self)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func did(t *testing.T, want bool) func(bool, error) {
	t.Helper()
	return func(got bool, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Fatalf("%v, %v, want %v", got, err, want)
		}
	}
}

func TestLWWSetTies(t *testing.T) {
	at := Stamp{5, 5}
	s := set(t, origin1)
	did(t, true)(s.Remove("x", at))
	did(t, true)(s.Add("x", "", at)) // add wins over remove of the same stamp and replica
	did(t, false)(s.Remove("x", at))
	did(t, false)(s.Add("x", "", at))
	higher := set(t, origin2)
	did(t, true)(higher.Remove("x", at)) // the higher replica wins, whatever it writes
	merge(t, s, whole(higher))
	if s.Has("x") || s.Len() != 0 || s.Tombstones() != 1 {
		t.Fatal(s.Has("x"), s.Len(), s.Tombstones())
	}
	if got, by, ok := s.At("x"); got != at || by != origin2 || !ok {
		t.Fatal(got, by, ok)
	}
	if _, _, ok := s.At("y"); ok {
		t.Fatal("a write nobody made")
	}
	did(t, false)(s.Add("x", "", Stamp{5, 4}))
	did(t, true)(s.Add("x", "", Stamp{5, 6}))
	if got := slices.Collect(maps.Keys(maps.Collect(s.All()))); !slices.Equal(got, []string{"x"}) {
		t.Fatal(got)
	}
	if _, err := s.Add(strings.Repeat("x", MaxElement+1), "", at); !errors.Is(err, errArgument) {
		t.Fatal(err)
	}
}

func TestLWWSetPrune(t *testing.T) {
	const minute = 60_000
	now := Stamp{Physical: 100 * minute}
	s := set(t, origin1)
	did(t, true)(s.Remove("old", Stamp{Physical: 90*minute - 1, Logical: 9}))
	did(t, true)(s.Remove("edge", Stamp{Physical: 90 * minute}))
	did(t, true)(s.Remove("future", Stamp{Physical: 200 * minute}))
	did(t, true)(s.Add("kept", "", Stamp{Physical: 1}))
	did(t, true)(s.Remove("older", Stamp{Physical: 80 * minute}))
	did(t, true)(s.Remove("oldest", Stamp{Physical: 2}))
	before := whole(s)

	if n, err := s.Prune(now, MinTombstoneAge-1); n != 0 || !errors.Is(err, errArgument) {
		t.Fatal(n, err)
	}
	if n, err := s.Prune(now, MinTombstoneAge); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if s.Tombstones() != 2 || !s.Has("kept") {
		t.Fatal(s.Tombstones(), s.Has("kept"))
	}
	// A peer that has not pruned yet does not bring it back, and time that is
	// told to go back does not lower the horizon.
	if n, err := s.Prune(Stamp{Physical: 70 * minute}, time.Hour); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	mark := s.Mark()
	merge(t, s, before)
	if s.Tombstones() != 2 || s.Mark() != mark {
		t.Fatal(s.Tombstones())
	}
	// On an element that is known an old remove still decides.
	did(t, true)(s.Add("known", "", Stamp{Physical: 2}))
	did(t, true)(s.Remove("known", Stamp{Physical: 3}))
	// What the horizon assumes not to happen: an add from before is back.
	stale := set(t, origin2)
	did(t, true)(stale.Add("old", "", Stamp{Physical: 1}))
	merge(t, s, whole(stale))
	if !s.Has("old") {
		t.Fatal("an add was refused, which a newcomer's elements would be too")
	}
	if n, err := s.Prune(now, 2*time.Hour); n != 1 || err != nil { // "known", by the horizon there is
		t.Fatal(n, err)
	}
}

// An element that is dropped is gone here, and comes back from whoever has it.
func TestLWWSetDrop(t *testing.T) {
	s, peer := set(t, origin1), set(t, origin2)
	did(t, true)(peer.Add("x", "a note", Stamp{Physical: 1}))
	merge(t, s, whole(peer))
	if note := maps.Collect(s.All())["x"]; note != "a note" {
		t.Fatalf("note %q", note)
	}
	did(t, true)(s.Remove("gone", Stamp{Physical: 1}))
	s.Drop("x")
	s.Drop("gone")
	s.Drop("never was")
	if s.Has("x") || s.Len() != 0 || s.Tombstones() != 1 {
		t.Fatal(s.Has("x"), s.Len(), s.Tombstones())
	}
	merge(t, s, whole(peer))
	if !s.Has("x") || s.Len() != 1 {
		t.Fatal("it does not come back")
	}
	if _, err := s.Add("x", strings.Repeat("n", MaxNote+1), Stamp{Physical: 9}); !errors.Is(err, errArgument) {
		t.Fatal(err)
	}
}
