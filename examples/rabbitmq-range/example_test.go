// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/examples/internal/payments"
	"github.com/stormguard-mq/stormguard/examples/internal/queues"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// An outage of a second and an order that cannot be charged: everything else is charged
// once, and one letter is in the DLQ.
func TestRun(t *testing.T) {
	for _, k := range []brokers.Kind{brokers.RabbitMQ, brokers.RabbitMQ4} {
		t.Run(string(k), func(t *testing.T) {
			t.Setenv(brokers.RabbitMQ.Env(), brokers.ForTest(t, k))
			outage(t)
		})
	}
}

func outage(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	queue, err := queues.New("orders")
	if err != nil {
		t.Fatal(err)
	}
	dead := queue.Name + ".dlq"
	defer queue.Close(dead)
	consuming, interrupt := context.WithCancel(ctx)
	defer interrupt()
	pay := payments.New()
	ended := make(chan error, 1)
	go func() { ended <- run(consuming, queues.URL(), queue.Name, pay.Charge) }()
	for i := 1; i <= payments.Orders; i++ {
		body := strconv.Itoa(i)
		if err := queue.Publish(ctx, body); err != nil {
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
	for n := 0; n == 0 && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		if n, err = queue.Len(dead); err != nil {
			t.Fatal(err)
		}
	}
	interrupt()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := pay.Check(false); err != nil {
		t.Error(err)
	}
	all, err := queue.Get(dead)
	if err != nil || len(all) != 1 {
		t.Fatalf("%d dead letters, %v", len(all), err)
	}
	letter, err := guardamqp.ReadDeadLetter(all[0])
	if err != nil || string(letter.Body) != strconv.Itoa(payments.Poison) || letter.Attempts < 1 {
		t.Errorf("%+v, %v", letter, err)
	}
	if letter.Error.Message == "amqp: rejected" {
		t.Error("the letter does not say why the order was not charged")
	}
}
