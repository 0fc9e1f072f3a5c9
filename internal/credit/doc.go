// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package credit bounds dead letters: successes earn credits, and each dead letter costs one.
// The storm detector needs a minute and enough messages to judge; a [Budget] needs neither.
// Its settings are dlq.BudgetConfig.
//
// Start with [New], one for each source. A Budget has no clock, no timer and no goroutine.
// Methods that need the present instant take it as an argument, so a test or a simulation of
// an hour runs at once.
package credit
