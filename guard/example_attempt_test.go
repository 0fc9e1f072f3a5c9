// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// A handler that asks a cheaper question once the first attempt has failed.
func ExampleAttempt() {
	g := guard.Must(guard.New(guard.Config{Policy: guard.Policy{Retry: guard.Retry{Base: time.Millisecond}}}))
	defer g.Close(context.Background())
	charge := guard.Must(guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(ctx context.Context, order string) error {
		n := guard.Attempt(ctx)
		fmt.Println("attempt", n, "of", order)
		if n == 1 {
			return errors.New("timed out")
		}
		return nil
	}))
	fmt.Println(charge.Do(context.Background(), "order 17"))
	// Output:
	// attempt 1 of order 17
	// attempt 2 of order 17
	// <nil>
}

// The start of a program: what is wrong with the configuration ends it.
func ExampleMust() {
	g := guard.Must(guard.New(guard.Config{Group: "orders"}))
	defer g.Close(context.Background())
	fmt.Println(g.Config().Group)
	// Output: orders
}
