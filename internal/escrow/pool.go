// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "sync/atomic"

// A pool holds tokens that were taken from the level ahead, so that most
// admissions read no clock and take no lock. They stay part of the level.
//
// Below zero is empty too: of those that see the last token at the same time,
// all but one find that they came too late, and leave their mark until the next
// fill or empty. Both of these are called under the set's lock.
type pool struct {
	n atomic.Int64 // tokens
}

// take takes one token if there is one. It looks before it subtracts, so that
// denials do not drive the pool below zero.
func (p *pool) take() bool { return p.n.Load() > 0 && p.n.Add(-1) >= 0 }

// takeN takes several, all or none.
func (p *pool) takeN(n int64) bool {
	for {
		had := p.n.Load()
		if had < n {
			return false
		}
		if p.n.CompareAndSwap(had, had-n) {
			return true
		}
	}
}

// left is what is in the pool.
func (p *pool) left() int64 { return max(0, p.n.Load()) }

// empty takes all that is in the pool.
func (p *pool) empty() int64 { return max(0, p.n.Swap(0)) }

// fill puts tokens into an empty pool.
func (p *pool) fill(n int64) { p.n.Store(n) }
