// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
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
	// publish returns when the broker has the messages.
	publish(ctx context.Context, ms []message) error
	// left is how many messages are not settled, as far as the broker tells.
	left(ctx context.Context) (int, error)
	// letters are the bodies in the DLQ.
	letters(ctx context.Context) ([][]byte, error)
	// consume guards a consumer until ctx ends; a process of its own calls it, one of
	// several that may run.
	consume(ctx context.Context, g *guard.Guard, handle func(ctx context.Context, body []byte) error) error
}

// A message to publish. Those of one key keep their order.
type message struct {
	key  string
	body []byte
}

// A kind of broker.
type kind struct {
	open    func(Job) broker
	found   brokers.Kind // what to look for without an address
	ordered chaos.Redelivery
}

var kinds = map[string]kind{
	"nats":     {func(j Job) broker { return newNATS(j) }, "", chaos.Redelivers},
	"kafka":    {func(j Job) broker { return newKafka(j) }, brokers.Kafka, chaos.KeepsOrder},
	"rabbitmq": {func(j Job) broker { return newRabbitMQ(j) }, brokers.RabbitMQ, chaos.Redelivers},
}

// order is what a broker keeps of the order with that many consumers.
func (k kind) order(consumers int) chaos.Redelivery {
	if consumers > 1 && k.ordered != chaos.KeepsOrder {
		return chaos.Competes
	}
	return k.ordered
}

// Brokers are the names of the brokers that a run knows.
func Brokers() []string { return slices.Sorted(maps.Keys(kinds)) }

// address is where the broker is, and how to end it if it was started for this run.
func address(ctx context.Context, name, url string, stderr io.Writer) (string, func(), error) {
	none := func() {}
	if url != "" {
		return url, none, nil
	}
	if found := kinds[name].found; found != "" {
		fmt.Fprintf(stderr, "looking for %s, or starting it; the very first start installs it and takes minutes\n", name)
		url, err := brokers.Find(ctx, found)
		return url, none, err
	}
	return startNATS(ctx)
}

// patiently tries for half a minute, as whoever starts processes would: a process may begin
// while the network is broken.
func patiently[T any](ctx context.Context, try func() (T, error)) (T, error) {
	for over := time.Now().Add(30 * time.Second); ; wait(ctx, 100*time.Millisecond) {
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
