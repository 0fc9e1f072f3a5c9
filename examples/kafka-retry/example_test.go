// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/examples/internal/topics"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// The client's metrics keep one goroutine for the process.
var clients = goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, clients) }

// The orders of a customer who is not there yet wait in the retry topic, in their order;
// those of another go on, and none is dead.
func TestRun(t *testing.T) {
	t.Setenv(brokers.Kafka.Env(), brokers.ForTest(t, brokers.Kafka))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	topic, err := topics.New("orders")
	if err != nil {
		t.Fatal(err)
	}
	parked := topic.Name + "." + topic.Group + ".retry.1"
	defer topic.Close(topic.Name+".dlq", parked)
	var mu sync.Mutex
	there := false // the customer
	charged := map[string][]int{}
	all := make(chan struct{})
	charge := func(customer string, order int) error {
		mu.Lock()
		defer mu.Unlock()
		if customer == "late" && !there {
			return errors.New("no such customer")
		}
		if charged[customer] = append(charged[customer], order); customer == "late" && len(charged[customer]) == 3 {
			close(all)
		}
		return nil
	}
	consuming, interrupt := context.WithCancel(ctx)
	defer interrupt()
	ended := make(chan error, 1)
	go func() {
		ended <- run(consuming, topics.Addrs(), topic.Name, topic.Group, []time.Duration{2 * time.Second}, charge)
	}()

	publish := func(customer string, order int) {
		if err := topic.PublishKey(customer, strconv.Itoa(order)); err != nil {
			t.Error(err)
		}
	}
	for order := range 3 {
		publish("late", order)
	}
	sent := 0
	for settled := false; !settled; sent++ { // others succeed
		publish("early", sent)
		mu.Lock()
		runs := len(charged) > 0
		mu.Unlock()
		if runs { // and its topics are there
			records, err := topic.Read(ctx, parked)
			if err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			there = there || len(records) > 0
			mu.Unlock()
		}
		select {
		case <-all:
			settled = true
		case <-ctx.Done():
			t.Fatal("not all are charged within a minute")
		case err := <-ended:
			t.Fatal("ended too early:", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	interrupt()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if late, early := charged["late"], charged["early"]; !slices.Equal(late, []int{0, 1, 2}) || !slices.IsSorted(early) || len(early) < sent/2 {
		t.Errorf("charged %v of late, %v of %d of early", late, early, sent)
	}
	if dead, err := topic.Read(t.Context(), topic.Name+".dlq"); err != nil || len(dead) > 0 {
		t.Errorf("%d dead letters, %v", len(dead), err)
	}
}
