// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// Everything holds for a source whose breaker the fleet decides over: in a fleet
// of one each trip opens it for the fleet, and each probe is by its permit.
func TestExerciseInAFleet(t *testing.T) {
	life := uint64(0)
	options := func() []guard.Option {
		life++
		began := time.Now()
		clock := func() time.Duration { return time.Since(began) }
		self := crdt.Replica{Name: "a", Incarnation: life}
		v, err := fleetstate.NewVerdicts(0, fleetstate.Config{
			Base: 50 * time.Millisecond, Cap: time.Second, Successes: 3, Settle: 200 * time.Millisecond, Turn: time.Second,
		}, self, fleetstate.Roster{Number: 1, Names: []string{"a"}})
		if err != nil {
			t.Fatal(err)
		}
		s, err := fleetstate.NewStorms(fleetstate.StormConfig{}, self)
		if err != nil {
			t.Fatal(err)
		}
		return []guard.Option{guard.WithFleet(fleetstate.NewMember(clock, v, s))}
	}
	for _, c := range []struct {
		name    string
		order   guard.Order
		workers int
		passive bool
		feed    bool
	}{
		{"source", guard.OrderSource, 1, false, false},
		{"source-feed", guard.OrderSource, 1, false, true},
		{"key-4", guard.OrderKey, 4, false, false},
		{"none-8", guard.OrderNone, 8, false, false},
		{"passive", guard.OrderNone, 8, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := memoryFeatures(c.order, c.workers, c.passive)
			f.Options = options
			Exercise(t, f, func(_ testing.TB, s Setup) Subject {
				m := newMemory(s)
				m.passive, m.feed = c.passive, c.feed
				return m
			})
		})
	}
}
