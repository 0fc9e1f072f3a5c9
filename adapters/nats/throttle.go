// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// Rate is a [guard.Limiter] for this process alone: so many admissions per
// second, with a burst. In any time t it admits at most burst + perSecond·t.
// Several sources may share one. It allocates nothing and costs a lock.
type Rate struct {
	each  time.Duration // between two admissions
	burst time.Duration // how far ahead of them one may be

	mu   sync.Mutex
	next time.Duration // the instant at which all that was admitted is earned
}

// NewRate makes a limit. perSecond is within 0.001 and 1e6, burst within 1 and
// 1e6.
func NewRate(perSecond float64, burst int) (*Rate, error) {
	var errs []error
	if !(perSecond >= 1e-3 && perSecond <= 1e6) {
		errs = append(errs, fmt.Errorf("nats: NewRate: %v per second is not within 0.001 and 1e6", perSecond))
	}
	if burst < 1 || burst > 1e6 {
		errs = append(errs, fmt.Errorf("nats: NewRate: a burst of %d is not within 1 and 1e6", burst))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	each := time.Duration(math.Ceil(float64(time.Second) / perSecond))
	return &Rate{each: each, burst: each * time.Duration(burst-1), next: math.MinInt64 / 2}, nil
}

// Admit takes one admission, or says how long to wait.
func (r *Rate) Admit(now time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if wait := r.next - r.burst - now; wait > 0 {
		return wait
	}
	r.next = max(r.next, now) + r.each
	return 0
}

// Throttle is [Consume] under a rate of its own, for a consumer of dead letters,
// also one whose handler and stream exist already: a DLQ is worked off at that
// rate, and not at all while the breaker of what it works with is open. Read
// what a dead letter says with [ReadDeadLetter].
//
// What fails here needs a place too: [WithDeadLetters] with another stream.
// Without it a letter that keeps failing waits, and unless the policy's order is
// none, those behind it wait as well.
func Throttle(ctx context.Context, g *guard.Guard, consumer jetstream.Consumer, rate *Rate, handle func(context.Context, jetstream.Msg) error, opts ...Option) error {
	if rate == nil {
		return errors.New("nats: Throttle: the rate must not be nil; make one with NewRate")
	}
	return Consume(ctx, g, consumer, handle, append(slices.Clip(opts), WithLimiter(rate))...)
}
