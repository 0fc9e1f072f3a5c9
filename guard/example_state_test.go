// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/stormguard-mq/stormguard/guard"
)

// With a state directory an operator's pause, the DLQ budget and the breakers outlive the
// process.
func ExampleConfig_restart() {
	dir, err := os.MkdirTemp("", "orders")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	process := func(work func(*guard.Source[int])) {
		g, err := guard.New(guard.Config{Group: "orders", StateDir: filepath.Join(dir, "state")})
		if err != nil {
			panic(err)
		}
		defer g.Close(context.Background())
		s, err := guard.Open(g, guard.SourceConfig{Name: "orders/0"}, guard.Limits{}, hopeless{}, func(context.Context, int) error { return nil })
		if err != nil {
			panic(err)
		}
		work(s)
	}

	process(func(s *guard.Source[int]) { s.Pause(0) })
	process(func(s *guard.Source[int]) { fmt.Println(s.State().Holds[0].Reason) })
	// Output: operator
}
