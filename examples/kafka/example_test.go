// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/examples/internal/payments"
	"github.com/stormguard-mq/stormguard/examples/internal/topics"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// The client's metrics keep one goroutine for the process.
var clients = goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, clients) }

// An outage of a second and a message that is no number: everything else is charged
// once, in order, and one letter is in the DLQ.
func TestRun(t *testing.T) {
	t.Setenv(brokers.Kafka.Env(), brokers.ForTest(t, brokers.Kafka))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	topic, err := topics.New("orders")
	if err != nil {
		t.Fatal(err)
	}
	defer topic.Close(topic.Name + ".dlq")
	consuming, interrupt := context.WithCancel(ctx)
	defer interrupt()
	pay := payments.New()
	ended := make(chan error, 1)
	go func() { ended <- run(consuming, topics.Addrs(), topic.Name, topic.Group, pay.Charge) }()
	for i := 1; i <= payments.Orders; i++ {
		body := strconv.Itoa(i)
		if i == payments.Poison {
			body = "thirteen"
		}
		if err := topic.Publish(body); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-pay.Done():
	case <-ctx.Done():
		t.Error("not all are charged within a minute")
	case err := <-ended:
		t.Fatal("ended too early:", err)
	}
	interrupt()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := pay.Check(true); err != nil {
		t.Error(err)
	}
	dead, err := topic.Read(t.Context(), topic.Name+".dlq")
	if err != nil || len(dead) != 1 {
		t.Fatalf("%d dead letters, %v", len(dead), err)
	}
	letter, err := guardkafka.ReadDeadLetter(dead[0])
	if err != nil || letter.Origin.Offset != payments.Poison-1 || string(letter.Body) != "thirteen" || letter.Attempts != 1 {
		t.Errorf("%+v, %v", letter, err)
	}
}
