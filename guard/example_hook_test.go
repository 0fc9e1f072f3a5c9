// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/stormguard-mq/stormguard/guard"
)

// A program that counts dead letters by cause and shows what is open. The hooks hand over
// and return.
func ExampleOnStateChange() {
	changes := make(chan guard.StateChange, 16)
	causes := make(chan string, 1024)
	g := guard.Must(guard.New(guard.Config{Group: "orders"},
		guard.WithLogger(slog.New(slog.DiscardHandler)),
		guard.OnStateChange(func(c guard.StateChange) { changes <- c }),
		guard.OnDeadLetter(func(d guard.DeadLetter) { causes <- d.Record.Cause.ID }),
	))
	defer g.Close(context.Background())
	charge := guard.Must(guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(context.Context, string) error { return nil }))

	_ = charge.ForceOpen(0)
	c := <-changes
	fmt.Println(c.Reason, c.Scope, c.Active, c.Detail)
	_ = charge.ForceClosed()
	c = <-changes
	fmt.Println(c.Reason, c.Scope, c.Active, c.Detail)
	// Output:
	// breaker orders/charge true operator
	// breaker orders/charge false operator
}
