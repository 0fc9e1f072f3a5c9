// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"fmt"
	"log"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/fleet"
)

// Three consumers of one queue. Two of them trip, which is a quorum, and the
// third is held before it has tried the dead dependency itself.
func ExampleVerdicts() {
	now := time.Second
	roster := fleet.Roster{Number: 1, Names: []string{"a", "b", "c"}}
	var fleets []*fleet.Verdicts
	var breakers []*breaker.Breaker
	for _, name := range roster.Names {
		v, err := fleet.NewVerdicts(now, fleet.Config{}, crdt.Replica{Name: name, Incarnation: 1}, roster)
		if err != nil {
			log.Fatal(err)
		}
		b, err := breaker.New("orders", breaker.Config{})
		if err != nil {
			log.Fatal(err)
		}
		fleets, breakers = append(fleets, v), append(breakers, b)
	}

	// A driver does what comes back, and says what the breaker is like then.
	drive := func(i int, acts ...fleet.Action) {
		for _, act := range append(acts, fleets[i].Actions(nil)...) {
			act.Apply(now, breakers[i])
		}
		fleets[i].Observe(now, "orders", breakers[i].Snapshot(now))
	}
	// A gossip session carries what they say; here each hears everything.
	gossip := func() {
		now += 10 * time.Millisecond
		for i, from := range fleets {
			for j, to := range fleets {
				if i == j {
					continue
				}
				b, _ := from.Delta(now, nil, crdt.Replica{Name: roster.Names[j], Incarnation: 1}, 0, 1400)
				c := crdt.Contact{From: crdt.Replica{Name: roster.Names[i], Incarnation: 1}, Now: now, Sent: now, Echo: now}
				if err := to.Merge(c, b); err != nil {
					log.Fatal(err)
				}
				drive(j)
			}
		}
	}

	// The processes have run for a while; then each takes the queue over.
	for range 3 {
		gossip()
		now += time.Second
		for _, v := range fleets {
			v.Tick(now)
		}
	}
	for i, v := range fleets {
		act, err := v.Adopt(now, "orders")
		if err != nil {
			log.Fatal(err)
		}
		drive(i, act)
	}

	for i := range 2 {
		breakers[i].Trip(now, "timeout")
		drive(i)
	}
	gossip()
	gossip()
	s := breakers[2].Snapshot(now)
	fmt.Println(fleets[2].Status(now, "orders").Position, s.State, s.Cause, s.Held)
	// Output:
	// open 0.1 open timeout true
}

// Half of those who report a key, and at least two, make a storm of the fleet.
func ExampleJudgeStorm() {
	down := fleet.Report{Active: true, Failed: 1200, Outcomes: 1200, Age: 70 * time.Second, Reason: "timeout"}
	calm := fleet.Report{Outcomes: 1200}
	fmt.Println(fleet.JudgeStorm(0.5, []fleet.Report{down, calm, calm}).Active)
	s := fleet.JudgeStorm(0.5, []fleet.Report{down, calm, down})
	fmt.Printf("%v: %d of %d, %d of %d failed, %s\n", s.Active, s.Affected, s.Reporters, s.Failed, s.Outcomes, s.Reason)
	// Output:
	// false
	// true: 2 of 3, 2400 of 3600 failed, timeout
}
