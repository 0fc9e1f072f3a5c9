// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
	"github.com/stormguard-mq/stormguard/internal/ringbuf/spill"
)

// text is a Codec for strings.
type text struct{}

func (text) Append(dst []byte, s string) []byte { return append(dst, s...) }
func (text) Decode(src []byte) (string, error)  { return string(src), nil }

// What was put before a restart is drained after it, in order.
func Example() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "spill")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cfg := spill.Config{Dir: dir, MaxBytes: 1 << 20}

	s, _, err := spill.Open(cfg, text{})
	if err != nil {
		panic(err)
	}
	if _, err := s.Lane("orders/7").Put(ctx, "a", "b", "c"); err != nil {
		panic(err)
	}
	// They are synced: their broker may be told that they are done with.
	if err := s.Close(); err != nil {
		panic(err)
	}

	s, found, err := spill.Open(cfg, text{})
	if err != nil {
		panic(err)
	}
	defer s.Close()
	fmt.Println(found.Messages, "messages,", len(found.Damaged), "damaged")
	for l := range s.Lanes() {
		dst := make([]string, 2)
		for {
			lease, err := l.TryLease(dst)
			if errors.Is(err, ringbuf.ErrEmpty) {
				break
			}
			if err != nil {
				panic(err)
			}
			fmt.Println(l.Name(), dst[:lease.Len()])
			if err := lease.Commit(lease.Len()); err != nil {
				panic(err)
			}
		}
	}
	// Output:
	// 3 messages, 0 damaged
	// orders/7 [a b]
	// orders/7 [c]
}

// A caller that must not wait for the disk is called back.
func ExampleLane_Append() {
	dir, err := os.MkdirTemp("", "spill")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s, _, err := spill.Open(spill.Config{Dir: dir}, text{})
	if err != nil {
		panic(err)
	}
	synced := make(chan error, 1)
	if err := s.Lane("orders/7").Append(func(err error) { synced <- err }, "a", "b"); err != nil {
		panic(err)
	}
	fmt.Println(<-synced, s.Lane("orders/7").Len())
	fmt.Println(s.Close())
	// Output:
	// <nil> 2
	// <nil>
}
