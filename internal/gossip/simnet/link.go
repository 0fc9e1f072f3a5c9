// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// A Link says what happens to packets one way between two nodes. The zero value delivers each
// packet once, at once, and in order. The delay is drawn for each packet separately, so packets
// overtake each other.
type Link struct {
	Base   time.Duration // least one-way delay
	Jitter time.Duration // mean of the exponential delay that is added

	Loss float64 // share of packets that are lost, drawn for each packet; in [0, 1]
	Dup  float64 // share of packets not lost that arrive twice, each copy with its own delay; in [0, 1]

	Burst Burst // loss in bursts, besides Loss
}

// Burst is loss in bursts after Gilbert and Elliott: the link is good or bad. The state changes
// with time and not with packets, so that an idle link recovers too. The zero value is always good.
// The link is bad for a share Bad/(Good+Bad) of the time.
type Burst struct {
	Good, Bad time.Duration // mean time in each state; both or neither
	Loss      float64       // share of packets lost while bad; in [0, 1]
}

// validate reports everything that is wrong with l.
func (l Link) validate() error {
	var wrong []error
	bad := func(field string, v any, want string) {
		wrong = append(wrong, fmt.Errorf("simnet: link: %s: %v is not in %s", field, v, want))
	}
	share := func(field string, v float64) {
		if !(v >= 0 && v <= 1) {
			bad(field, v, "[0, 1]")
		}
	}
	if l.Base < 0 {
		bad("Base", l.Base, "[0s, ∞)")
	}
	if l.Jitter < 0 {
		bad("Jitter", l.Jitter, "[0s, ∞)")
	}
	share("Loss", l.Loss)
	share("Dup", l.Dup)
	share("Burst.Loss", l.Burst.Loss)
	if l.Burst.Good < 0 || l.Burst.Bad < 0 || (l.Burst.Good == 0) != (l.Burst.Bad == 0) {
		bad("Burst", l.Burst, "both Good and Bad above 0s, or neither")
	}
	return errors.Join(wrong...)
}

// wire is one way between two nodes.
type wire struct {
	link  Link
	cut   bool
	bad   bool
	until time.Duration // true time at which bad changes; 0 before the first packet
}

// loses decides whether a packet that is sent at t is lost.
func (w *wire) loses(t time.Duration, rng *rand.Rand) bool {
	if b := &w.link.Burst; b.Good > 0 {
		if w.until == 0 {
			share := float64(b.Bad) / float64(b.Good+b.Bad)
			w.bad = rng.Float64() < share
			w.until = t + w.stay(rng)
		}
		for w.until <= t {
			w.bad = !w.bad
			w.until += w.stay(rng)
		}
		if w.bad && rng.Float64() < b.Loss {
			return true
		}
	}
	return w.link.Loss > 0 && rng.Float64() < w.link.Loss
}

// stay draws how long the state lasts. The exponential distribution has no memory: a state that is
// entered in the middle lasts as long as one that is entered at its start.
func (w *wire) stay(rng *rand.Rand) time.Duration {
	mean := w.link.Burst.Good
	if w.bad {
		mean = w.link.Burst.Bad
	}
	return exponential(mean, rng) + 1
}

func (w *wire) delay(rng *rand.Rand) time.Duration {
	if w.link.Jitter == 0 {
		return w.link.Base
	}
	return w.link.Base + exponential(w.link.Jitter, rng)
}

func exponential(mean time.Duration, rng *rand.Rand) time.Duration {
	return time.Duration(float64(mean) * rng.ExpFloat64())
}
