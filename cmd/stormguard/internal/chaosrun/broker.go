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

// A broker is where a run publishes and consumes, on queues of its own.
type broker interface {
	// lay makes the run's queues; remove deletes them.
	lay(ctx context.Context) error
	remove(ctx context.Context)
	// publish returns when the broker has the messages. After an error it may have some.
	publish(ctx context.Context, ms []message) error
	// left is how many messages are not settled, as far as the broker tells.
	left(ctx context.Context) (int, error)
	// letters are the bodies in the DLQ.
	letters(ctx context.Context) ([][]byte, error)
	// consume guards a consumer until ctx ends; a process of its own calls it, one of
	// several that may run.
	consume(ctx context.Context, g *guard.Guard, handle func(ctx context.Context, body []byte) error) error
}

// A message to publish. Those of one key keep their order. A broker that knows ids takes one
// that comes twice once.
type message struct {
	id   string
	key  string
	body []byte
}

// A kind of broker.
type kind struct {
	open    func(Job) broker
	own     brokers.Kind // what to start for a run that breaks it
	found   brokers.Kind // what to look for without an address; empty: one is embedded
	ordered chaos.Redelivery
}

var kinds = map[string]kind{
	"nats":     {func(j Job) broker { return newNATS(j) }, brokers.NATS, "", chaos.Redelivers},
	"kafka":    {func(j Job) broker { return newKafka(j) }, brokers.Kafka, brokers.Kafka, chaos.KeepsOrder},
	"rabbitmq": {func(j Job) broker { return newRabbitMQ(j) }, brokers.RabbitMQ, brokers.RabbitMQ, chaos.Redelivers},
}

// Brokers are the names of the brokers that a run knows.
func Brokers() []string { return slices.Sorted(maps.Keys(kinds)) }

// patiently tries for three minutes, as whoever starts processes would: a process may begin
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
