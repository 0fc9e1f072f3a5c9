// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import "github.com/stormguard-mq/stormguard/dlq"

// A Fleet compares the detectors of several processes: what a driver of
// detectors, such as a guard, asks of it. All methods are safe for concurrent use
// and do no I/O.
type Fleet interface {
	// Report replaces what this process's detectors of a key see. A key names
	// what is compared: a topic or queue of a group, by the same name in all
	// processes. Call it as often as the detectors step.
	Report(key string, s dlq.Storm) error

	// Withdraw takes the report of a key back: this process has no source of it
	// any more.
	Withdraw(key string)

	// Storm is what the fleet makes of a key now. It takes a lock and looks at
	// each process: not for each delivery.
	Storm(key string) dlq.FleetStorm
}
