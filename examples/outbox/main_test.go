// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// nats-server keeps one goroutine for the process.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"))
}

const orders = 100

// Each order comes twice, the program is started anew in the middle, and one in 30
// rows is sent without the program hearing of it. Each order is charged once.
func TestRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	db := brokers.ForTest(t, brokers.Postgres)
	pool, err := pgxpool.New(ctx, db)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	schema := fmt.Sprintf("outbox_%016x", rand.Uint64())
	if _, err := pool.Exec(ctx, "CREATE SCHEMA "+schema); err != nil {
		t.Fatal(err)
	}
	db += "&options=-c%20search_path%3D" + schema

	nc, stop, err := embedded.Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}}); err != nil {
		t.Fatal(err)
	}
	for i := range 2 * orders {
		if _, err := js.Publish(ctx, "orders", []byte(strconv.Itoa(i/2))); err != nil {
			t.Fatal(err)
		}
	}
	half := make(chan struct{})
	calls := 0
	unheard := func(ctx context.Context, js jetstream.JetStream, key string, body []byte) error {
		err := send(ctx, js, key, body)
		if calls++; calls == orders/2 {
			close(half)
		}
		if calls%30 == 29 && err == nil {
			err = errors.New("the answer was lost")
		}
		return err
	}
	start := func() (end func()) {
		running, interrupt := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- run(running, nc.ConnectedUrl(), db, unheard) }()
		return func() {
			interrupt()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	end := start()
	select {
	case <-half:
	case <-ctx.Done():
		t.Error("half of the orders are not sent in time")
	}
	end()
	end = start()
	defer end()

	stream, err := js.Stream(ctx, "CHARGES")
	if err != nil {
		t.Fatal(err)
	}
	reader, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	charged := make(map[string]bool)
	for len(charged) < orders {
		m, err := reader.Next(jetstream.FetchMaxWait(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		if body := string(m.Data()); charged[body] {
			t.Fatalf("order %s is charged twice", body)
		} else {
			charged[body] = true
		}
	}
	consumer, err := js.Consumer(ctx, "ORDERS", "billing")
	if err != nil {
		t.Fatal(err)
	}
	for left := 1; left > 0; { // all deliveries are handled, and all rows sent
		info, err := consumer.Info(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := pool.QueryRow(ctx, "SELECT count(*) FROM "+schema+".outbox").Scan(&left); err != nil {
			t.Fatal(err)
		}
		left += info.NumAckPending + int(info.NumPending)
	}
	if info, err := stream.Info(ctx); err != nil || info.State.Msgs != orders {
		t.Errorf("%d charges, %v; want %d", info.State.Msgs, err, orders)
	}
}
