// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit

import "time"

// Saved is what a budget leaves to the next process, whose clock goes on where this one's
// would be.
type Saved struct {
	Has  [classes]uint64        `json:"has"`  // millionths of a credit, by class
	Free [classes]time.Duration `json:"free"` // when the next free credit comes
	Gift uint64                 `json:"gift,omitempty"`
}

// Save is what the next process has to know, and false if that is nothing: full balances
// and no gift.
func (b *Budget) Save() (s Saved, ok bool) {
	for i, p := range b.pools {
		s.Has[i], s.Free[i] = uint64(p.has), p.free
		ok = ok || p.has < p.most
	}
	s.Gift = uint64(b.gift)
	return s, !b.off && (ok || s.Gift > 0)
}

// Restore takes up what an earlier process saved. No balance gets above its maximum, and no free credit is further away than FreeEvery.
func (b *Budget) Restore(now time.Duration, s Saved) {
	for i := range b.pools {
		p := &b.pools[i]
		p.has = min(credits(s.Has[i]), p.most)
		p.free = min(s.Free[i], now+b.every)
	}
	b.gift = min(credits(s.Gift), toCredits(mostGift))
}
