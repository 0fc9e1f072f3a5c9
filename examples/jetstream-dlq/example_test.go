// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// nats-server keeps one goroutine for the process.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.init.0.func1"))
}

// A consumer fails all of 30 messages: the budget lets 20 into the DLQ, whose balance it
// begins with, and they are repaired at 50 a second but for one, which is put aside.
func TestRun(t *testing.T) {
	const messages, budget, perSecond, burst = 30, 20, 50, 5
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
	var mu sync.Mutex
	var at []time.Time
	repair := func(body []byte) error {
		mu.Lock()
		defer mu.Unlock()
		if string(body) == "7" {
			return errors.New("cannot be repaired")
		}
		at = append(at, time.Now())
		return nil
	}
	consuming, interrupt := context.WithCancel(ctx)
	defer interrupt()
	ended := make(chan error, 1)
	go func() { ended <- run(consuming, nc.ConnectedUrl(), repair) }()

	// Once run listens, a consumer that is not guarded fails every message.
	var consumer jetstream.Consumer
	await(ctx, t, ended, func() bool {
		_, err := js.Stream(ctx, "UNREPAIRED")
		return err == nil
	})
	for i := range messages {
		if _, err := js.Publish(ctx, "orders.new", []byte(strconv.Itoa(i+1))); err != nil {
			t.Fatal(err)
		}
	}
	if consumer, err = js.Consumer(ctx, "ORDERS", "shipping"); err != nil {
		t.Fatal(err)
	}
	failing, err := consumer.Consume(func(m jetstream.Msg) { _ = m.Nak() })
	if err != nil {
		t.Fatal(err)
	}
	await(ctx, t, ended, func() bool {
		aside, err := js.Stream(ctx, "UNREPAIRED")
		if err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		defer mu.Unlock()
		return len(at) >= budget-1 && aside.CachedInfo().State.Msgs == 1
	})
	time.Sleep(200 * time.Millisecond) // more than the budget would come now
	failing.Stop()
	<-failing.Closed()
	interrupt()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	dlq, err := js.Stream(ctx, "ORDERS_DLQ")
	if err != nil {
		t.Fatal(err)
	}
	if n := dlq.CachedInfo().State.Msgs; n != budget || len(at) != budget-1 {
		t.Errorf("%d letters in the DLQ, %d repaired", n, len(at))
	}
	if took := at[len(at)-1].Sub(at[0]); took < (budget-1-burst-1)*time.Second/perSecond {
		t.Errorf("%d in %s is more than %d a second and a burst of %d", len(at), took, perSecond, burst)
	}
}

// await polls until ok.
func await(ctx context.Context, t *testing.T, ended <-chan error, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatal("ended too early:", err)
		case <-ctx.Done():
			t.Fatal(ctx.Err())
		}
	}
}
