// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"hash/fnv"
	"math/bits"
)

// A Roster says which nodes mint, and how much. Shares are configured. They never follow
// from the nodes that are seen: otherwise both sides of a split would mint the whole limit.
//
// A node that only borrows is a member with NoShare, or a learner.
type Roster struct {
	// Number differs between a roster and its successor. Nodes with different rosters
	// refuse each other's packets.
	Number  uint64
	Members []Member // at most 1,024, in any order; the same at all nodes

	// Learners lets names that are not in the roster take part. They mint nothing, and only
	// borrow. The price: a member that starts again mints nothing for 1.011 s, since it does
	// not know which learners may still hold its loans.
	Learners bool

	// Unstable says that names do not come back after a restart, like those of the pods of a
	// Deployment. Then a share must not wait for its name: see Config.OnSilence.
	Unstable bool
}

// A Member is a name with a share.
type Member struct {
	// Name is the name of the [crdt.Replica]. It is stable over restarts, and only one living
	// process has it at a time. If the name does not come back, its share is stranded.
	Name string
	// Weight is the member's part of the sum of all weights. In [0, 1000000]; unset means 1
	// unless NoShare is set.
	Weight int
	// NoShare makes the weight 0: the member only borrows.
	NoShare bool
}

// Weighs returns the effective weight: Weight, or 1 if that is unset, or 0 with NoShare.
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

// weights returns the sum of all weights, and the smallest weight above 0.
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

// part returns v·w/sum, rounded down, so that parts never add up to more than v.
func part(v, w, sum int64) int64 {
	if sum <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(v), uint64(w))
	q, _ := bits.Div64(hi, lo, uint64(sum)) // w <= sum, so hi < sum
	return int64(q)
}

// minSpread is the smallest share of the burst with which a limit is spread over the
// roster. Below it the whole limit has one owner node per key.
//
// In a spread limit a node with a cap of one token cannot mint a whole token while it has
// lent part of one. With a smaller cap it never has a whole token: 5/s with a burst of 5
// over 10 nodes admits nothing. From two tokens on every waiter is served. Each node may lose
// up to one token that it has not completed, once.
//
// One owner has no such loss. Its price: other nodes need a round trip, tokens wait at nodes
// where nobody asks again, and the whole limit is gone while the owner is down. With demand
// that does not wait, an owner admits less than a spread limit at any size above minSpread.
const minSpread = 2 * micro

// owner returns the index of the key's owner, or -1 if the limit is spread.
func (r Roster) owner(key string, burst int64) int {
	sum, least := r.weights()
	if len(r.Members) <= 1 || part(burst, least, sum) >= minSpread {
		return -1
	}
	return r.rendezvous(key)
}

// rendezvous returns the index of the member that owns a key.
func (r Roster) rendezvous(key string) int {
	// Rendezvous hashing (Thaler and Ravishankar, 1996): every node computes the same owner,
	// and keys spread evenly over owners.
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

// seedOf returns a number that depends on the name only.
func seedOf(name string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return mix(h.Sum64())
}

// mix is the finalizer of MurmurHash3. In plain FNV the high bits depend mostly on the first
// bytes.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
