// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package chaosrun

import "os"

// freeze and thaw are refused by a system that has no such signals.
var freeze, thaw = os.Interrupt, os.Interrupt
