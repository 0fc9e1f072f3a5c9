// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"math/bits"
	"slices"
	"strings"

	"github.com/stormguard-mq/stormguard/limiter"
)

func weight(m limiter.Member) int64 {
	switch {
	case m.NoShare:
		return 0
	case m.Weight == 0:
		return 1
	default:
		return int64(m.Weight)
	}
}

func byName(a, b limiter.Member) int { return cmp.Compare(a.Name, b.Name) }

// seatOf is the index of a name in a roster in order, -1 if it is not there.
func seatOf(members []limiter.Member, name string) int {
	i, ok := slices.BinarySearchFunc(members, name, func(m limiter.Member, name string) int {
		return strings.Compare(m.Name, name)
	})
	if !ok {
		return -1
	}
	return i
}

// weights is the sum of all weights and the least that is a share at all.
func weights(c *limiter.Charter) (sum, least int64) {
	for _, m := range c.Roster.Members {
		w := weight(m)
		sum += w
		if w > 0 && (least == 0 || w < least) {
			least = w
		}
	}
	return sum, least
}

// homed tells whether a limit lives on one home per key; see the limiter's small
// limits. A burst in two whole tokens per smallest share is spread.
func homed(c *limiter.Charter, l limiter.Limit, sum, least int64) bool {
	if len(c.Roster.Members) <= 1 {
		return false
	}
	hi, lo := bits.Mul64(uint64(l.Burst)*1_000_000, uint64(least))
	q, _ := bits.Div64(hi, lo, uint64(sum))
	return q < 2_000_000
}

func limitOf(c *limiter.Charter, key string) limiter.Limit {
	if l, ok := c.Limits[key]; ok {
		return l
	}
	return c.Limit
}

// losers are the names whose share of some limit's rate or burst shrinks from one
// charter to the next, or that may be the home of a small limit which moves away.
// It is never too few; a small limit whose homes move has all who may be one, for
// which of the keys are in use is nobody's to know.
func losers(from, to *limiter.Charter) []string {
	keys := map[string]bool{"": true} // those that have no limit of their own: no key is empty
	for k := range from.Limits {
		keys[k] = true
	}
	for k := range to.Limits {
		keys[k] = true
	}
	sum0, least0 := weights(from)
	sum1, least1 := weights(to)

	// Homes move away from a member only when another begins to mint.
	begins := false
	for _, m := range to.Roster.Members {
		if weight(m) > 0 {
			i := seatOf(from.Roster.Members, m.Name)
			begins = begins || i < 0 || weight(from.Roster.Members[i]) == 0
		}
	}
	all, cut := false, false // everybody loses; whoever's weight does not make up for it
	type ratio struct{ r0, r1, b0, b1 float64 }
	var spread []ratio
	for k := range keys {
		l0, l1 := limitOf(from, k), limitOf(to, k)
		h0, h1 := homed(from, l0, sum0, least0), homed(to, l1, sum1, least1)
		switch {
		case h0 && h1:
			all = all || begins || l1.Rate < l0.Rate || l1.Burst < l0.Burst
		case h0 != h1:
			all = true
		default:
			cut = true
			spread = append(spread, ratio{l0.Rate, l1.Rate, float64(l0.Burst), float64(l1.Burst)})
		}
	}
	var names []string
	for _, m := range from.Roster.Members {
		w0, w1 := weight(m), int64(0)
		if w0 == 0 {
			continue
		}
		if i := seatOf(to.Roster.Members, m.Name); i >= 0 {
			w1 = weight(to.Roster.Members[i])
		}
		loses := all || w1 == 0
		if cut && !loses {
			for _, s := range spread {
				// w1/sum1·r1 < w0/sum0·r0, and a rounding error counts as less.
				f := float64(w1) * float64(sum0) / (float64(w0) * float64(sum1))
				if f*s.r1 < s.r0 && !(w1*sum0 == w0*sum1 && s.r1 == s.r0) || f*s.b1 < s.b0 && !(w1*sum0 == w0*sum1 && s.b1 == s.b0) {
					loses = true
					break
				}
			}
		}
		if loses {
			names = append(names, m.Name)
		}
	}
	return names
}
