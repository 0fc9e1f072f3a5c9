// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm_test

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// A dependency dies a second after the start. The breaker trips after twenty
// failures, so nothing fails any more; the storm is seen none the less, once
// the oldest delivery is a minute old.
func ExampleDetector() {
	d, err := storm.NewDetector(dlq.StormConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	const down = time.Second
	for range 20 {
		d.Failure(down)
	}
	d.Freeze(down)

	for now := down; now < 3*time.Minute; now += time.Second {
		back := now >= 2*time.Minute
		reading := storm.Reading{Attempts: 5, Age: now - down} // the hold's head was probed
		if back {
			reading = storm.Reading{}
			d.Probe(now, true)
		} else {
			d.Diverted(now, 1000)
		}
		d.Successes(now, 0)
		if d.Step(now, reading) {
			fmt.Println(now, d.Storm())
		}
	}
	// Output:
	// 1m2s storm: error rate 100% (20 of 20, trip) > 5%, attempts 5 > 3, age 1m1s > 1m0s, 61000 diverted in 1m0s
	// 2m10s no storm: error rate 0% (0 of 11, probes) <= 5%, attempts 0 <= 3, age 0s <= 1m0s, 50000 diverted in 1m0s
}

// Two of the three thresholds are crossed by one poison message that is tried
// again and again. That is no storm.
func ExampleDetector_Step() {
	d, _ := storm.NewDetector(dlq.StormConfig{})
	d.Failure(0)
	d.Successes(0, 999)
	d.Step(0, storm.Reading{Attempts: 12, Age: 5 * time.Minute})
	fmt.Println(d.Storm())
	// Output:
	// no storm: error rate 0.1% (1 of 1000, window) <= 5%, attempts 12 > 3, age 5m0s > 1m0s
}
