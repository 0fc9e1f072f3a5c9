// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func hostNow() Now {
	now := Now{Wall: time.Now()}
	var up unix.Timespec
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil && unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) == nil {
		now.Boot, now.Up = strings.TrimSpace(string(id)), time.Duration(up.Nano())
	}
	return now
}
