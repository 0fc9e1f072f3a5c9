// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt_test

import (
	"fmt"
	"log"
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

var alpha, beta = crdt.Replica{Name: "alpha", Incarnation: 1}, crdt.Replica{Name: "beta", Incarnation: 1}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// What one replica changed after the mark that its peer acknowledged goes into
// a packet. It may be lost: what was not acknowledged is in the next one too.
func Example() {
	a, b := must(crdt.NewGCounter(alpha)), must(crdt.NewGCounter(beta))
	check(a.Add(3))
	check(b.Add(4))

	var acked uint64
	packet, upto := a.Delta(nil, acked, 1200)
	check(b.Merge(packet))
	acked = upto // b said so

	fmt.Println(must(b.Value()))
	packet, _ = a.Delta(nil, acked, 1200)
	fmt.Println(len(packet), "bytes of news")
	// Output:
	// 7
	// 0 bytes of news
}

func ExampleGCounter() {
	a, b := must(crdt.NewGCounter(alpha)), must(crdt.NewGCounter(beta))
	check(a.Add(2))
	check(b.Add(5))
	all, _ := b.Delta(nil, 0, math.MaxInt)
	check(a.Merge(all))
	check(a.Merge(all)) // again, which changes nothing
	fmt.Println(must(a.Value()), "of which", a.Of(beta), "by", beta)
	// Output: 7 of which 5 by beta#1
}

func ExampleLWWSet() {
	now := time.UnixMilli(1_700_000_000_000)
	clock := crdt.NewClock(func() time.Time { return now })

	paused := must(crdt.NewLWWSet(alpha))
	must(paused.Add("orders", "by ann", clock.Now()))
	must(paused.Add("payments", "by bob", clock.Now()))
	must(paused.Remove("orders", clock.Now()))
	for source, note := range paused.All() {
		fmt.Println(source, note)
	}

	now = now.Add(time.Hour) // nobody was cut off for as long as that
	fmt.Println(must(paused.Prune(clock.Now(), crdt.MinTombstoneAge)), "tombstone dropped")
	// Output:
	// payments by bob
	// 1 tombstone dropped
}

// Two clocks that are 174 ms apart and both right within 87 ms.
func ExampleClock() {
	now := time.UnixMilli(1_700_000_000_000)
	slow := crdt.NewClock(func() time.Time { return now.Add(-87 * time.Millisecond) })
	fast := crdt.NewClock(func() time.Time { return now.Add(87 * time.Millisecond) })

	stamp := fast.Now()
	fmt.Println("without a sample:", slow.Observe(beta, stamp), slow.Violations(beta))

	sent := now.Add(-87 * time.Millisecond)
	theirs := now.Add(87 * time.Millisecond)
	slow.Sample(beta, sent, theirs, theirs, sent)
	fmt.Println("with one:", slow.Observe(beta, stamp), slow.Now().Compare(stamp) > 0)

	stamp.Physical += 10_000
	fmt.Println("10 s ahead:", slow.Observe(beta, stamp), slow.Violations(beta))
	// Output:
	// without a sample: false 1
	// with one: true true
	// 10 s ahead: false 2
}

// Two replicas; a RESET voids what was added before it, however late that comes.
func ExampleOpLog() {
	type change struct {
		Key    uint64
		Amount int64
	}
	total := int64(0)
	count := func(r crdt.Record[change], counts bool) {
		fmt.Println(r.Origin.Name, r.Op, r.Body.Amount, counts)
		switch {
		case !counts:
		case r.Op == crdt.OpAdd:
			total += r.Body.Amount
		case r.Op == crdt.OpConsume:
			total -= r.Body.Amount
		case r.Op == crdt.OpReset:
			total = 0
		}
	}
	quiet := func(crdt.Record[change], bool) {}
	a := must(crdt.NewOpLog(alpha, crdt.OpLogConfig{}, count))
	b := must(crdt.NewOpLog(beta, crdt.OpLogConfig{}, quiet))
	a.Join(beta)

	must(b.Append(crdt.OpAdd, crdt.Stamp{}, change{Key: 1, Amount: 5}))
	must(a.Append(crdt.OpReset, crdt.Stamp{}, change{}))
	must(a.Append(crdt.OpAdd, crdt.Stamp{}, change{Key: 1, Amount: 2}))
	late, _ := b.Delta(nil, 0, 1200)
	check(a.Merge(late))
	fmt.Println("total", total, "in epoch", a.Epoch(), "with a backlog of", a.Depth())

	a.Ack(beta, a.Mark())
	fmt.Println("backlog", a.Depth())

	_, err := crdt.NewOpLog(alpha, crdt.OpLogConfig{}, func(crdt.Record[string], bool) {})
	fmt.Println(err)
	// Output:
	// alpha RESET 0 true
	// alpha ADD 2 true
	// beta ADD 5 false
	// total 2 in epoch 1 with a backlog of 3
	// backlog 0
	// crdt: record type: string is of type string, want integers of fixed size, floats, and arrays and structs of them
}
