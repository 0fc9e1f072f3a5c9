// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq_test

import (
	"fmt"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Every problem is reported at once.
func ExampleStormConfig_Validate() {
	fmt.Println(dlq.StormConfig{ErrorRate: 5, Attempts: -3}.Validate())
	// Output:
	// dlq: storm config: ErrorRate is 5: must be in (0, 1)
	// dlq: storm config: Attempts is -3: must be in [1, 1000000]
}

// A storm threshold of 10 % is more poison than the default budget can carry.
func ExampleBudgetConfig_Validate() {
	fmt.Println(dlq.BudgetConfig{}.Validate(0.10))
	fmt.Println(dlq.BudgetConfig{Earn: 0.15}.Validate(0.10))
	// Output:
	// dlq: budget config: Earn is 0.1: with 0.1 of the deliveries failing, the storm threshold, successes earn 0.09 credits a delivery and dead letters cost 0.1: must be above 0.111111
	// <nil>
}
