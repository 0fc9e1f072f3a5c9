// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process_test

import (
	"context"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/process"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Two processes share a limit. One needs more than its half of the burst and
// borrows; then the limit is changed for both.
func Example() {
	config := func(name string, seeds ...string) process.Config {
		return process.Config{
			Fleet: "payments", Name: name,
			Limits: limiter.Config{
				Limit:  limiter.Limit{Rate: 1000, Burst: 200},
				Roster: limiter.Roster{Members: []limiter.Member{{Name: "a"}, {Name: "b"}}},
			},
			Gossip: gossip.NodeConfig{Bind: "127.0.0.1:0", Seeds: seeds},
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var store register.Memory // or etcd, JetStream, Kafka, RabbitMQ, PostgreSQL, a file
	a, err := process.Start(config("a"), process.WithRegister(&store))
	if err != nil {
		panic(err)
	}
	defer a.Close()
	b, err := process.Start(config("b", a.Node().Addr().String()), process.WithRegister(&store))
	if err != nil {
		panic(err)
	}
	defer b.Close()

	g, err := guard.New(guard.Config{Group: "payments"}, guard.WithFleet(a.Member()))
	if err != nil {
		panic(err)
	}
	defer g.Close(ctx)

	fmt.Println("a waits for 150 of 200:", a.Key("gateway").WaitN(ctx, 150))
	number, err := b.Set(ctx, 1, fleet.Change{Limit: &limiter.Limit{Rate: 500, Burst: 100}})
	fmt.Println("b sets half of it: configuration", number, err)
	// Output:
	// a waits for 150 of 200: <nil>
	// b sets half of it: configuration 2 <nil>
}
