// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// Config says how the fleet decides about breakers. The zero value is valid. All processes of a
// fleet need the same Quorum and Successes.
type Config = breaker.FleetConfig

// Roster lists the names that may vote.
type Roster = breaker.Roster

const never = scope.Never

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// checks collects the faults of a configuration.
type checks []error

func (w *checks) bad(field string, value any, want string) {
	*w = append(*w, fmt.Errorf("%w: %s: %v is not in %s", ErrConfig, field, value, want))
}

func (w *checks) span(field string, v, lo, hi time.Duration) {
	if v < lo || v > hi {
		w.bad(field, v, fmt.Sprintf("[%v, %v]", lo, hi))
	}
}

func (w *checks) count(field string, v, most int) {
	if v < 1 || v > most {
		w.bad(field, v, fmt.Sprintf("[1, %d]", most))
	}
}

func (w *checks) share(field string, v float64) {
	if !(v > 0 && v <= 1) {
		w.bad(field, v, "(0, 1]")
	}
}
