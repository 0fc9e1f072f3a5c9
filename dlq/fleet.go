// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import "fmt"

// A StormFleet compares the detectors of several processes: what a driver of
// detectors, such as a guard, asks of it. All methods are safe for concurrent use
// and do no I/O.
type StormFleet interface {
	// Report replaces what this process's detectors of a key see. A key names
	// what is compared: a topic or queue of a group, by the same name in all
	// processes. Call it as often as the detectors step.
	Report(key string, s Storm) error

	// Withdraw takes the report of a key back: this process has no source of it
	// any more.
	Withdraw(key string)

	// Storm is what the fleet makes of a key now. It takes a lock and looks at
	// each process: not for each delivery.
	Storm(key string) FleetStorm
}

// FleetStorm is what a fleet makes of one key. The zero value is no storm.
type FleetStorm struct {
	Active    bool
	Reporters int // processes that report the key and are heard, this one included
	Affected  int // of them in storm by their own detectors
	Need      int // how many that would have to be
}

// String says the verdict and its numbers, for people.
func (s FleetStorm) String() string {
	word := "no storm"
	if s.Active {
		word = "storm"
	}
	return fmt.Sprintf("%s of the fleet: %d of %d processes, %d make one", word, s.Affected, s.Reporters, s.Need)
}
