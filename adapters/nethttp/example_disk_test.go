// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guardhttp_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	guardhttp "github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// A request that was answered with a 202 from the disk is handled by the next process.
func ExampleIntake_Start() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "spill")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	letters := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })

	// process is what a program does from its start to its end.
	process := func(run func(g *guard.Guard, intake *guardhttp.Intake, mux *http.ServeMux)) {
		g, err := guard.New(guard.Config{SpillDir: filepath.Join(dir, "orders"), Policy: guard.Policy{Spill: true}})
		if err != nil {
			panic(err)
		}
		mux := http.NewServeMux()
		intake, err := guardhttp.New(g, guardhttp.Config{Name: "orders"}, guardhttp.WithDeadLetters(letters), guardhttp.WithReplay(mux))
		if err != nil {
			panic(err)
		}
		mux.Handle("POST /orders", intake.Defer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			fmt.Printf("order %s\n", body)
		})))
		run(g, intake, mux)
		if _, err := intake.Close(ctx); err != nil {
			panic(err)
		}
		if _, err := g.Close(ctx); err != nil {
			panic(err)
		}
	}

	process(func(g *guard.Guard, _ *guardhttp.Intake, mux *http.ServeMux) {
		_ = g.Source("orders").ForceOpen(0) // as an outage would
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, "/orders", strings.NewReader("tea")))
		fmt.Println(w.Code, w.Header().Get(guardhttp.HeaderHold))
	})
	process(func(_ *guard.Guard, intake *guardhttp.Intake, _ *http.ServeMux) {
		fmt.Println("the next process holds", intake.Stats().Held)
		intake.Start()
		if err := intake.Drained(ctx); err != nil {
			panic(err)
		}
	})
	// Output:
	// 202 disk
	// the next process holds 1
	// order tea
}
