// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"hash/fnv"
	"math/bits"
)

// A Roster says who mints, and how much of it. Shares are configured, and never
// follow from who can be seen, or both sides of a split would mint it all.
//
// Who only borrows is in it too, with NoShare, or is a learner.
type Roster struct {
	// Number tells one roster from its successor. Nodes with different rosters
	// refuse each other's packets.
	Number  uint64
	Members []Member // at most 1,024, in any order; the same everywhere

	// Learners lets names that are not in the roster take part; they mint nothing and
	// live on loans. The price: a member that starts again mints nothing for 1.011 s,
	// for it cannot know all who may still hold what it had lent.
	Learners bool

	// Unstable says that names do not come back after a restart, as those of a
	// Deployment's pods do not. Then a share must not wait for its name: see
	// Config.OnSilence.
	Unstable bool
}

// A Member is a name with a share.
type Member struct {
	// Name is that of [crdt.Replica]: stable over restarts, and of one living
	// process at a time. A share whose name does not come back is stranded.
	Name string
	// Weight is the member's part of the sum of all weights. In [0, 1000000];
	// unset means 1 unless NoShare is set.
	Weight int
	// NoShare makes the weight 0: the member only borrows.
	NoShare bool
}

// Weighs is the weight that counts: Weight, 1 if that is unset, and 0 with NoShare.
func (m Member) Weighs() int64 {
	switch {
	case m.NoShare:
		return 0
	case m.Weight == 0:
		return 1
	default:
		return int64(m.Weight)
	}
}

func (r Roster) index(name string) int {
	for i, m := range r.Members {
		if m.Name == name {
			return i
		}
	}
	return -1
}

// admits tells whether the name may take part.
func (r Roster) admits(name string) bool { return r.Learners || r.index(name) >= 0 }

// weights is the sum of all, and the smallest that is a share at all.
func (r Roster) weights() (sum, least int64) {
	for _, m := range r.Members {
		w := m.Weighs()
		sum += w
		if w > 0 && (least == 0 || w < least) {
			least = w
		}
	}
	return sum, least
}

// part is v·w/sum, rounded down, so that parts never sum up to more than v.
func part(v, w, sum int64) int64 {
	if sum <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(v), uint64(w))
	q, _ := bits.Div64(hi, lo, uint64(sum)) // w <= sum, so hi < sum
	return int64(q)
}

// minSpread is the smallest share of the burst with which a limit is spread
// over the roster; below it the whole limit has one owner node per key.
//
// In a spread limit a node that has lent part of a token cannot mint a whole one
// with a cap of one, and with less it never has one: 5/s with a burst of 5 over 10
// nodes admits nothing. From two on all that waits is served, and what is lost is
// up to a token that each node has not completed, once. One owner has no such
// loss, at the price of a round trip for everybody else, of tokens that wait where
// nobody asks again, and of the whole limit while it is down: with demand that
// does not wait it admits less than a spread limit at any size above this.
const minSpread = 2 * micro

// owner is the index of the member on which the key lives, or -1 if it is spread.
func (r Roster) owner(key string, burst int64) int {
	sum, least := r.weights()
	if len(r.Members) <= 1 || part(burst, least, sum) >= minSpread {
		return -1
	}
	return r.rendezvous(key)
}

// rendezvous is the index of the member that a key chooses.
func (r Roster) rendezvous(key string) int {
	// Rendezvous hashing (Thaler and Ravishankar, 1996): every node finds the same
	// owner without asking, and keys spread evenly over owners.
	best, owner := uint64(0), -1
	for i, m := range r.Members {
		if m.Weighs() == 0 {
			continue
		}
		h := fnv.New64a()
		_, _ = h.Write([]byte(m.Name))
		_, _ = h.Write([]byte{0})
		_, _ = h.Write([]byte(key))
		if score := mix(h.Sum64()); owner < 0 || score > best {
			best, owner = score, i
		}
	}
	return owner
}

// seedOf is a number of the name's own.
func seedOf(name string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return mix(h.Sum64())
}

// mix is the finalizer of MurmurHash3: FNV alone leaves its high bits to the
// first bytes.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
