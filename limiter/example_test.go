// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

// One process, one limit.
func ExampleLocal() {
	l, err := limiter.Local(limiter.Limit{Rate: 100, Burst: 3})
	if err != nil {
		log.Fatal(err)
	}
	for range 3 {
		fmt.Print(l.Allow(), " ")
	}
	fmt.Println(l.AllowN(3))
	fmt.Println(l.Wait(context.Background())) // 10 ms
	// Output:
	// true true true false
	// <nil>
}

// A fleet of three, of which this is one. The Set is a section for a gossip
// session; until it hears from the others it mints its own share and no more.
func ExampleNew() {
	s, err := limiter.New(
		crdt.Replica{Name: "orders-0", Incarnation: uint64(time.Now().UnixNano())},
		limiter.Config{
			Limit: limiter.Limit{Rate: 1000, Burst: 100},
			Limits: map[string]limiter.Limit{
				"payments": {Rate: 50, Burst: 5}, // 1.7 a share: it lives on one home
			},
			Roster: limiter.Roster{Number: 1, Members: []limiter.Member{
				{Name: "orders-0"}, {Name: "orders-1"}, {Name: "orders-2"},
			}},
		})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	fmt.Println(s.Key("payments").AllowN(11), s.Key("anything").AllowN(101))
	// Output: false false
}

// A Node has no clock: a simulation says what time it is.
func ExampleNode() {
	n, err := limiter.NewNode(crdt.Replica{Name: "a"}, limiter.Config{Limit: limiter.Limit{Rate: 10, Burst: 2}}, 0)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(n.Take(0, "k", 2), n.Take(99*time.Millisecond, "k", 1), n.Take(100*time.Millisecond, "k", 1))
	fmt.Println(n.Take(50*time.Millisecond, "k", 1)) // time does not go back
	// Output:
	// true false true
	// false
}

// Two processes share a limit that overshoots rather than holds back, by those who
// prefer a full burst anywhere to the bound.
func ExampleStrategy() {
	cfg := limiter.Config{
		Limit: limiter.Limit{Rate: 1, Burst: 10}, Strategy: limiter.Pooled,
		Roster: limiter.Roster{Members: []limiter.Member{{Name: "a"}, {Name: "b"}}},
	}
	a, err := limiter.New(crdt.Replica{Name: "a", Incarnation: 1}, cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	b, err := limiter.New(crdt.Replica{Name: "b", Incarnation: 1}, cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer b.Close()
	fmt.Println("a admits 10:", a.Key("orders").AllowN(10))

	// A gossip session carries this.
	packet, _ := a.Delta(0, nil, crdt.Replica{Name: "b", Incarnation: 1}, 0, 1400)
	if err := b.Merge(crdt.Contact{From: crdt.Replica{Name: "a", Incarnation: 1}}, packet); err != nil {
		log.Fatal(err)
	}
	fmt.Println("b admits 1 more:", b.Key("orders").Allow())
	// Output:
	// a admits 10: true
	// b admits 1 more: false
}
