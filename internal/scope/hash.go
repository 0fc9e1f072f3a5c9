// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

// The rendezvous order needs a hash that is the same in every process and every version. It is
// FNV-1a over the parts, each followed by its length. A finaliser then spreads the last byte over
// all bits (Stafford's thirteenth variant of MurmurHash3's).

// HashInit begins a hash.
const HashInit uint64 = 14695981039346656037

// HashString adds a text and its length.
func HashString(h uint64, s string) uint64 {
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return HashNumber(h, uint64(len(s)))
}

// HashNumber adds a number.
func HashNumber(h, n uint64) uint64 {
	for range 8 {
		h = (h ^ n&0xff) * 1099511628211
		n >>= 8
	}
	return h
}

// HashEnd ends a hash.
func HashEnd(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// rank returns the place of name in the order of a round; the lowest is first. Source: D. G. Thaler
// and C. V. Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM Trans. Netw. 6
// (1998).
func rank(scope string, at Position, name string) uint64 {
	h := HashString(HashInit, scope)
	h = HashNumber(h, at.Gen)
	h = HashNumber(h, uint64(at.Round))
	return HashEnd(HashString(h, name))
}
