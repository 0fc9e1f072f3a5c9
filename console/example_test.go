// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
)

// A program serves its console on loopback; an operator pauses its queue.
func Example() {
	g := guard.Must(guard.New(guard.Config{Group: "billing"}))
	c, err := console.New(console.Config{Process: "billing-1"}, g)
	if err != nil {
		panic(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a program takes a port that its operators know, such as 8790
	if err != nil {
		panic(err)
	}
	server := &http.Server{Handler: c, ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(l) }()

	ctx, stop := context.WithCancel(context.Background())
	broker, handler, done := guardtest.NewBroker(), new(guardtest.Handler), make(chan error)
	go func() { done <- broker.Run(ctx, g, "orders", guardtest.Guarded{}, handler.HandleMessage) }()
	broker.Publish("orders", guardtest.Message{Body: []byte("{}")})
	_ = broker.Drained(ctx, "orders")

	// stormguard source pause orders --for 10m --why "ticket 7" --yes
	order := strings.NewReader(`{"action":"pause","sources":["orders"],"for":"10m","why":"ticket 7"}`)
	answer, err := http.Post("http://"+l.Addr().String()+"/order", "application/json", order)
	if err != nil {
		panic(err)
	}
	_ = answer.Body.Close()
	for _, h := range g.Source("orders").State().Holds {
		fmt.Printf("%v: %s, cleared by %s\n", h.Reason, h.Detail, h.ClearedBy)
	}

	_ = server.Close()
	c.Close()
	stop()
	if err := <-done; err != nil {
		panic(err)
	}
	_, _ = g.Close(context.Background())
	// Output:
	// operator: paused, cleared by operator: Resume; time
}
