// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command nethttp is a shop behind net/http whose payments fail under load. Clients with a
// question are told when to come back. Orders are accepted and charged later, in order. The
// program prints what clients and the dependency saw.
//
//	go run ./examples/nethttp --outage 20s --rate 1000 --json
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/stormguard-mq/stormguard/adapters/nethttp"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Stdout, os.Args[1:])
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "nethttp:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, out io.Writer, args []string) error {
	var p plan
	var asJSON bool
	flags := flag.NewFlagSet("nethttp", flag.ContinueOnError)
	flags.DurationVar(&p.outage, "outage", 3*time.Second, "how long the dependency is down")
	flags.IntVar(&p.rate, "rate", 500, "requests per second, every other one an order")
	flags.BoolVar(&asJSON, "json", false, "one line of JSON")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if p.rate < 10 || p.rate > 100_000 {
		return fmt.Errorf("--rate: %d is not within 10 and 100000", p.rate)
	}
	if p.outage < time.Second || p.outage > time.Hour {
		return fmt.Errorf("--outage: %s is not within 1s and 1h", p.outage)
	}
	f, err := p.run(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		err = json.NewEncoder(out).Encode(f)
	} else {
		f.print(out)
	}
	return errors.Join(err, f.check())
}

// shop is the service, which you would write.
type shop struct {
	g        *guard.Guard
	payments *guardhttp.Intake
	server   *http.Server
	client   *http.Client
	gateway  string // the dependency's address
	addr     string
}

func openShop(ctx context.Context, gateway string, window int) (*shop, error) {
	g, err := guard.New(guard.Config{Group: "shop", Policy: guard.Policy{Window: window, Timeout: 5 * time.Second}}, guard.WithLogger(slog.Default()))
	if err != nil {
		return nil, err
	}
	// In a real service this is a queue, a table, or a file that somebody reads.
	letters := dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
		fmt.Fprintln(os.Stderr, "dead letter:", r.Origin.Subject, r.Origin.MessageID, r.Error.Message)
		return nil
	})
	payments, err := guardhttp.New(g, guardhttp.Config{Name: "payments"}, guardhttp.WithDeadLetters(letters))
	if err != nil {
		return nil, err
	}
	s := &shop{g: g, payments: payments, gateway: gateway, client: newClient()}
	mux := http.NewServeMux()
	mux.Handle("GET /balance", payments.Wrap(guardhttp.HandlerFunc(s.charge)))  // a client waits for the answer
	mux.Handle("POST /orders", payments.Defer(guardhttp.HandlerFunc(s.charge))) // nobody waits
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := g.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	s.server, s.addr, err = listen(ctx, mux)
	return s, err
}

// charge calls the dependency. The breaker sees its error, or an answer of 500 and above.
// The guard retries held requests only.
func (s *shop) charge(w http.ResponseWriter, r *http.Request) error {
	req, err := http.NewRequestWithContext(r.Context(), r.Method, s.gateway, r.Body)
	if err != nil {
		return guard.Permanent(err)
	}
	res, err := s.client.Do(req) //nolint:gosec // the address is ours, not the request's
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("gateway: %s", res.Status)
	}
	_, err = io.Copy(w, res.Body)
	return err
}

// close closes first the server, then the hold, then the guard.
func (s *shop) close(ctx context.Context) error {
	err := s.server.Shutdown(ctx)
	_, closeErr := s.payments.Close(ctx)
	_, guardErr := s.g.Close(ctx)
	s.client.CloseIdleConnections()
	return errors.Join(err, closeErr, guardErr)
}

// listen serves on loopback.
func listen(ctx context.Context, h http.Handler) (*http.Server, string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second}
	go func() { _ = s.Serve(l) }() // until Shutdown
	return s, "http://" + l.Addr().String(), nil
}

func newClient() *http.Client {
	const most = 1024 // a slow server must not use up all files of this process
	return &http.Client{Transport: &http.Transport{MaxIdleConns: most, MaxIdleConnsPerHost: most, MaxConnsPerHost: most, IdleConnTimeout: time.Minute}}
}
