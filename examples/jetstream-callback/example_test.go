// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/examples/internal/payments"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// nats-server keeps one goroutine for the process.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"))
}

// An outage of a second and a message that is no number: everything else is charged
// once, and one letter is in the DLQ.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nc, stop, err := embedded.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}}); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= payments.Orders; i++ {
		body := strconv.Itoa(i)
		if i == payments.Poison {
			body = "thirteen"
		}
		if _, err := js.Publish(ctx, "orders.new", []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	consuming, interrupt := context.WithCancel(ctx)
	defer interrupt()
	pay := payments.New()
	ended := make(chan error, 1)
	go func() { ended <- run(consuming, nc.ConnectedUrl(), pay.Charge) }()
	select {
	case <-pay.Done():
	case <-ctx.Done():
		t.Error("not all are charged within a minute")
	case err := <-ended:
		t.Fatal("ended too early:", err)
	}
	dead := letters(ctx, t, js)
	interrupt()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := pay.Check(false); err != nil {
		t.Error(err)
	}
	consumer, err := js.Consumer(ctx, "ORDERS", "billing")
	if err != nil {
		t.Fatal(err)
	}
	for { // the server has the acks, and takes them in beside its answers
		info, err := consumer.Info(ctx)
		if err != nil {
			t.Fatalf("left at the server: %+v, %v", consumer.CachedInfo(), err)
		}
		if info.NumAckPending == 0 && info.NumPending == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	letter, err := guardnats.ReadDeadLetter(dead)
	if err != nil || letter.Origin.Sequence != payments.Poison || string(letter.Body) != "thirteen" || letter.Attempts < 1 {
		t.Errorf("%+v, %v", letter, err)
	}
	if letter.Error.Message == "nats: nak" {
		t.Error("the letter does not say why the order was not charged")
	}
}

// letters waits for the one dead letter.
func letters(ctx context.Context, t *testing.T, js jetstream.JetStream) jetstream.Msg {
	t.Helper()
	stream, err := js.Stream(ctx, "ORDERS_DLQ")
	if err != nil {
		t.Fatal(err)
	}
	reader, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := reader.Next(jetstream.FetchMaxWait(30 * time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if info, err := stream.Info(ctx); err != nil || info.State.Msgs != 1 {
		t.Errorf("%+v, %v", info, err)
	}
	return m
}
