// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package storm tells a poison message from a storm, in which everything fails. In a
// storm nothing is to be dead-lettered; the source is held. Its settings, and what is
// shown of it, are in package dlq: StormConfig, Storm and FleetStorm.
//
// Start with [NewDetector], one for each source. A [Detector] has no clock, no timer and
// no goroutine: each method takes the present instant, so a test or a simulation runs an
// hour of it in no time. It does not know what a handler is, which deliveries are
// unsettled or whether a breaker is open: the guard says so.
package storm
