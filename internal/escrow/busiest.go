// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"cmp"
	"slices"
	"time"
)

// A KeyView is a key and its state at one node.
type KeyView struct {
	Key string
	View
}

// Admitted returns how many micro-tokens of the key this node has spent. It starts at 0
// again after the node has forgotten an idle key.
func (v View) Admitted() int64 { return v.Sums.Own + v.Sums.Borrowed }

// Busiest returns the keys of which this node has spent most tokens, the busiest first, and
// at most the given number. It looks at all keys: some 50 ns each.
func (n *Node) Busiest(now time.Duration, most int) []KeyView {
	n.advance(now)
	spent := func(r *row) int64 { return r.sum.Own + r.sum.Borrowed + r.pooled - r.leftInPool() }
	busier := func(a, b *row) int { return cmp.Or(cmp.Compare(spent(b), spent(a)), cmp.Compare(a.name, b.name)) }
	top := make([]*row, 0, most+1)
	for _, r := range n.rows {
		i, _ := slices.BinarySearchFunc(top, r, busier)
		if top = slices.Insert(top, i, r); len(top) > most {
			top = top[:most]
		}
	}
	views := make([]KeyView, len(top))
	for i, r := range top {
		v, _ := n.View(now, r.name)
		views[i] = KeyView{r.name, v}
	}
	return views
}

// leftInPool is the part of pooled that is still in the pool, in micro-tokens.
func (r *row) leftInPool() int64 {
	if r.pooled == 0 {
		return 0
	}
	return r.pool.left() * micro
}

// Busiest is [Node.Busiest], under the set's lock.
func (s *Set) Busiest(most int) []KeyView {
	if s.pool != nil {
		return s.pool.busiest(most)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.node.Busiest(s.clock(), most)
}
