// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build race

package guard

// RaceEnabled is for tests outside the package too.
const RaceEnabled = true
