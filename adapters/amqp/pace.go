// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// ages tells how long the oldest open delivery has been out. It costs nothing per delivery: now and
// then it notes the latest tag. So it knows an age to within a 16th of the limit, and never takes
// it for less.
type ages struct {
	limit   time.Duration
	samples []sample // oldest first; together they span the limit
}

type sample struct {
	at   time.Time
	high uint64 // the latest tag delivered by then
}

const agesPerLimit = 16

func newAges(limit time.Duration) *ages { return &ages{limit: limit} }

// over tells whether the oldest open tag was out for as long as the limit,
// less the time to the next look.
func (a *ages) over(now time.Time, oldest, high uint64) bool {
	every := a.limit / agesPerLimit
	if n := len(a.samples); n == 0 || now.Sub(a.samples[n-1].at) >= every {
		a.samples = append(a.samples, sample{now, high})
	}
	drop := 0
	for drop < len(a.samples) && now.Sub(a.samples[drop].at) >= a.limit-every {
		drop++
	}
	if drop == 0 {
		return false
	}
	last := a.samples[drop-1]
	a.samples = append(a.samples[:0], a.samples[drop-1:]...)
	return oldest > 0 && last.high >= oldest
}

// pace is the ramp of an epoch that begins after a hold. The messages that the channel gave back
// are not in the source, so the source's own ramp does not see them.
type pace struct {
	inner guard.Limiter // the user's; may be nil
	ramp  guard.Ramp    // all fields are set

	mu       sync.Mutex
	starting bool // begin was called; the next Admit starts the ramp
	on       bool
	from     time.Duration
	admitted float64
}

// begin starts the ramp with the next admission.
func (p *pace) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starting = !p.ramp.Off
}

// Admit implements [guard.Limiter]: it applies the ramp, then the user's limiter.
func (p *pace) Admit(now time.Duration) time.Duration {
	if wait := p.wait(now); wait > 0 {
		return wait
	}
	if p.inner != nil {
		if wait := p.inner.Admit(now); wait > 0 {
			return wait
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.admitted++
	return 0
}

func (p *pace) wait(now time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.starting {
		p.starting, p.on, p.from, p.admitted = false, true, now, 0
	}
	if !p.on || now-p.from >= p.ramp.For {
		p.on = false
		return 0
	}
	return p.from + p.ramp.At(p.admitted) - now
}
