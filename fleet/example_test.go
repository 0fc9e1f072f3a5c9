// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Two processes share a limit. One needs more than its half of the burst and
// borrows; then the limit is changed for both.
func Example() {
	config := func(name string, seeds ...string) fleet.Config {
		return fleet.Config{
			Fleet: "payments", Name: name,
			Limits: fleet.Limits{
				Limit:  limiter.Limit{Rate: 1000, Burst: 200},
				Roster: fleet.Roster{Members: []fleet.Share{{Name: "a"}, {Name: "b"}}},
			},
			Gossip: fleet.Gossip{Bind: "127.0.0.1:0", Seeds: seeds},
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var store register.Memory // or etcd, JetStream, Kafka, RabbitMQ, PostgreSQL, a file
	a, err := fleet.Start(config("a"), fleet.WithRegister(&store))
	if err != nil {
		panic(err)
	}
	defer a.Close()
	b, err := fleet.Start(config("b", a.Addr().String()), fleet.WithRegister(&store))
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
	number, err := b.Set(ctx, fleet.Change{Number: 1, Limit: &limiter.Limit{Rate: 500, Burst: 100}})
	fmt.Println("b sets half of it: configuration", number, err)
	// Output:
	// a waits for 150 of 200: <nil>
	// b sets half of it: configuration 2 <nil>
}
