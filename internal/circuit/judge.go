// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"errors"
	"time"

	"github.com/sony/gobreaker/v2"
)

// newGobreaker returns a closed gobreaker that trips when b.verdict says so.
//
// Its three callbacks run under gobreaker's lock, inside mu, and touch two fields only. A
// call of gobreaker from a callback would deadlock. gobreaker's open period is as short as
// possible, since the gate has the real one. Its counts only serve the half-open phase.
func (b *Breaker) newGobreaker() *gobreaker.TwoStepCircuitBreaker[struct{}] {
	return gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name:          b.name,
		MaxRequests:   uint32(b.cfg.Successes),
		Timeout:       time.Nanosecond,
		ReadyToTrip:   b.readyToTrip,
		OnStateChange: b.onStateChange,
		IsExcluded:    isExcluded,
	})
}

func (b *Breaker) readyToTrip(gobreaker.Counts) bool { return b.verdict }

func (b *Breaker) onStateChange(_ string, _, to gobreaker.State) { b.gobreakerState = to }

func isExcluded(err error) bool { return errors.Is(err, errExcluded) }

// tripGobreaker brings a closed gobreaker to open. A closed one never refuses.
func (b *Breaker) tripGobreaker(gb *gobreaker.TwoStepCircuitBreaker[struct{}]) {
	done, err := gb.Allow()
	if err != nil {
		return
	}
	b.verdict = true
	done(errFailed)
	b.verdict = false
}

// trippedGobreaker returns a new gobreaker that is open. Requests of the gobreaker that it
// replaces no longer change anything.
func (b *Breaker) trippedGobreaker() *gobreaker.TwoStepCircuitBreaker[struct{}] {
	gb := b.newGobreaker()
	b.tripGobreaker(gb)
	return gb
}
