// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// A shop whose payments may be down: whoever asks is told when to come back,
// and orders are taken all the same.
func Example() {
	ctx := context.Background()
	g, err := guard.New(guard.Config{Group: "shop"})
	if err != nil {
		panic(err)
	}
	letters := dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
		fmt.Println("dead letter:", r.Origin.Subject, r.Error.Message)
		return nil
	})
	payments, err := guardhttp.New(g, guardhttp.Config{Name: "payments"}, guardhttp.WithDeadLetters(letters))
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /balance", payments.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "42")
	})))
	mux.Handle("POST /orders", payments.Defer(guardhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		held, _ := guardhttp.Replayed(r.Context())
		fmt.Printf("order %s, replay %d\n", body, held.Attempt)
		return nil
	})))
	ask := func(method, path, body string) {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body)))
		h := w.Header()
		fmt.Printf("%s %s: %d, Retry-After %q, hold %q\n", method, path, w.Code, h.Get("Retry-After"), h.Get(guardhttp.HeaderHold))
	}

	ask("GET", "/balance", "")
	_ = g.Source("payments").ForceOpen(90 * time.Second) // as an outage would
	ask("GET", "/balance", "")
	ask("POST", "/orders", "tea")
	ask("POST", "/orders", "cake")
	_ = g.Source("payments").ForceClosed()
	if err := payments.Drained(ctx); err != nil {
		panic(err)
	}
	ask("POST", "/orders", "coffee")
	if _, err := payments.Close(ctx); err != nil {
		panic(err)
	}
	if _, err := g.Close(ctx); err != nil {
		panic(err)
	}
	// Output:
	// GET /balance: 200, Retry-After "", hold ""
	// GET /balance: 503, Retry-After "90", hold ""
	// POST /orders: 202, Retry-After "", hold "memory"
	// POST /orders: 202, Retry-After "", hold "memory"
	// order tea, replay 1
	// order cake, replay 1
	// order coffee, replay 0
	// POST /orders: 200, Retry-After "", hold ""
}
