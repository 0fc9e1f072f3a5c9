// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build race

package guard

// RaceEnabled asks tests for short forms: the race detector needs each way once, and would make
// minutes of all of them. The run without it has them whole. Tests outside the package use it too.
const RaceEnabled = true
