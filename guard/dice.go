// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"hash/fnv"
	"math/rand/v2"
	"sync"
)

// drawSeed is where the seed of a Guard comes from that WithSeed does not give.
var drawSeed = rand.Uint64

// dice is where jitter comes from. It is safe for concurrent use.
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

// newRand is an epoch's own: what other sources draw does not change it.
func (g *Guard) newRand(source string, epoch uint64) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(source))
	return rand.New(rand.NewPCG(g.seed+epoch, h.Sum64()))
}
