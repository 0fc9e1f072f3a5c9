// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command function guards a plain function. It retries in place. While the breaker is open,
// callers are told when to come back.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "function:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	g, err := guard.New(guard.Config{
		Group:  "shop",
		Policy: guard.Policy{Retry: guard.Retry{Attempts: 3, Base: 10 * time.Millisecond}},
	}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()
	pay := &gateway{}
	charge, err := guard.Protect(g, guard.SourceConfig{Name: "charge"}, pay.charge)
	if err != nil {
		return err
	}

	// A short failure is retried in place: the caller does not see it.
	pay.fail = 1
	if err := charge.Do(ctx, 1); err != nil {
		return err
	}
	fmt.Fprintf(out, "order 1: charged by call %d\n", pay.calls)

	// An error that no retry can fix is returned at once.
	err = charge.Do(ctx, -2)
	fmt.Fprintf(out, "order -2: %v, after %d call\n", err, pay.calls-2)
	if err == nil {
		return errors.New("order -2 was charged")
	}

	// An outage: the next six calls fail. Five failures in a row open the breaker. After
	// that, only single probes get through.
	pay.calls, pay.fail = 0, 6
	var failed, refused int
	for order := 3; order <= 30; {
		err := charge.Do(ctx, order)
		var held *guard.HeldError
		switch {
		case err == nil:
			order++
		case errors.As(err, &held):
			refused++
			select { // the caller keeps the order: try again later
			case <-time.After(held.Until):
			case <-ctx.Done():
				return ctx.Err()
			}
		default: // the attempts are used up, or the breaker refused the next one
			failed++
		}
	}
	fmt.Fprintf(out, "orders 3 to 30: charged, %d calls failed in the outage\n", pay.calls-len(pay.charged)+1)
	fmt.Fprintf(out, "some callers saw failures: %t, others were held: %t\n", failed > 0, refused > 0)

	for i, order := range pay.charged {
		want := i + 2
		if i == 0 {
			want = 1
		}
		if order != want {
			return fmt.Errorf("charged %v", pay.charged)
		}
	}
	if len(pay.charged) != 29 || failed == 0 || refused == 0 {
		return errors.New("that is not what should have happened")
	}
	return nil
}

// gateway is the dependency. It is for one caller.
type gateway struct {
	fail, calls int
	charged     []int
}

func (p *gateway) charge(_ context.Context, order int) error {
	p.calls++
	if order < 0 {
		return guard.Permanent(errors.New("no such order"))
	}
	if p.fail > 0 {
		p.fail--
		return errors.New("gateway: connection refused")
	}
	p.charged = append(p.charged, order)
	return nil
}
