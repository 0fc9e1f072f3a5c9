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
// Its three callbacks run under its own lock, inside mu, and touch two fields
// only; calling it from one of them would deadlock. Its open period is the
// shortest it can have: ours is the gate's. Its counts are used for the
// half-open phase alone.
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

func (b *Breaker) onStateChange(_ string, _, to gobreaker.State) { b.judged = to }

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

// trippedGobreaker returns a fresh gobreaker that is open. Whatever still holds
// a request of the one it replaces can no longer move anything.
func (b *Breaker) trippedGobreaker() *gobreaker.TwoStepCircuitBreaker[struct{}] {
	gb := b.newGobreaker()
	b.tripGobreaker(gb)
	return gb
}
