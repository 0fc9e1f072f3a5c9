// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// A lane gives its oldest messages out under a lease; what was not committed
// comes again, in the same order.
func Example() {
	ctx := context.Background()
	r, err := ringbuf.NewRing(ringbuf.Config{MaxCount: 100, MaxBytes: 1 << 20}, func(s string) int { return len(s) })
	if err != nil {
		panic(err)
	}
	defer r.Close()

	l := r.Lane(7) // one per partition or key
	if _, err := l.Put(ctx, "a", "b", "c"); err != nil {
		panic(err)
	}

	dst := make([]string, 2)
	for range 2 {
		lease, err := l.Lease(ctx, dst)
		if err != nil {
			panic(err)
		}
		fmt.Println(dst[:lease.Len()])
		if err := lease.Commit(1); err != nil { // the second one failed
			panic(err)
		}
	}
	fmt.Println(r.Stats().Count, "held")
	// Output:
	// [a b]
	// [b c]
	// 1 held
}

// A consumer's loop: Next settles what it has handled and takes what follows.
func ExampleLease_Next() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, err := ringbuf.NewRing[int](ringbuf.Config{}, nil)
	if err != nil {
		panic(err)
	}
	l := r.Lane(0)
	if _, err := l.Put(ctx, 1, 2, 3, 4, 5); err != nil {
		panic(err)
	}
	dst := make([]int, 2)
	lease, err := l.Lease(ctx, dst)
	for err == nil {
		fmt.Println(dst[:lease.Len()])
		if l.Len() == lease.Len() {
			cancel() // these were the last ones
		}
		lease, err = lease.Next(ctx, lease.Len(), dst)
	}
	fmt.Println(err, r.Stats().Count)
	// Output:
	// [1 2]
	// [3 4]
	// [5]
	// context canceled 0
}

// A full ring refuses and keeps what it has. The caller stops its intake.
func ExampleLane_TryPut() {
	r, err := ringbuf.NewRing[int](ringbuf.Config{MaxCount: 2}, nil)
	if err != nil {
		panic(err)
	}
	n, err := r.Lane(0).TryPut(1, 2, 3)
	fmt.Println(n, err, errors.Is(err, ringbuf.ErrFull))
	// Output: 2 ringbuf: full true
}

// text is a Codec for strings.
type text struct{}

func (text) Append(dst []byte, s string) []byte { return append(dst, s...) }
func (text) Decode(src []byte) (string, error)  { return string(src), nil }

// A slab ring keeps messages encoded, for holds of millions of them.
func ExampleNewSlabRing() {
	r, err := ringbuf.NewSlabRing(ringbuf.Config{MaxCount: 1 << 20, MaxBytes: 1 << 30}, text{})
	if err != nil {
		panic(err)
	}
	l := r.Lane(0)
	if _, err := l.TryPut("order 1", "order 2"); err != nil {
		panic(err)
	}
	all, err := l.Drain()
	fmt.Println(all, err)
	// Output: [order 1 order 2] <nil>
}
