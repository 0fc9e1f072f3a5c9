// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build race

package gossip

// RaceEnabled is for tests outside the package too.
const RaceEnabled = true
