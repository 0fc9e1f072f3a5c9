// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit_test

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// A dependency goes down and comes back. Time is whatever the caller says.
func Example() {
	b, err := circuit.New("orders/3", breaker.Config{Successes: 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	now := time.Second
	handle := func(head uint64, works bool) {
		t, ok := b.Enter()
		if !ok {
			var r circuit.Refusal
			if t, r = b.Admit(now, head); !r.OK() {
				fmt.Printf("%v: delivery %d waits, %v until %v\n", now, head, r.State, r.Until)
				return
			}
			fmt.Printf("%v: delivery %d is a probe\n", now, head)
		}
		if works {
			b.Success(now, t)
		} else {
			b.Failure(now, t, true)
		}
	}
	for head := range uint64(6) {
		handle(head, false)
	}
	now += 100 * time.Millisecond
	handle(5, false)
	now += 200 * time.Millisecond
	handle(5, true)
	handle(6, true)
	for _, c := range b.Changes(nil) {
		fmt.Printf("%v: %v to %v, %s\n", c.At, c.From, c.To, c.Cause)
	}
	// Output:
	// 1s: delivery 5 waits, open until 1.1s
	// 1.1s: delivery 5 is a probe
	// 1.3s: delivery 5 is a probe
	// 1.3s: delivery 6 is a probe
	// 1s: closed to open, run
	// 1.1s: open to half-open, run
	// 1.1s: half-open to open, probe
	// 1.3s: open to half-open, probe
	// 1.3s: half-open to closed, probe
}

// A source that counts its successes anyway pays nothing for the breaker's.
func ExampleBreaker_Attach() {
	b, _ := circuit.New("orders/3", breaker.Config{})
	var acked uint64 // an atomic, where another goroutine writes it
	detach := b.Attach(func() uint64 { return acked })
	defer detach()

	acked += 97
	for range 3 {
		t, _ := b.Enter()
		b.Failure(time.Second, t, true)
	}
	s := b.Snapshot(time.Second)
	fmt.Printf("%d of %d failed: %.0f %%, at least %.1f %% with confidence, %v\n",
		s.Failures, s.Successes+s.Failures, s.Ratio*100, s.Bound*100, s.State)
	// Output: 3 of 100 failed: 3 %, at least 0.6 % with confidence, closed
}

// A verdict from elsewhere holds for as long as it says, whatever still runs.
func ExampleBreaker_Force() {
	b, _ := circuit.New("orders/3", breaker.Config{})
	running, _ := b.Enter()
	b.Force(0, 5*time.Second, "storm")
	b.Success(time.Second, running) // too late to matter
	_, r := b.Admit(5*time.Second-1, 1)
	fmt.Println(r.State, r.Cause, r.Until)
	t, _ := b.Admit(5*time.Second, 1)
	fmt.Println("probe:", t.Probe())
	// Output:
	// open storm 5s
	// probe: true
}

// A refused connection says whose fault it is: one delivery that is retried is
// evidence enough.
func ExampleBreaker_Unavailable() {
	b, _ := circuit.New("orders/3", breaker.Config{})
	for try := 1; b.Closed(); try++ {
		t, _ := b.Enter()
		b.Unavailable(time.Second, t, try == 1)
	}
	s := b.Snapshot(time.Second)
	fmt.Println(s.State, s.Cause)
	// Output: open run
}

// A dependency that fails one call in three is half-open, and carries what it can.
func ExampleBreaker_Passing() {
	b, _ := circuit.New("orders/3", breaker.Config{})
	b.Trip(0, "test")
	now := 100 * time.Millisecond
	for call := range uint64(12) {
		t, r := b.Admit(now, call+1)
		switch {
		case !r.OK():
			fmt.Println("refused")
		case call%3 == 2:
			b.Failure(now, t, true)
		default:
			b.Success(now, t)
		}
	}
	var probes []circuit.Token
	for t, r := b.Admit(now, 0); r.OK(); t, r = b.Admit(now, 0) {
		probes = append(probes, t)
	}
	fmt.Println(b.Snapshot(now).State, b.Passing(), len(probes), "at once")
	// Output: half-open true 32 at once
}

// A health check that succeeds ends the open period, and the next delivery probes.
func ExampleBreaker_Hasten() {
	b, _ := circuit.New("orders/3", breaker.Config{Base: time.Minute})
	b.Trip(0, "test")
	_, r := b.Admit(time.Second, 1)
	fmt.Println(r.State, "until", r.Until)
	b.Hasten(time.Second)
	t, _ := b.Admit(time.Second, 1)
	fmt.Println("probe:", t.Probe())
	// Output:
	// open until 1m0s
	// probe: true
}

// A message that fails twice while others that share its dependency succeed is at
// fault itself.
func ExampleBreaker_Life() {
	b, _ := circuit.New("orders/3", breaker.Config{})
	var acked uint64                                 // an atomic, where another goroutine writes it
	defer b.Attach(func() uint64 { return acked })() //nolint:revive // it begins here and ends with the function

	before := b.Life() // at its first failure
	acked += 12
	fmt.Println("others succeeded:", b.Life()-before)
	// Output: others succeeded: 12
}

// Two partitions of three shut their topic for the third.
func ExampleScopes() {
	s, err := circuit.NewScopes(circuit.ScopesConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	var parts []*circuit.Leaf
	for _, p := range []string{"0", "1", "2"} {
		l, err := s.Leaf("billing", "orders", p)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer s.Release(l)
		parts = append(parts, l)
	}
	parts[0].Trip(time.Second, "test")
	fmt.Println("one open:", parts[2].Closed())
	parts[1].Trip(time.Second, "test")
	_, r := parts[2].Admit(time.Second, 1)
	fmt.Println("two open:", r.Scope, r.State, r.Cause)
	// Output:
	// one open: true
	// two open: billing/orders open quorum
}

func ExampleConfig_Validate() {
	fmt.Println(breaker.Config{Ratio: 5, Run: 1}.Validate())
	// Output:
	// breaker: config: Ratio: 5 is not in (0, 1)
	// breaker: config: Run: 1 is not in [2, 1000000]
}
