// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow_test

import (
	"fmt"
	"log"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// A fleet of three, of which this is one. The Set is a section for a gossip
// session; until it hears from the others it mints its own share and no more.
func ExampleNew() {
	s, err := escrow.New(
		crdt.Replica{Name: "orders-0", Incarnation: uint64(time.Now().UnixNano())},
		escrow.Config{
			Limit: escrow.Limit{Rate: 1000, Burst: 100},
			Limits: map[string]escrow.Limit{
				"payments": {Rate: 50, Burst: 5}, // 1.7 a share: it has one owner
			},
			Roster: escrow.Roster{Number: 1, Members: []escrow.Member{
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
	n, err := escrow.NewNode(crdt.Replica{Name: "a"}, escrow.Config{Limit: escrow.Limit{Rate: 10, Burst: 2}}, 0)
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
	cfg := escrow.Config{
		Limit: escrow.Limit{Rate: 1, Burst: 10}, Strategy: escrow.Pooled,
		Roster: escrow.Roster{Members: []escrow.Member{{Name: "a"}, {Name: "b"}}},
	}
	a, err := escrow.New(crdt.Replica{Name: "a", Incarnation: 1}, cfg)
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	b, err := escrow.New(crdt.Replica{Name: "b", Incarnation: 1}, cfg)
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
