// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// Two guards, each with its own part in the fleet, consume one queue. Their
// dependency dies: both hold, one of them probes at a time, and both go on together.
func ExampleWithFleet() {
	began := time.Now()
	clock := func() time.Duration { return time.Since(began) } // of the session that carries the packets
	roster := fleetstate.Roster{Number: 1, Names: []string{"a", "b"}}
	var votes []*fleetstate.Verdicts
	var guards []*guard.Guard
	for _, name := range roster.Names {
		self := crdt.Replica{Name: name, Incarnation: 1}
		v, err := fleetstate.NewVerdicts(clock(), fleetstate.Config{Successes: 4, Settle: 200 * time.Millisecond}, self, roster)
		if err != nil {
			log.Fatal(err)
		}
		s, err := fleetstate.NewStorms(fleetstate.StormConfig{}, self)
		if err != nil {
			log.Fatal(err)
		}
		g, err := guard.New(guard.Config{Group: "shop"}, guard.WithFleet(fleetstate.NewMember(clock, v, s)))
		if err != nil {
			log.Fatal(err)
		}
		votes, guards = append(votes, v), append(guards, g)
	}

	// A gossip session does this over a network; the storms' section goes the same way.
	quit, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			select {
			case <-tick.C:
			case <-quit:
				tick.Stop()
				return
			}
			for i, from := range votes {
				to, peer := votes[1-i], crdt.Replica{Name: roster.Names[1-i], Incarnation: 1}
				now := clock()
				packet, _ := from.Delta(now, nil, peer, 0, 1400)
				contact := crdt.Contact{From: crdt.Replica{Name: roster.Names[i], Incarnation: 1}, Now: now, Sent: now, Echo: now}
				if err := to.Merge(contact, packet); err != nil {
					log.Fatal(err)
				}
			}
		}
	}()

	var down atomic.Bool
	down.Store(true)
	broker := guardtest.NewBroker()
	ctx, cancel := context.WithCancel(context.Background())
	for _, g := range guards {
		go func() {
			_ = broker.Run(ctx, g, "orders", guardtest.Guarded{Consumer: guardtest.ConsumerConfig{Prefetch: 50}}, func(context.Context, *guardtest.Message) error {
				if down.Load() {
					return errors.New("dependency down")
				}
				return nil
			})
		}()
	}
	for n := range uint64(100) {
		broker.Publish("orders", guardtest.Message{Body: guardtest.Body(n+1, 0)})
	}

	all := func(cond func(guard.State) bool) func() bool {
		return func() bool {
			for _, g := range guards {
				if s := g.Source("orders"); s == nil || !cond(s.State()) {
					return false
				}
			}
			return true
		}
	}
	await := func(cond func() bool) {
		for !cond() {
			time.Sleep(time.Millisecond)
		}
	}
	await(all(func(st guard.State) bool { return st.Breaker.Held && st.Fleet.State == breaker.Open }))
	hold := guards[0].Source("orders").State().Holds[0]
	fmt.Println(hold.Reason, "is cleared by", hold.ClearedBy)
	down.Store(false)
	await(all(func(st guard.State) bool { return st.Breaker.State == breaker.Closed }))
	await(func() bool { return broker.Stats("orders").Acked == 100 })
	fmt.Println("all handled,", broker.DeadLetters("orders").Len(), "dead letters")

	cancel()
	for _, g := range guards {
		if _, err := g.Close(context.Background()); err != nil {
			log.Fatal(err)
		}
	}
	close(quit)
	<-gone
	// Output:
	// breaker is cleared by the fleet's probes, one process at a time; operator: ForceClosed
	// all handled, 0 dead letters
}
