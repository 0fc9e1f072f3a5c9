// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import "github.com/stormguard-mq/stormguard/dlq"

// A Fleet compares the detectors of several processes. A driver of detectors, such as a
// guard, calls it. All methods are safe for concurrent use and do no I/O.
type Fleet interface {
	// Report replaces this process's report of a key. A key names a topic or queue of a
	// group, by the same name in all processes. Call it as often as the detectors step.
	Report(key string, s dlq.Storm) error

	// Withdraw removes this process's report of a key: it has no source of the key any more.
	Withdraw(key string)

	// Storm returns the fleet's present verdict about a key. It takes a lock and looks at each
	// process, so do not call it for each delivery.
	Storm(key string) dlq.FleetStorm
}
