// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"math/bits"
	"time"
)

// maxRate bounds how wrong a clock's rate may be, in parts per million.
const maxRate = 100_000

// clock maps true time to a node's readings. The monotonic reading never goes back. It is exact
// integer arithmetic, so that runs repeat everywhere.
type clock struct {
	since  time.Duration // true time from which the other fields hold
	mono   time.Duration // monotonic reading at since
	ppm    int64         // rate error
	wall   time.Duration // wall clock less true time, without the rate error
	halted bool          // the machine is paused: the readings stand still
}

// at returns the own reading at true time t, which is not before since.
func (c *clock) at(t time.Duration) time.Duration {
	if c.halted {
		return c.mono
	}
	dt := t - c.since
	return c.mono + dt + drift(dt, c.ppm)
}

// wallAt returns the wall reading, in nanoseconds since the epoch's start.
func (c *clock) wallAt(t time.Duration) int64 {
	dt := t - c.since
	if c.halted {
		dt = 0
	}
	return int64(c.since + dt + drift(dt, c.ppm) + c.wall)
}

// drift is ⌊dt·ppm/10⁶⌋ towards zero.
func drift(dt time.Duration, ppm int64) time.Duration {
	neg := ppm < 0
	if neg {
		ppm = -ppm
	}
	hi, lo := bits.Mul64(uint64(dt), uint64(ppm))
	q, _ := bits.Div64(hi, lo, 1_000_000)
	if neg {
		return -time.Duration(q)
	}
	return time.Duration(q)
}

// when returns the first true time from now on at which the own reading is at
// least own.
func (c *clock) when(now, own time.Duration) time.Duration {
	if c.halted {
		return never
	}
	if c.at(now) >= own {
		return now
	}
	left := own - c.mono
	if left > never/2 {
		return never
	}
	hi, lo := bits.Mul64(uint64(left), 1_000_000)
	q, _ := bits.Div64(hi, lo, uint64(1_000_000+c.ppm))
	t := max(c.since+time.Duration(q)-2, now)
	for c.at(t) < own {
		t++
	}
	return t
}

// restart sets since to t. Both readings go on without a step.
func (c *clock) restart(t time.Duration) {
	mono, wall := c.at(t), c.wallAt(t)
	c.since, c.mono, c.wall = t, mono, time.Duration(wall)-t
}
