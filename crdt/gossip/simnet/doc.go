// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package simnet runs whole fleets in one goroutine, on simulated clocks and
// over a simulated network, exactly repeatable from a seed.
package simnet
