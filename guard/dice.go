// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"hash/fnv"
	"math/rand/v2"
	"sync"
)

// drawSeed makes the seed of a Guard without WithSeed.
var drawSeed = rand.Uint64

// dice makes the random numbers for jitter. It is safe for concurrent use.
type dice struct {
	mu   sync.Mutex
	rand *rand.Rand
}

func newDice(seed uint64) *dice { return &dice{rand: rand.New(rand.NewPCG(seed, 0))} }

func (d *dice) Float64() float64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rand.Float64()
}

func (d *dice) Int64N(n int64) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rand.Int64N(n)
}

// newRand makes the random generator of one epoch. Other sources do not change its numbers.
func (g *Guard) newRand(source string, epoch uint64) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(source))
	return rand.New(rand.NewPCG(g.seed+epoch, h.Sum64()))
}
