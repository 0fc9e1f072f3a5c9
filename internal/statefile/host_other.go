// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package statefile

import "time"

func hostNow() Now { return Now{Wall: time.Now()} }
