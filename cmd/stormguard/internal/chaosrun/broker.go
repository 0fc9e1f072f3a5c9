// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/chaos"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// A broker publishes and consumes on queues of the run's own.
type broker interface {
	// lay makes the run's queues; remove deletes them.
	lay(ctx context.Context) error
	remove(ctx context.Context)
	// publish returns when the broker has the messages. After an error the broker may have some.
	publish(ctx context.Context, ms []message) error
	// left returns the number of unsettled messages, as far as the broker tells.
	left(ctx context.Context) (int, error)
	// letters returns the bodies in the DLQ.
	letters(ctx context.Context) ([][]byte, error)
	// consume runs a guarded consumer until ctx ends. Each consumer's process calls it on a
	// broker of its own.
	consume(ctx context.Context, g *guard.Guard, handle func(ctx context.Context, body []byte) error) error
}

// A message to publish. Messages of one key keep their order. A broker that knows ids takes a
// message only once.
type message struct {
	id   string
	key  string
	body []byte
}

// A kind of broker.
type kind struct {
	open    func(Job) broker
	own     brokers.Kind // started for a run with faults of the broker
	found   brokers.Kind // found or started if the run has no address; empty: an embedded one
	ordered chaos.Redelivery
}

var kinds = map[string]kind{
	"nats":     {func(j Job) broker { return newNATS(j) }, brokers.NATS, "", chaos.Redelivers},
	"kafka":    {func(j Job) broker { return newKafka(j) }, brokers.Kafka, brokers.Kafka, chaos.KeepsOrder},
	"rabbitmq": {func(j Job) broker { return newRabbitMQ(j) }, brokers.RabbitMQ, brokers.RabbitMQ, chaos.Redelivers},
}

// Brokers returns the names that Config.Broker may have, sorted.
func Brokers() []string { return slices.Sorted(maps.Keys(kinds)) }

// patiently retries for three minutes, as a supervisor of processes would: a process may start
// while the network or the broker is broken.
func patiently[T any](ctx context.Context, try func() (T, error)) (T, error) {
	for over := time.Now().Add(3 * time.Minute); ; wait(ctx, 100*time.Millisecond) {
		made, err := try()
		if err == nil || ctx.Err() != nil || time.Now().After(over) {
			return made, err
		}
	}
}

// A message's body.
type body struct {
	ID     int    `json:"id"`
	Key    int    `json:"key"`
	Poison bool   `json:"poison,omitempty"`
	Pad    string `json:"pad"`
}

func read(b []byte) (m body, err error) {
	if err = json.Unmarshal(b, &m); err != nil {
		err = fmt.Errorf("chaos: body: %w", err)
	}
	return m, err
}
