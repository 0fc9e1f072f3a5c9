// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "time"

// hostClock is the same in all processes of the host, while nobody sets its clock.
func hostClock() time.Duration { return time.Duration(time.Now().UnixNano()) }
