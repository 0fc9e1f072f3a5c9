// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate_test

import (
	"fmt"
	"log"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// Three consumers of one queue. Two of them trip, which is a quorum, and the
// third is held before it has tried the dead dependency itself.
func ExampleMember() {
	now := time.Second
	clock := func() time.Duration { return now }
	roster := fleetstate.Roster{Number: 1, Names: []string{"a", "b", "c"}}
	var votes []*fleetstate.Verdicts
	var members []*fleetstate.Member
	var breakers []*circuit.Breaker
	for _, name := range roster.Names {
		v, err := fleetstate.NewVerdicts(now, fleetstate.Config{}, crdt.Replica{Name: name, Incarnation: 1}, roster)
		if err != nil {
			log.Fatal(err)
		}
		b, err := circuit.New("orders", breaker.Config{})
		if err != nil {
			log.Fatal(err)
		}
		votes, members, breakers = append(votes, v), append(members, fleetstate.NewMember(clock, v, nil)), append(breakers, b)
	}
	// A gossip session carries what they say; here each hears everything. A guard lets
	// time pass, and does to breakers what comes back.
	gossip := func() {
		now += 10 * time.Millisecond
		for i, from := range votes {
			for j, to := range votes {
				if i == j {
					continue
				}
				b, _ := from.Delta(now, nil, crdt.Replica{Name: roster.Names[j], Incarnation: 1}, 0, 1400)
				c := crdt.Contact{From: crdt.Replica{Name: roster.Names[i], Incarnation: 1}, Now: now, Sent: now, Echo: now}
				if err := to.Merge(c, b); err != nil {
					log.Fatal(err)
				}
			}
		}
		for _, m := range members {
			m.Step(now, nil)
		}
	}

	// The processes have run for a while; then each takes the queue over.
	for range 3 {
		gossip()
		now += time.Second
	}
	for i, m := range members {
		if err := m.Adopt(now, breakers[i], []string{"orders"}, 10*time.Second); err != nil {
			log.Fatal(err)
		}
	}

	for i := range 2 {
		breakers[i].Trip(now, "timeout")
	}
	members[0].Step(now, nil)
	members[1].Step(now, nil)
	gossip()
	gossip()
	s := breakers[2].Snapshot(now)
	fmt.Println(members[2].Scopes()[0].State, s.State, s.Cause, s.Held)
	// Output:
	// open open timeout true
}

// Half of those who report a key, and at least two, make a storm of the fleet.
func ExampleJudgeStorm() {
	down := fleetstate.Report{Active: true, Failed: 1200, Outcomes: 1200, Age: 70 * time.Second, Reason: "timeout"}
	calm := fleetstate.Report{Outcomes: 1200}
	fmt.Println(fleetstate.JudgeStorm(0.5, []fleetstate.Report{down, calm, calm}).Active)
	s := fleetstate.JudgeStorm(0.5, []fleetstate.Report{down, calm, down})
	fmt.Printf("%v: %d of %d, %d of %d failed, %s\n", s.Active, s.Affected, s.Reporters, s.Failed, s.Outcomes, s.Reason)
	// Output:
	// false
	// true: 2 of 3, 2400 of 3600 failed, timeout
}
