// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit

import "time"

// Saved is the state of a budget for the next process. The next process's clock must continue
// this process's clock.
type Saved struct {
	Has  [classes]uint64        `json:"has"`  // millionths of a credit, by class
	Free [classes]time.Duration `json:"free"` // when the next free credit comes
	Gift uint64                 `json:"gift,omitempty"`
}

// Save returns the state for the next process. It returns false if there is nothing to save:
// the budget is off, or all balances are full and there is no gift.
func (b *Budget) Save() (s Saved, ok bool) {
	for i, p := range b.pools {
		s.Has[i], s.Free[i] = uint64(p.has), p.free
		ok = ok || p.has < p.most
	}
	s.Gift = uint64(b.gift)
	return s, !b.off && (ok || s.Gift > 0)
}

// Restore sets the state that an earlier process saved. No balance exceeds its maximum, and no
// free credit is further away than FreeEvery.
func (b *Budget) Restore(now time.Duration, s Saved) {
	for i := range b.pools {
		p := &b.pools[i]
		p.has = min(credits(s.Has[i]), p.most)
		p.free = min(s.Free[i], now+b.every)
	}
	b.gift = min(credits(s.Gift), toCredits(mostGift))
}
