// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package storm distinguishes a poison message from a storm, in which everything fails. In a
// storm messages must not be dead-lettered; the source is held. The settings and the reported
// state are in package dlq: StormConfig, Storm and FleetStorm.
//
// Start with [NewDetector], one for each source. A [Detector] has no clock, no timer and no
// goroutine. Methods take the present instant as an argument, so a test or a simulation of an
// hour runs at once. A Detector does not know handlers, unsettled deliveries or breakers: the
// guard tells it.
package storm
