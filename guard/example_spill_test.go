// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/stormguard-mq/stormguard/guard"
)

// A source whose policy has Spill holds a long outage on disk. What the last run has left
// there is handled first.
func ExampleGuard_Spilled() {
	dir, err := os.MkdirTemp("", "orders")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()

	g, err := guard.New(guard.Config{
		Group:    "orders",
		SpillDir: filepath.Join(dir, "spill"), // in earnest, a volume that outlives the process
		Policy:   guard.Policy{Spill: true},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer g.Close(context.Background())

	fmt.Println(len(g.Spilled()), "sources have messages on the disk")
	// Output: 0 sources have messages on the disk
}
