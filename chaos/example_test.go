// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaos_test

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/chaos"
)

// A program of yours records what happened in a run of its own, and has it judged.
func ExampleJudge() {
	drained := 9 * time.Second
	report := chaos.Judge(chaos.History{
		Schedule:  chaos.Schedule{Faults: []chaos.Fault{{Kind: chaos.Kill}}},
		Published: []chaos.Message{{ID: 1}, {ID: 2}, {ID: 3, Poison: true}},
		Starts:    []chaos.Start{{Process: 1}, {Process: 2, At: 4 * time.Second}},
		Effects:   []chaos.Effect{{ID: 1, Process: 1, At: 3 * time.Second}, {ID: 1, Process: 2, At: 5 * time.Second}},
		Letters:   []int{3},
		Fired:     []chaos.Fired{{Fault: 0, At: 4 * time.Second}},
		Healed:    4 * time.Second,
		Drained:   &drained,
	})
	fmt.Println("lost:", report.Lost, "duplicate effects:", report.DuplicateEffects, "drained after:", report.DrainSeconds)
	for _, first := range report.First {
		fmt.Println(first)
	}
	// Output:
	// lost: 1 duplicate effects: 1 drained after: 5
	// a second effect: 1
	// lost: 2
}
