// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"
)

// order is a message's body.
type order struct {
	ID       int    `json:"id"`
	Customer string `json:"customer"`
	Cents    int    `json:"cents"`
}

func parseOrder(body []byte) (o order, err error) {
	if err = json.Unmarshal(body, &o); err != nil {
		err = fmt.Errorf("demo: order: %w", err)
	}
	return o, err
}

// publish publishes all orders at the rate of cfg, also while consumers fail. It
// returns when the broker has confirmed or refused each of them.
func publish(ctx context.Context, p plumbing, cfg Config, clock func() time.Duration, ledger *Ledger) error {
	n := cfg.messages()
	type sent struct {
		id   int
		wait func(context.Context) error
	}
	all := make(chan sent, n)
	result := make(chan error, 1)
	go func() { // ends when all is closed
		var first error
		for s := range all {
			if err := s.wait(ctx); err == nil {
				ledger.Confirm(s.id)
			} else if first == nil {
				first = fmt.Errorf("demo: message %d was not confirmed: %w", s.id, err)
			}
		}
		result <- first
	}()

	random := rand.New(rand.NewPCG(cfg.Seed, 0)) // the same messages for the same seed
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	err := func() error {
		for done := 0; done < n; {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
			for due := min(n, int(clock().Seconds()*float64(cfg.Rate))); done < due; done++ {
				o := order{Customer: fmt.Sprintf("c-%03d", random.IntN(1000)), Cents: 100 + random.IntN(10_000)}
				o.ID = ledger.Send(clock())
				body, err := json.Marshal(o)
				if err != nil {
					return err
				}
				wait, err := p.send(ctx, body)
				if err != nil {
					return fmt.Errorf("demo: publish: %w", err)
				}
				all <- sent{o.ID, wait}
			}
		}
		return nil
	}()
	close(all)
	if failed := <-result; err == nil {
		err = failed
	}
	return err
}
