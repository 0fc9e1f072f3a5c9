// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command echo guards routes of an echo service through echo.WrapMiddleware. Echo differs
// in two ways, and this example shows both. The request that echo passes to the middleware
// is valid only during the request, so replays go through the router. Echo renders a
// handler's error after its middleware, so this example renders it inside.
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

	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"

	"github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "echo:", err)
		os.Exit(1)
	}
}

// render lets echo answer a handler's error at once, and passes the error to the guard.
func render(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := next(c); err != nil {
			c.Error(err) // a status of 500 and above already is a failure
		}
		return nil
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

	e := echo.New()
	e.Use(middleware.Recover())
	payments, err := guardhttp.New(g, guardhttp.Config{Name: "payments"}, guardhttp.WithDeadLetters(letters), guardhttp.WithReplay(e))
	if err != nil {
		return err
	}
	pay := new(dependency)
	e.POST("/payments/:order", func(c echo.Context) error {
		if err := pay.use(c.Param("order")); err != nil {
			return echo.NewHTTPError(http.StatusBadGateway, err.Error())
		}
		return c.String(http.StatusOK, "charged")
	}, echo.WrapMiddleware(payments.Defer), render)
	e.GET("/payments/:order", func(c echo.Context) error {
		return c.String(http.StatusOK, "charged")
	}, echo.WrapMiddleware(payments.Wrap), render)

	server := httptest.NewServer(e) // in your program: e.Start, and e.Shutdown before payments.Close
	defer func() {
		server.Close()
		_, payErr := payments.Close(ctx)
		_, guardErr := g.Close(ctx)
		err = errors.Join(err, payErr, guardErr)
	}()

	client := server.Client()
	send := func(method, path string) int {
		req, err := http.NewRequestWithContext(ctx, method, server.URL+path, http.NoBody)
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
	fmt.Fprintln(out, "well:", send("POST", "/payments/1"), send("GET", "/payments/1"))
	pay.set(true)
	for range 4 {
		send("POST", "/payments/lost")
	}
	fmt.Fprintln(out, "failing:", send("POST", "/payments/lost"))
	fmt.Fprintln(out, "down:", send("POST", "/payments/2"), send("POST", "/payments/3"), send("GET", "/payments/1"))
	pay.set(false)
	if err := payments.Drained(ctx); err != nil {
		return err
	}
	fmt.Fprintln(out, "charged:", pay.seen())
	if pay.seen() != "1 2 3" {
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
