// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
)

// A handler under test meets one order that nobody can handle.
func ExampleBroker() {
	broker := guardtest.NewBroker()
	for _, order := range []string{"tea", "coffee", "plutonium", "cake"} {
		broker.Publish("orders", guardtest.Message{Key: "table 4", Body: []byte(order)})
	}
	serve := func(_ context.Context, m *guardtest.Message) error {
		if string(m.Body) == "plutonium" {
			return guard.Permanent(errors.New("not on the menu"))
		}
		fmt.Printf("%s: %s\n", m.Key, m.Body)
		return nil
	}

	g, err := guard.New(guard.Config{})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	done := make(chan error)
	go func() { done <- broker.Run(ctx, g, "orders", guardtest.Guarded{}, serve) }()

	fmt.Println("drained:", broker.Drained(ctx, "orders"))
	for _, r := range broker.DeadLetters("orders").Records() {
		fmt.Printf("dead letter: %s: %s\n", r.Body, r.Error.Message)
	}
	stop()
	fmt.Println("stopped:", <-done)
	_, err = g.Close(context.Background())
	fmt.Println("closed:", err)
	// Output:
	// table 4: tea
	// table 4: coffee
	// table 4: cake
	// drained: <nil>
	// dead letter: plutonium: not on the menu
	// stopped: <nil>
	// closed: <nil>
}

// A dependency goes away and comes back; the handler keeps its own record.
func ExampleHandler() {
	broker, handler := guardtest.NewBroker(), new(guardtest.Handler)
	g, err := guard.New(guard.Config{})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	done := make(chan error)
	go func() { done <- broker.Run(ctx, g, "orders", guardtest.Guarded{}, handler.HandleMessage) }()

	handler.Down(guard.Unavailable(guardtest.ErrDown))
	for range 20 {
		broker.Publish("orders", guardtest.Message{Body: []byte("{}")})
	}
	time.Sleep(300 * time.Millisecond)
	fmt.Println("acked in the outage:", broker.Stats("orders").Acked)
	handler.Up()
	fmt.Println("drained:", broker.Drained(ctx, "orders"))
	fmt.Println("dead letters:", broker.DeadLetters("orders").Len())
	fmt.Println("lost:", handler.CheckNothingLost(20))
	fmt.Println("out of order:", handler.OutOfOrder(guard.OrderSource))
	stop()
	if err := <-done; err != nil {
		fmt.Println(err)
	}
	_, _ = g.Close(context.Background())
	// Output:
	// acked in the outage: 0
	// drained: <nil>
	// dead letters: 0
	// lost: <nil>
	// out of order: 0
}

// subject is an adapter's glue to the suite: it makes a queue at the broker,
// starts the adapter's consumer, and reads back what became of the messages.
type subject struct{ guardtest.Subject }

func newSubject(testing.TB, guardtest.Setup) guardtest.Subject { return subject{} }

// An adapter's author writes a Subject and this test. Facts about the broker go
// into Features; whatever they leave out is skipped by name.
func ExampleExercise() {
	TestAdapter := func(t *testing.T) {
		guardtest.Exercise(t, guardtest.Features{
			RealTime: true,
			Order:    guard.OrderSource,
			Keys:     true,
			Headers:  guardtest.HeaderBytes,
			Deadline: time.Minute,
		}, newSubject)
	}
	_ = TestAdapter // go test runs it
	// Output:
}
