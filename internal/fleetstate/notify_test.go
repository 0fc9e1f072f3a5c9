// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Whoever carries a section must hear of each rise of its mark, or what it says
// waits for the next keep-alive.
func TestSectionsSayWhenTheyHaveChanged(t *testing.T) {
	a, b := crdt.Replica{Name: "a", Incarnation: 1}, crdt.Replica{Name: "b", Incarnation: 1}
	v, err := NewVerdicts(0, Config{}, a, Roster{Number: 1, Names: []string{"a"}})
	if err != nil {
		t.Fatal(err)
	}
	v.Tick(10 * time.Second) // it need not wait to be told any more
	s, err := NewStorms(StormConfig{}, a)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		listen func(f func())
		mark   func(crdt.Replica) uint64
		change func(n int)
	}{
		{"verdicts", v.OnChange, v.Mark, func(n int) {
			name := string(rune('a' + n))
			if _, err := v.Adopt(10*time.Second, name); err != nil {
				t.Error(err)
			}
			v.Observe(10*time.Second, name, breaker.Snapshot{State: breaker.Open, Generation: 1, BackoffLevel: 1})
		}},
		{"storms", s.OnChange, s.Mark, func(n int) {
			if err := s.Report(time.Duration(n)*time.Minute, "k", Report{Active: n%2 == 0, Failed: uint64(n)}); err != nil {
				t.Error(err)
			}
		}},
	} {
		told := 0
		tt.listen(func() { told++ })
		for n := range 5 {
			mark, before := tt.mark(b), told
			tt.change(n)
			if tt.mark(b) == mark {
				t.Errorf("%s: the mark did not rise", tt.name)
			}
			if told == before {
				t.Errorf("%s: nobody was told", tt.name)
			}
		}
		before := told
		tt.listen(nil)
		tt.change(7)
		if told != before {
			t.Errorf("%s: told after it was ended", tt.name)
		}
	}
}
