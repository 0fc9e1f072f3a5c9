// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq_test

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A source whose every message fails, after a million that succeeded.
func ExampleBudget() {
	b, err := dlq.NewBudget(dlq.BudgetConfig{}, 0.05)
	if err != nil {
		fmt.Println(err)
		return
	}
	b.Successes(1_000_000)
	for now := time.Duration(0); now <= 6*time.Minute; now += time.Millisecond {
		b.Spend(now, dlq.Exhausted)
	}
	fmt.Println("dead-lettered:", b.Spent(), "refused:", b.Refused())

	at, wait := b.Next(6*time.Minute, dlq.Exhausted)
	fmt.Println("next at:", at, "wait:", wait)

	b.Successes(1_000_030) // three credits
	fmt.Println("balance:", b.Balance(dlq.Exhausted))
	// Output:
	// dead-lettered: 21 refused: 359980
	// next at: 10m0.019s wait: true
	// balance: 3
}

// An operator has looked at the messages and lets them go.
func ExampleBudget_Grant() {
	b, _ := dlq.NewBudget(dlq.BudgetConfig{}, 0)
	b.Grant(300)
	for b.Spend(0, dlq.Exhausted) {
	}
	fmt.Println(b.Spent())
	// Output:
	// 320
}

// A storm threshold of 10 % is more poison than the default budget can carry.
func ExampleBudgetConfig_Validate() {
	fmt.Println(dlq.BudgetConfig{}.Validate(0.10))
	fmt.Println(dlq.BudgetConfig{Earn: 0.15}.Validate(0.10))
	// Output:
	// dlq: budget config: Earn is 0.1: with 0.1 of the deliveries failing, the storm threshold, successes earn 0.09 credits a delivery and dead letters cost 0.1: must be above 0.111111
	// <nil>
}
