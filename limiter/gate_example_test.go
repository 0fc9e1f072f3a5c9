// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

func mustLocal(rate float64, burst int) *limiter.Limiter {
	l, err := limiter.Local(limiter.Limit{Rate: rate, Burst: burst})
	if err != nil {
		log.Fatal(err)
	}
	return l
}

// One process, one limit.
func ExampleLocal() {
	l, err := limiter.Local(limiter.Limit{Rate: 2, Burst: 3})
	if err != nil {
		log.Fatal(err)
	}
	for range 3 {
		fmt.Print(l.Allow(), " ")
	}
	fmt.Println(l.AllowN(3))
	fmt.Println(l.Wait(context.Background())) // half a second
	// Output:
	// true true true false
	// <nil>
}

// A tenant's limit and everybody's: what one of them refuses takes nothing from the
// other.
func ExampleAll() {
	everybody := mustLocal(.001, 10)
	a := limiter.All(mustLocal(.001, 2), everybody)
	b := limiter.All(mustLocal(.001, 100), everybody)
	fmt.Println(a.AllowN(3), a.AllowN(2), b.AllowN(9), b.AllowN(8))
	// Output: false true false true
}

// What would a limit of 3 deny?
func ExampleObserve() {
	denied := 0
	g := limiter.Observe(mustLocal(.001, 3), func(n int) { denied += n })
	for range 10 {
		g.Allow()
	}
	fmt.Println(denied)
	// Output: 7
}

func ExampleEnter() {
	g := mustLocal(.01, 1)
	g.Allow()
	err := limiter.Enter(context.Background(), g, 100*time.Millisecond)
	if denied, ok := errors.AsType[*limiter.DeniedError](err); ok {
		fmt.Println("in about", denied.After.Round(10*time.Second))
	}
	// Output: in about 1m40s
}
