// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit_test

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// A source whose every message fails, after a million that succeeded.
func ExampleBudget() {
	b, err := credit.New(dlq.BudgetConfig{}, 0.05)
	if err != nil {
		fmt.Println(err)
		return
	}
	b.Successes(1_000_000)
	for now := time.Duration(0); now <= 6*time.Minute; now += time.Millisecond {
		b.Spend(now, credit.Exhausted)
	}
	fmt.Println("dead-lettered:", b.Spent(), "refused:", b.Refused())

	at, wait := b.Next(6*time.Minute, credit.Exhausted)
	fmt.Println("next at:", at, "wait:", wait)

	b.Successes(1_000_030) // three credits
	fmt.Println("balance:", b.Balance(credit.Exhausted))
	// Output:
	// dead-lettered: 21 refused: 359980
	// next at: 10m0.019s wait: true
	// balance: 3
}

// An operator has looked at the messages and lets them go.
func ExampleBudget_Grant() {
	b, _ := credit.New(dlq.BudgetConfig{}, 0)
	b.Grant(300)
	for b.Spend(0, credit.Exhausted) {
	}
	fmt.Println(b.Spent())
	// Output:
	// 320
}
