// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command gin guards a gin service in both ways that gin's own adapters allow: gin.WrapH
// puts a plain http.Handler on one route, and a wrapper around the whole engine guards
// gin's own handlers.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "gin:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	g, err := guard.New(guard.Config{Group: "shop"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	letters := dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
		fmt.Fprintln(out, "dead letter:", r.Origin.Subject)
		return nil
	})

	// One route: gin.WrapH takes the wrapped handler. Replays do not need gin.
	payments, err := guardhttp.New(g, guardhttp.Config{Name: "payments"}, guardhttp.WithDeadLetters(letters))
	if err != nil {
		return err
	}
	gin.SetMode(gin.ReleaseMode)
	pay := new(dependency)
	engine := gin.New()
	engine.Use(gin.Recovery())
	engine.POST("/payments", gin.WrapH(payments.Defer(guardhttp.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) error {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		return pay.use(string(body))
	}))))

	// gin's own handlers: the engine is wrapped, and its answers of 500 and above are
	// failures. A replay goes through the engine like any request.
	stock, err := guardhttp.New(g, guardhttp.Config{Name: "stock"}, guardhttp.WithDeadLetters(letters),
		guardhttp.WithDeferrable(func(r *http.Request) bool {
			return r.Method == http.MethodPut && strings.HasPrefix(r.URL.Path, "/stock/")
		}))
	if err != nil {
		return err
	}
	items := new(dependency)
	inner := gin.New()
	inner.Use(gin.Recovery())
	inner.PUT("/stock/:item", func(c *gin.Context) {
		if err := items.use(c.Param("item") + "=" + c.Query("n")); err != nil {
			c.JSON(http.StatusBadGateway, gin.H{"error": err.Error()})
			return
		}
		c.JSON(http.StatusOK, gin.H{"item": c.Param("item")})
	})
	engine.Any("/stock/*rest", gin.WrapH(stock.Wrap(inner)))

	server := httptest.NewServer(engine) // in your program: http.Server
	defer func() {
		server.Close()
		_, payErr := payments.Close(ctx)
		_, stockErr := stock.Close(ctx)
		_, guardErr := g.Close(ctx)
		err = errors.Join(err, payErr, stockErr, guardErr)
	}()

	client := server.Client()
	send := func(method, path, body string) int {
		req, err := http.NewRequestWithContext(ctx, method, server.URL+path, strings.NewReader(body))
		if err != nil {
			return 0
		}
		res, err := client.Do(req)
		if err != nil {
			return 0
		}
		_ = res.Body.Close()
		return res.StatusCode
	}
	fmt.Fprintln(out, "well:", send("POST", "/payments", "1"), send("PUT", "/stock/tea?n=1", ""), send("GET", "/stock/tea", ""))
	pay.set(true)
	items.set(true)
	for range 5 { // the first failures open the breakers
		send("POST", "/payments", "lost")
		send("PUT", "/stock/lost", "")
	}
	fmt.Fprintln(out, "down:", send("POST", "/payments", "2"), send("POST", "/payments", "3"),
		send("PUT", "/stock/tea?n=2", ""), send("PUT", "/stock/tea?n=3", ""), send("GET", "/stock/tea", ""))
	pay.set(false)
	items.set(false)
	if err := errors.Join(payments.Drained(ctx), stock.Drained(ctx)); err != nil {
		return err
	}
	fmt.Fprintln(out, "payments:", pay.seen())
	fmt.Fprintln(out, "stock:", items.seen())
	if pay.seen() != "1 2 3" || items.seen() != "tea=1 tea=2 tea=3" {
		return errors.New("that is not what should have happened")
	}
	return nil
}

// dependency is the service that the handlers call.
type dependency struct {
	mu   sync.Mutex
	down bool
	done []string
}

func (d *dependency) use(what string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return errors.New("connection refused")
	}
	d.done = append(d.done, what)
	return nil
}

func (d *dependency) set(down bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.down = down
}

func (d *dependency) seen() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.Join(d.done, " ")
}
