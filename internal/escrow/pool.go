// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "sync/atomic"

// A pool holds tokens that were taken from the level ahead, so that most admissions read no
// clock and take no lock. They stay part of the level.
//
// A pool below zero is empty too. If several callers see the last token at the same time,
// one gets it. Each of the others lowers the count by one, until the next fill or empty.
// Both are called under the set's lock.
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

// left returns how many tokens are in the pool.
func (p *pool) left() int64 { return max(0, p.n.Load()) }

// empty takes all tokens out of the pool, and returns how many.
func (p *pool) empty() int64 { return max(0, p.n.Swap(0)) }

// fill puts tokens into an empty pool.
func (p *pool) fill(n int64) { p.n.Store(n) }
