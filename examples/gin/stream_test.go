// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// gin streams events behind an intake as it does without one, and sees its client go;
// a replay's stream ends by itself. gin asks each writer for http.CloseNotifier without
// looking, so one that has none would be a panic a request, and an open breaker.
func TestStream(t *testing.T) {
	g, err := guard.New(guard.Config{Group: "shop", Policy: guard.Policy{NoTimeout: true}})
	if err != nil {
		t.Fatal(err)
	}
	letters := dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
		t.Errorf("dead letter: %+v", r.Error)
		return nil
	})
	in, err := guardhttp.New(g, guardhttp.Config{Name: "ticks"}, guardhttp.WithDeadLetters(letters),
		guardhttp.WithDeferrable(func(r *http.Request) bool { return r.Method == http.MethodPost }))
	if err != nil {
		t.Fatal(err)
	}
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.Use(gin.CustomRecoveryWithWriter(io.Discard, func(c *gin.Context, v any) {
		t.Errorf("panic: %v", v)
		c.AbortWithStatus(http.StatusInternalServerError)
	}))
	gone, ended := make(chan bool, 1), make(chan int, 1)
	engine.GET("/ticks", func(c *gin.Context) {
		gone <- c.Stream(func(io.Writer) bool {
			c.SSEvent("tick", 1)
			time.Sleep(time.Millisecond)
			return true
		})
	})
	engine.POST("/ticks", func(c *gin.Context) {
		n := 0
		c.Stream(func(io.Writer) bool {
			c.SSEvent("tick", n)
			n++
			return n < 3
		})
		ended <- n
	})
	server := httptest.NewServer(in.Wrap(engine))
	for range 6 { // more than it takes to open the breaker
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/ticks", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := server.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(res.Body).ReadString('\n'); err != nil || line != "event:tick\n" {
			t.Errorf("%q, %v", line, err)
		}
		cancel()
		_ = res.Body.Close()
		if !<-gone {
			t.Error("the stream ended by itself")
		}
	}
	if st := g.Source("ticks").State(); st.Breaker.State != breaker.Closed || st.Tally.Failures > 0 {
		t.Errorf("%+v", st.Breaker)
	}
	if err := g.Source("ticks").ForceOpen(100 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/ticks", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusAccepted {
		t.Error(res.Status)
	}
	if n := <-ended; n != 3 {
		t.Errorf("the replay's stream had %d events", n)
	}
	server.Close()
	if _, err := in.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
