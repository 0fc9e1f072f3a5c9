// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package credit bounds what may be dead-lettered: successes earn credits, and each dead
// letter costs one. The storm detector needs a minute to be sure, and a slow source may
// never give it enough to judge by; a [Budget] needs neither. Its settings are
// dlq.BudgetConfig.
//
// Start with [New], one for each source. A Budget has no clock, no timer and no
// goroutine: each method takes the present instant, so a test or a simulation runs an
// hour of it in no time.
package credit
